"""`normscope flow`: contributions of the input tokens to the last hidden states or to a logit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from normscope.cli import completion, loading, options, texts
from normscope.cli.progress import progress_bars, silence_library_progress
from normscope.errors import NormscopeError
from normscope.step_progress import follow_steps
from normscope.view.formats import FLOW_SUFFIXES, check_output_path

if TYPE_CHECKING:
    from normscope import Analyzer
    from normscope.flow.result import Flow


def _check_position_option(position: int | None) -> int | None:
    if position == 0:
        raise typer.BadParameter("positions are counted from 1, or backwards from -1; 0 is not a position.")
    return position


TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        "-t",
        metavar="TARGET",
        help="Explain a logit: a class, a token, or 'top' for the prediction; a text of several tokens is explained as "
        "the continuation (default: the last hidden states).",
        show_default=False,
    ),
]
AgainstOption = Annotated[
    str | None,
    typer.Option("--against", metavar="TARGET", help="Second target: explain the difference of the two logits."),
]
PositionOption = Annotated[
    int | None,
    typer.Option(
        "--position",
        metavar="P",
        callback=_check_position_option,
        help="Token whose logit is explained, counted from 1, or backwards from -1 (default: last, or the mask).",
        show_default=False,
    ),
]
MethodOption = Annotated[
    str,
    options.completed_option(
        "--method",
        "NAME",
        "Attribution method, such as exact, decompx, alti or rollout:layer.",
        completion.complete_method,
    ),
]
GateOption = Annotated[
    str,
    options.completed_option(
        "--gate",
        "NAME",
        "How the activation is split over tokens: ig, frozen or tangent (inexact).",
        completion.complete_flow_gate,
    ),
]


def flow_command(
    text: options.Text,
    target: TargetOption = None,
    against: AgainstOption = None,
    position: PositionOption = None,
    method: MethodOption = "exact",
    pair: options.Pair = None,
    generate: options.Generate = None,
    chat: options.Chat = False,
    gate: GateOption = "ig",
    truncate: options.Truncate = False,
    out: options.Files = None,
    model: options.Model = options.DEFAULT,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    derive: options.Derive = True,
) -> None:
    """Follow the input tokens through all layers, to the last hidden states or to a logit.

    Prints a map, or with --target the score of every token. Writes .html, .svg, .pdf, .png, .json and .safetensors.

    With --target, the .html page is the viewer; without, it is a table of the map.

    Example: normscope flow "The boy was very" --model gpt2 --target happy --against sad
    """
    _check_flow_options(target, against, position, out or [])
    source = loading.find_model_source(model, device, dtype, revision, derive)
    text = texts.read_cli_text_argument(text)
    with silence_library_progress():
        lens = loading.load_analyzer(source)
        given = {**texts.cli_text_arguments(lens, text, pair, chat, generate), "truncation": truncate, "gate": gate}
        if method == "exact":
            _print_flow_estimate(lens, given, target is None)
        with progress_bars() as show:
            found = lens.flow(
                **given,
                method=method,
                target=target if target is None or against is None else (target, against),
                position=position - 1 if position is not None and position > 0 else position,
                progress=None if show is None else partial(show, "steps"),
            )
            if target is None:
                with nullcontext() if show is None else follow_steps(partial(show, "maps"), {}):
                    found.maps  # noqa: B018  # computed when first read
        for path in out or []:
            _write_flow_file(lens, found, given, path)
        view = _flow_view(found)
    if not out:
        Console(highlight=False).print(view)
        return
    from normscope.view.tokens import target_equation

    line = _flow_line(found) if target is None else target_equation(found)
    typer.echo(f"{line}: wrote {', '.join(map(str, out))}")


def _check_flow_options(target: str | None, against: str | None, position: int | None, out: Sequence[Path]) -> None:
    """Raise if an option needs a target, or a file cannot be written."""
    for option, value in (("--against", against), ("--position", position)):
        if target is None and value is not None:
            raise NormscopeError(f"{option} needs a target: add --target, such as --target top.")
    for path in out:
        check_output_path(path, FLOW_SUFFIXES)


def _print_flow_estimate(lens: Analyzer, given: Mapping[str, Any], maps: bool) -> None:
    """Print the estimate of a long flow; not of one to a target text that is not known yet."""
    from normscope.flow.cost import flow_cost
    from normscope.inputs.encode import encode_one

    if lens.two_sided and not isinstance(given["text"], tuple):
        return
    item = encode_one(lens.loaded, given["text"], None, given.get("chat"), None, None, given["truncation"])
    columns = sum(len(side.names) for side in item.sides.values())
    texts.print_long_estimate(flow_cost(lens.loaded, item, columns if maps else 1, given.get("generate", 0)))


def _flow_view(found: Flow) -> Any:
    """The terminal view of a flow."""
    from normscope.view.terminal.flow import terminal_flow_map, terminal_flow_scores

    if found.to is not None:
        return terminal_flow_scores(found)
    return terminal_flow_map(found)


def _flow_line(found: Flow) -> str:
    from normscope.view.tokens import completeness_note

    note = completeness_note(found)
    return f"{len(found.rows)} tokens, {len(found.layers)} layers [{found.method}]" + (f", {note}" if note else "")


def _write_flow_file(lens: Analyzer, found: Flow, given: Mapping[str, Any], path: Path) -> None:
    from normscope.view.export import export_flow_json
    from normscope.view.figure.maps import figure_of
    from normscope.view.figure.style import save_figure

    suffix = path.suffix.lower()
    if suffix == ".json":
        export_flow_json(found, path)
    elif suffix == ".safetensors":
        found.save(path)
    elif suffix == ".html" and found.to is None:
        found.to_html(path)
    elif suffix == ".html":
        analysis = texts.analyze_cli_text(lens, **given)
        if texts.main_side(analysis).columns == found.columns:
            analysis.to_html(path, flow=found)
        else:  # a target of several tokens continues the text, and the viewer has no column for them
            found.to_html(path)
    else:
        save_figure(figure_of(found.plot()), path)
