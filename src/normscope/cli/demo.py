"""`normscope demo`: summary, maps, page and figures of an example sentence."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from normscope.cli import loading, options, texts
from normscope.cli.progress import silence_library_progress
from normscope.errors import NormscopeError
from normscope.view.formats import check_output_path

EXAMPLE = "Colin Fleming played the highway tiny soap opera."


def demo_command(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the files; created if missing.")
    ] = Path("normscope-demo"),
    model: options.Model = options.DEFAULT,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    derive: options.Derive = True,
) -> None:
    """Analyse an example sentence: print a summary and a map, and write a page and figures.

    Example: normscope demo -o normscope-demo
    """
    source = loading.find_model_source(model, device, dtype, revision, derive)
    _create_demo_folder(out)
    figures = find_spec("matplotlib") is not None
    names = ["demo.html", *(["demo.svg", "demo.png"] if figures else [])]
    for name in names:
        check_output_path(out / name)
    with silence_library_progress():
        from normscope.view.export import export
        from normscope.view.terminal.maps import terminal_map
        from normscope.view.terminal.tables import terminal_layer_tables, terminal_summary_table

        analysis = texts.analyze_cli_text(loading.load_analyzer(source), EXAMPLE)
        written = [export(analysis, out / name) for name in names]
        shown = texts.main_side(analysis)
        if figures:
            written.append(export(shown, out / "demo-map.png", shown.resolve("attention-block"), shown.layers[-1]))
    console = Console(highlight=False)
    console.print(terminal_summary_table(shown), "", terminal_map(shown, "attention-block"), "", sep="\n")
    console.print(terminal_layer_tables(shown), "", sep="\n")
    for path in written:
        typer.echo(f"wrote {path}")
    if not figures:
        typer.echo("no figures: they need matplotlib (pip install 'normscope[plot]')")


def _create_demo_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NormscopeError(f"Cannot create the folder {folder}: {error.strerror}.") from error
