"""The command line: parse, call, print. Layers are counted from 1 here, and the output says so."""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from normscope._version import __version__
from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from normscope import Analysis, Analyzer
    from normscope.models import Family

# torch, transformers and matplotlib are imported inside the commands: --help must not wait for them.

EXAMPLE = "Colin Fleming played the highway tiny soap opera."
DEFAULT = "default"
DEFAULT_NAME = "all-MiniLM-L6-v2"
LONG = 10  # seconds from which on an estimate is printed first


class Commands(TyperGroup):
    """Turns a refusal into one line and exit code 1, and Ctrl-C into exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except NormscopeError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


class Precision(StrEnum):
    """Number formats of an analysis."""

    float32 = "float32"
    float64 = "float64"


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="How much each input token contributes to each output vector inside a Transformer layer.",
)

Model = Annotated[
    str,
    typer.Option("--model", "-m", metavar="M", help=f"Hub name or folder of a model; '{DEFAULT}' is {DEFAULT_NAME}."),
]
Dtype = Annotated[
    Precision | None, typer.Option("--dtype", help="Precision of the run; float32 when not given.", show_default=False)
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"normscope {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder for the files; made if missing.")
    ] = Path("normscope-demo"),
    model: Model = DEFAULT,
) -> None:
    """Analyse an example sentence: a summary and a map here, a page and figures in a folder.

    Example: normscope demo -o normscope-demo
    """
    from normscope.view import export, terminal

    _make_folder(out)
    figures = find_spec("matplotlib") is not None
    names = ["demo.html", *(["demo.svg", "demo.png"] if figures else [])]
    for name in names:
        export.check_path(out / name)
    with _quiet():
        analysis = _analyze(_load(model), EXAMPLE)
        written = [export.export(analysis, out / name) for name in names]
        if figures:
            written.append(
                export.export(analysis, out / "demo-map.png", analysis.resolve("attention-block"), analysis.layers[-1])
            )
    console = Console(highlight=False)
    console.print(terminal.summary(analysis), "", terminal.heat_map(analysis, "attention-block"), "", sep="\n")
    console.print(terminal.mixing_table(analysis), "", sep="\n")
    for path in written:
        typer.echo(f"wrote {path}")
    if not figures:
        typer.echo("no figures: they need matplotlib, pip install 'normscope[plot]'")


@app.command()
def analyze(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="The text; - reads it from standard input.", show_default=False)
    ],
    pair: Annotated[str | None, typer.Option("--pair", metavar="TEXT2", help="A second text: both as a pair.")] = None,
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
    heads: Annotated[bool, typer.Option("--heads", help="Also the maps of every attention head, for files.")] = False,
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
    """Analyse a text: its last scope and layer as a map in the terminal, or everything in files.

    Example: normscope analyze "Colin Fleming plays tennis." --layer 6 --scope attention-block -o map.svg
    """
    from normscope.view import export, terminal

    for path in out or []:
        export.check_path(path)
    text = _read(text)
    with _quiet():
        lens = _load(model, dtype, device)
        layers = None if not layer else _from_zero(layer, lens.depth)
        analysis = _analyze(
            lens,
            text if pair is None else (text, pair),
            scopes=scope or None,
            layers=layers and sorted(set(layers)),
            heads=heads,
            truncation=truncate,
        )
        only_scope = analysis.scopes[0] if len(analysis.scopes) == 1 else None
        only_layer = analysis.layers[0] if len(analysis.layers) == 1 else None
        written = [export.export(analysis, path, only_scope, only_layer) for path in out or []]
    if written:
        typer.echo(_one_line(analysis, written))
        return
    console = Console(highlight=False)
    last = terminal.heat_map(analysis, scope[-1] if scope else None, layers[-1] if layers else None)
    console.print(last, "", terminal.mixing_table(analysis), sep="\n")


@app.command()
def check(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help=f"Hub name or folder of a model; '{DEFAULT}' is {DEFAULT_NAME}.", show_default=False
        ),
    ],
    dtype: Dtype = None,
) -> None:
    """Prove that a model decomposes exactly: every scope and layer, padded and not. Exit code 1 if it does not.

    Example: normscope check bert-base-uncased --dtype float64
    """
    with _quiet():
        lens = _load(model, dtype)
        from normscope import checking

        with _progress("checking") as progress:
            report = checking.check(lens, progress=progress)
    table = Table(
        title=Text(f"{lens.model_name}: worst errors over {report.inputs} inputs (limit)"), title_justify="left"
    )
    table.add_column("scope", no_wrap=True)
    for title in ("map against vectors", "sum against model", "padded against not"):
        table.add_column(title, justify="right")
    table.add_column("")
    for row in report.rows:
        errors = ((row.maps, row.maps_limit), (row.sums, row.sums_limit), (row.padded, row.padded_limit))
        table.add_row(row.scope, *(f"{error:.1e} ({limit:.0e})" for error, limit in errors), _verdict(row.ok))
    console = Console(highlight=False)
    console.print(table)
    console.print(_verdict(report.ok))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the supported model families and what is special about each.

    Example: normscope models --json
    """
    from normscope.models import FAMILIES

    entries = [_family(family) for family in FAMILIES]
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for title in ("family", "model types", "a layer is", "scopes", "note"):
        table.add_column(title)
    for entry in entries:
        types = ", ".join(entry["model_types"])
        table.add_row(entry["name"], types, entry["order"], str(len(entry["scopes"])), entry["note"])
    console.print(table)
    for order, scopes in {entry["order"]: entry["scopes"] for entry in entries}.items():
        console.print(f"\nScopes of {order}:\n{' '.join(scopes)}", style="dim")


