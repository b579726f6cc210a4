"""`normscope analyze`: one text, its maps in the terminal or in files; with a target, the scores of its tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from normscope.cli import shared
from normscope.cli.explain import aim_of, check_options, check_path, explain
from normscope.cli.shared import DEFAULT, Dtype, Model
from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from normscope import Analysis, Analyzer
    from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis


class Side(StrEnum):
    """Sides of an encoder-decoder."""

    encoder = "encoder"
    decoder = "decoder"


def _row(rows: list[int] | None) -> list[int] | None:
    if rows and 0 in rows:
        raise typer.BadParameter("rows are counted from 1, or from -1 at the end: there is no row 0.")
    return rows


def _place(position: int | None) -> int | None:
    if position == 0:
        raise typer.BadParameter("positions are counted from 1, or from -1 at the end: there is no position 0.")
    return position


def analyze(
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="The text; - reads it from standard input. For a vision model the path of a picture.",
            show_default=False,
        ),
    ],
    pair: Annotated[
        str | None,
        typer.Option(
            "--pair",
            metavar="TEXT2",
            help="A second text: both as a pair. Of an encoder-decoder what it writes; default: what it would write.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="T",
            help="Explain a logit by the input tokens: a class, a token, or 'top', what the model predicts.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="T", help="A second target: explain the difference of the two logits."),
    ] = None,
    position: Annotated[
        int | None,
        typer.Option(
            "--position",
            metavar="P",
            callback=_place,
            help="Where the logit is read, from 1, or from -1 at the end. Default: the last token, or the mask.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option("--method", metavar="NAME", help="How a target is explained: exact, decompx, alti, rollout, ..."),
    ] = "exact",
    generate: Annotated[
        int | None, typer.Option("--generate", metavar="N", min=1, help="Go on with N tokens of the model's own.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="TEXT is a user's message: put it through the model's chat template.")
    ] = False,
    model: Model = DEFAULT,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope", "-s", metavar="S", help="A scope, such as ATTNRESLN-N or layer; repeatable. Default: all."
        ),
    ] = None,
    layer: Annotated[
        list[int] | None,
        typer.Option("--layer", "-l", metavar="L", min=1, help="A layer, counted from 1; repeatable. Default: all."),
    ] = None,
    row: Annotated[
        list[int] | None,
        typer.Option(
            "--row",
            metavar="R",
            callback=_row,
            help="An output token, counted from 1, or from -1 at the end; repeatable. Default: all.",
        ),
    ] = None,
    side: Annotated[
        Side | None,
        typer.Option(
            "--side",
            help="One side of an encoder-decoder. Default: the decoder is shown, files hold both.",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[bool, typer.Option("--heads", help="Also the maps of every attention head, for files.")] = False,
    gate: Annotated[
        str,
        typer.Option(
            "--gate",
            metavar="NAME",
            help="How the feed-forward's activation is split: ig, shapley (slow), frozen, or tangent (inexact).",
        ),
    ] = "ig",
    value_bias: Annotated[
        str,
        typer.Option("--value-bias", metavar="WHERE", help="Where the value bias counts: token, or remainder."),
    ] = "token",
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a text that is too long for the model.")] = False,
    dtype: Dtype = None,
    device: Annotated[str | None, typer.Option("--device", metavar="D", help="cpu, cuda, cuda:1, mps ...")] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write .html .svg .pdf .png .json .npz or .safetensors instead of printing; repeatable.",
        ),
    ] = None,
) -> None:
    """Analyse a text: its last scope and layer as a map in the terminal, or everything in files. With --target, how
    much each token adds to a logit.

    Example: normscope analyze "Colin Fleming plays tennis." --layer 6 --scope attention-block -o map.svg
    """
    from normscope.view import export, terminal

    aim = aim_of(target, against, position, method)
    if aim is not None:
        bias = value_bias != "token"
        check_options(
            {"--scope": scope, "--layer": layer, "--row": row, "--side": side, "--heads": heads, "--value-bias": bias}
        )
    for path in out or []:
        export.check_path(path)
        if aim is not None:
            check_path(path)
    text = _read(text)
    with shared.quiet():
        lens = shared.load(model, dtype, device)
        _check_side(lens, side, row)
        if chat and pair is not None and (aim is not None or not lens.two_sided):
            raise NormscopeError("--chat puts one message through the chat template: leave --pair or --chat out.")
        given: dict[str, Any] = {"text": None if chat else text if pair is None or lens.two_sided else (text, pair)}
        if chat:
            given["chat"] = [{"role": "user", "content": text}]
        if generate is not None:
            given["generate"] = generate
        if aim is not None:
            if pair is not None:
                given["text"] = (text, pair)
            explain(lens, given, aim, out or [], truncate, gate)
            return
        layers = None if not layer else _from_zero(layer, lens.depth)
        result: Any = shared.analyzed(
            lens,
            given.pop("text"),
            **given,
            **({"text_target": pair} if pair is not None and lens.two_sided else {}),
            scopes=scope or None,
            layers=layers and sorted(set(layers)),
            rows=None if not row else [r - 1 if r > 0 else r for r in row],
            heads=heads,
            truncation=truncate,
            gate=gate,
            value_bias=value_bias,
        )
        if side is not None:
            result = result.side(side.value)
        shown = shared.main_side(result, scope)
        written = [_export(result, shown, path, text) for path in out or []]
    if written:
        typer.echo(_one_line(result, written))
        return
    last = layers[-1] if layers and layers[-1] in shown.layers else None
    views = [terminal.heat_map(shown, scope[-1] if scope else None, last)]
    if not scope and shown.has("XATTN-N"):
        views.append(terminal.heat_map(shown, "XATTN-N", last))
    console = Console(highlight=False)
    for view in views:
        console.print(view, "", sep="\n")
    console.print(terminal.layer_tables(shown))


def _check_side(lens: Analyzer, side: Side | None, rows: Sequence[int] | None) -> None:
    if side is not None and not lens.two_sided:
        raise NormscopeError("--side is for encoder-decoders; this model has one side. Leave it out.")
    if side is Side.encoder and rows:
        raise NormscopeError("--row chooses outputs of the decoder: leave it out with --side encoder.")


def _export(result: Analysis | EncoderDecoderAnalysis, shown: Analysis, path: Path, text: str) -> Path:
    """Write a file; a figure is of the one scope and layer that were asked for, or of all of them."""
    from normscope.view import export

    figure = path.suffix.lower() in export.FIGURES
    scope = shown.scopes[0] if len(shown.scopes) == 1 else None
    layer = shown.layers[0] if len(shown.layers) == 1 else None
    picture = text if "grid" in shown.info else None
    return export.export(shown if figure else result, path, scope, layer, image=picture)


def _read(text: str) -> str:
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise NormscopeError("The text on standard input is not UTF-8.") from error


def _from_zero(layers: Sequence[int], depth: int) -> list[int]:
    for layer in layers:
        if layer > depth:
            raise shared.no_layer(layer, depth)
    return [layer - 1 for layer in layers]


def _one_line(result: Analysis | EncoderDecoderAnalysis, written: Sequence[Path]) -> str:
    from normscope.view.labels import worst_completeness

    sides: dict[str, Analysis] = getattr(result, "sides", None) or {"": result}
    counts = "; ".join(
        f"{side} {len(one.rows)} tokens, {len(one.layers)} layers, {len(one.scopes)} scopes".strip()
        for side, one in sides.items()
    )
    error = max((worst_completeness(one)[0] for one in sides.values()), key=lambda e: (e != e, e))
    return f"{counts}, worst completeness error {error:.1e}: wrote {', '.join(map(str, written))}"
