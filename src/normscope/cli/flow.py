"""`normscope flow`: how much of the last hidden states, or of a logit, comes from each input token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from normscope.cli import completion, loading, options, texts
from normscope.cli.progress import quiet
from normscope.errors import NormscopeError
from normscope.view.formats import FLOW_SUFFIXES, check_path

if TYPE_CHECKING:
    from normscope import Analyzer
    from normscope.flow.result import Flow


def _position(position: int | None) -> int | None:
    if position == 0:
        raise typer.BadParameter("positions are counted from 1, or from -1 at the end: there is no position 0.")
    return position


def flow(
    text: options.Text,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="TARGET",
            help="Explain a logit: a class, a token, or 'top' for the prediction (default: the last hidden states).",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="TARGET", help="Second target: explain the difference of the two logits."),
    ] = None,
    position: Annotated[
        int | None,
        typer.Option(
            "--position",
            metavar="P",
            callback=_position,
            help="Token whose logit is explained, counted from 1, or from -1 at the end (default: last, or the mask).",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="NAME",
            help="Attribution method, such as exact, decompx, alti or rollout:layer.",
            autocompletion=completion.complete_method,
        ),
    ] = "exact",
    pair: options.Pair = None,
    generate: options.Generate = None,
    chat: options.Chat = False,
    gate: Annotated[
        str,
        typer.Option(
            "--gate",
            metavar="NAME",
            help="How the activation is split over tokens: ig, frozen or tangent (inexact).",
            autocompletion=completion.complete_flow_gate,
        ),
    ] = "ig",
    truncate: options.Truncate = False,
    out: options.Files = None,
    model: options.Model = options.DEFAULT,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
) -> None:
    """Follow the input tokens through all layers, to the last hidden states or to a logit.

    Prints a map, or with --target the score of every token. Writes .svg, .pdf, .png, .json and, with --target, .html.

    Example: normscope flow "The boy was very" --model gpt2 --target happy --against sad
    """
    _check(target, against, position, out or [])
    source = loading.source_of(model, device, dtype, revision)
    text = texts.read_text(text)
    with quiet():
        lens = loading.load(source)
        given = {**texts.arguments(lens, text, pair, chat, generate), "truncation": truncate, "gate": gate}
        found = lens.flow(
            **given,
            method=method,
            target=target if target is None or against is None else (target, against),
            position=position - 1 if position is not None and position > 0 else position,
        )
        for path in out or []:
            _write(lens, found, given, path)
        told = _tell(found)
    if not out:
        Console(highlight=False).print(told)
        return
    from normscope.view import flow_terminal

    line = _one_line(found) if target is None else flow_terminal.equation(found)
    typer.echo(f"{line}: wrote {', '.join(map(str, out))}")


def _check(target: str | None, against: str | None, position: int | None, out: Sequence[Path]) -> None:
    """Refuse options that need a target, and files that cannot be written."""
    for option, value in (("--against", against), ("--position", position)):
        if target is None and value is not None:
            raise NormscopeError(f"{option} needs a target: add --target, such as --target top.")
    for path in out:
        check_path(path, FLOW_SUFFIXES)
        if target is None and path.suffix.lower() == ".html":
            raise NormscopeError(
                f"Cannot write {path}: a page shows the scores of a target. Add --target, or write .json or a figure."
            )


def _tell(found: Flow) -> Any:
    """What the terminal shows of a flow."""
    from normscope.view import flow_terminal

    if found.to is not None:
        return flow_terminal.scores(found)
    return flow_terminal.map_of(found)


def _one_line(found: Flow) -> str:
    from normscope.view.flow_terminal import completeness

    told = completeness(found)
    return f"{len(found.rows)} tokens, {len(found.layers)} layers [{found.method}]" + (f", {told}" if told else "")


def _write(lens: Analyzer, found: Flow, given: Mapping[str, Any], path: Path) -> None:
    from normscope.view import figure, flow_export

    suffix = path.suffix.lower()
    if suffix == ".json":
        flow_export.write_json(found, path)
    elif suffix == ".html":
        texts.analyze_shown(lens, **given).to_html(path, flow=found)
    else:
        figure.save(figure.figure_of(found.plot()), path)