def main() -> None:
    """The `normscope` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # tokens may hold what the terminal cannot encode
    try:
        app(prog_name="normscope")
    except KeyboardInterrupt:
        sys.exit(130)


def _load(model: str, dtype: Precision | None = None, device: str | None = None) -> Analyzer:
    import torch

    from normscope import Analyzer, default_model

    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise NormscopeError(f"Cannot use the device {device!r}: {reason}") from error
    lens = Analyzer.from_pretrained(
        default_model.find() if model == DEFAULT else model,
        device=device,
        dtype=None if dtype is None else getattr(torch, dtype.value),
    )
    if model == DEFAULT:
        lens.model_name = DEFAULT_NAME
    return lens


def _analyze(lens: Analyzer, given: str | tuple[str, str], **options: Any) -> Analysis:
    """Run the analysis, with an estimate first when it will take long, and a bar over its layers."""
    estimate = lens.estimate(given, **options)
    if estimate.seconds > LONG:
        typer.echo(f"estimate: {estimate}", err=True)
    with _progress("layers") as progress:
        found: Analysis = lens.analyze(given, progress=progress, **options)
        return found


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the loading bars, notes and warnings of the libraries."""
    logging: Any = import_module("transformers.utils.logging")  # untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


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
            raise NormscopeError(f"There is no layer {layer}: this model has the layers 1 to {depth}.")
    return [layer - 1 for layer in layers]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NormscopeError(f"Cannot make the folder {folder}: {error.strerror}.") from error


def _one_line(analysis: Analysis, written: Sequence[Path]) -> str:
    from normscope.view.labels import worst_completeness

    counts = f"{len(analysis.rows)} tokens, {len(analysis.layers)} layers, {len(analysis.scopes)} scopes"
    error, _, _ = worst_completeness(analysis)
    return f"{counts}, worst completeness error {error:.1e}: wrote {', '.join(map(str, written))}"


def _verdict(ok: bool) -> Text:
    return Text("PASS", style="green") if ok else Text("FAIL", style="bold red")


def _family(family: Family) -> dict[str, Any]:
    from normscope.scopes import aliases_of, names_of

    blocks = family.stacks[-1].blocks
    scopes = names_of(blocks)
    return {
        "name": family.name,
        "model_types": list(family.model_types),
        "order": " ".join(re.findall("X?ATTN|RES|LN|FF", scopes[-1])),
        "scopes": list(scopes),
        "aliases": aliases_of(blocks),
        "note": family.note,
    }
