"""`normscope analyze`: the maps of one text, in the terminal or in files."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from normscope.cli import completion, loading, options, texts
from normscope.cli.progress import silence_library_progress
from normscope.errors import NormscopeError
from normscope.labels import count_label
from normscope.view.formats import FIGURES, check_output_path
from normscope.view.wording import missing_layer_wording

if TYPE_CHECKING:
    from normscope import Analysis, Analyzer
    from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis


class Side(StrEnum):
    """Sides of an encoder-decoder."""

    encoder = "encoder"
    decoder = "decoder"


def _check_row_option(rows: list[int] | None) -> list[int] | None:
    if rows and 0 in rows:
        raise typer.BadParameter("rows are counted from 1, or backwards from -1; 0 is not a row.")
    return rows


RowOption = Annotated[
    list[int] | None,
    typer.Option(
        "--row",
        metavar="R",
        callback=_check_row_option,
        help="Output token, counted from 1, or backwards from -1 (default: all). Repeatable.",
    ),
]
SideOption = Annotated[
    Side | None,
    typer.Option(
        "--side",
        help="One side of an encoder-decoder (default: print the decoder, write both to files).",
        show_default=False,
    ),
]
HeadsOption = Annotated[bool, typer.Option("--heads", help="Also write the maps of every attention head to files.")]
GateOption = Annotated[
    str,
    options.completed_option(
        "--gate",
        "NAME",
        "How the activation is split over tokens: ig, shapley (slow), frozen or tangent (inexact).",
        completion.complete_gate,
    ),
]
ValueBiasOption = Annotated[
    str,
    options.completed_option(
        "--value-bias",
        "WHERE",
        "Attribute the value bias to the token or to the remainder.",
        completion.complete_value_bias,
    ),
]


def analyze_command(
    text: options.Text,
    pair: options.Pair = None,
    generate: options.Generate = None,
    chat: options.Chat = False,
    source: options.Sources = None,
    template: options.Template = None,
    by: options.By = None,
    scope: options.Scopes = None,
    layer: options.Layers = None,
    row: RowOption = None,
    side: SideOption = None,
    heads: HeadsOption = False,
    gate: GateOption = "ig",
    value_bias: ValueBiasOption = "token",
    truncate: options.Truncate = False,
    out: options.Files = None,
    model: options.Model = options.DEFAULT,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    derive: options.Derive = True,
) -> None:
    """Show how much each input token contributes to each output of every layer.

    Prints the map of the last scope and layer. Writes .html, .svg, .pdf, .png, .json, .npz and .safetensors.

    Example: normscope analyze "Colin Fleming plays tennis." --layer 6 --scope attention-block -o map.svg
    """
    for path in out or []:
        check_output_path(path)
    found = loading.find_model_source(model, device, dtype, revision, derive)
    text = texts.read_cli_text_argument(text)
    joined = texts.read_cli_sources(source, template, by)
    with silence_library_progress():
        lens = loading.load_analyzer(found)
        _check_side_option(lens, side, row)
        layers = None if not layer else _layers_from_zero(layer, lens.depth)
        result: Any = texts.analyze_cli_text(
            lens,
            **texts.cli_text_arguments(lens, text, pair, chat, generate),
            **joined,
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
        shown = texts.main_side(result, scope)
        written = [_export_result(result, shown, path, text) for path in out or []]
    if written:
        typer.echo(_analysis_line(result, written))
        return
    _print_maps(shown, scope, layers[-1] if layers and layers[-1] in shown.layers else None)


def _print_maps(shown: Analysis, scopes: Sequence[str] | None, layer: int | None) -> None:
    from normscope.view.terminal.maps import terminal_map
    from normscope.view.terminal.tables import terminal_layer_tables

    views = [terminal_map(shown, scopes[-1] if scopes else None, layer)]
    if not scopes and shown.has("XATTN-N"):
        views.append(terminal_map(shown, "XATTN-N", layer))
    console = Console(highlight=False)
    for view in views:
        console.print(view, "", sep="\n")
    console.print(terminal_layer_tables(shown))


def _check_side_option(lens: Analyzer, side: Side | None, rows: Sequence[int] | None) -> None:
    if side is not None and not lens.two_sided:
        raise NormscopeError("--side is for encoder-decoders; this model has one side. Leave it out.")
    if side is Side.encoder and rows:
        raise NormscopeError("--row chooses outputs of the decoder. Leave it out with --side encoder.")


def _export_result(result: Analysis | EncoderDecoderAnalysis, shown: Analysis, path: Path, text: str) -> Path:
    """Write a file. A figure shows one map if one scope and layer were requested, otherwise all maps."""
    from normscope.view.export import export

    figure = path.suffix.lower() in FIGURES
    scope = shown.scopes[0] if len(shown.scopes) == 1 else None
    layer = shown.layers[0] if len(shown.layers) == 1 else None
    picture = text if "grid" in shown.info else None
    return export(shown if figure else result, path, scope, layer, image=picture)


def _layers_from_zero(layers: Sequence[int], depth: int) -> list[int]:
    for layer in layers:
        if layer > depth:
            raise NormscopeError(missing_layer_wording(layer, depth))
    return [layer - 1 for layer in layers]


def _analysis_line(result: Analysis | EncoderDecoderAnalysis, written: Sequence[Path]) -> str:
    from normscope.view.scales import worst_completeness

    sides: dict[str, Analysis] = getattr(result, "sides", None) or {"": result}
    counts = "; ".join(
        f"{side} {count_label(len(one.rows), 'token')}, {count_label(len(one.layers), 'layer')}, "
        f"{count_label(len(one.scopes), 'scope')}".strip()
        for side, one in sides.items()
    )
    error = max((worst_completeness(one)[0] for one in sides.values()), key=lambda e: (e != e, e))
    return f"{counts}, worst completeness error {error:.1e}: wrote {', '.join(map(str, written))}"
