"""`normscope demo`: everything once, on an example."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from normscope.cli import loading, options, texts
from normscope.cli.progress import quiet
from normscope.errors import NormscopeError
from normscope.view.formats import check_path

EXAMPLE = "Colin Fleming played the highway tiny soap opera."


def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the files; created if missing.")
    ] = Path("normscope-demo"),
    model: options.Model = options.DEFAULT,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
) -> None:
    """Analyse an example sentence: print a summary and a map, and write a page and figures.

    Example: normscope demo -o normscope-demo
    """
    source = loading.source_of(model, device, dtype, revision)
    _make_folder(out)
    figures = find_spec("matplotlib") is not None
    names = ["demo.html", *(["demo.svg", "demo.png"] if figures else [])]
    for name in names:
        check_path(out / name)
    with quiet():
        from normscope.view import export, terminal

        analysis = texts.analyze_shown(loading.load(source), EXAMPLE)
        written = [export.export(analysis, out / name) for name in names]
        shown = texts.main_side(analysis)
        if figures:
            written.append(
                export.export(shown, out / "demo-map.png", shown.resolve("attention-block"), shown.layers[-1])
            )
    console = Console(highlight=False)
    console.print(terminal.summary(shown), "", terminal.heat_map(shown, "attention-block"), "", sep="\n")
    console.print(terminal.layer_tables(shown), "", sep="\n")
    for path in written:
        typer.echo(f"wrote {path}")
    if not figures:
        typer.echo("no figures: these need matplotlib, pip install 'normscope[plot]'")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NormscopeError(f"Cannot make the folder {folder}: {error.strerror}.") from error
