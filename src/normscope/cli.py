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
from normscope.corpus.command import corpus
from normscope.errors import NormscopeError, nearest
from normscope.faithfulness.command import faithfulness
from normscope.papers.command import paper
from normscope.view.serve_command import serve

if TYPE_CHECKING:
    from normscope import Analysis, Analyzer
    from normscope.analysis import EncoderDecoderAnalysis
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


class Side(StrEnum):
    """Sides of an encoder-decoder."""

    encoder = "encoder"
    decoder = "decoder"


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

app.command()(corpus)
app.command()(paper)
app.command()(faithfulness)
app.command()(serve)

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
        shown = _main(analysis)
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
        typer.echo("no figures: they need matplotlib, pip install 'normscope[plot]'")


def _row(rows: list[int] | None) -> list[int] | None:
    if rows and 0 in rows:
        raise typer.BadParameter("rows are counted from 1, or from -1 at the end: there is no row 0.")
    return rows


@app.command()
def analyze(
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="The text; - reads it from standard input. For a vision model the path of a picture.",
            show_default=False,
        ),
    ],
    pair: Annotated[str | None, typer.Option("--pair", metavar="TEXT2", help="A second text: both as a pair.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="TEXT", help="What an encoder-decoder is to write; without it, what it writes itself."
        ),
    ] = None,
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
        _check_side(lens, side, row)
        layers = None if not layer else _from_zero(layer, lens.depth)
        result: Any = _analyze(
            lens,
            None if chat else text if pair is None else _pair(lens, text, pair),
            **({"chat": [{"role": "user", "content": text}]} if chat else {}),
            **({} if target is None else {"target": target}),
            **({} if generate is None else {"generate": generate}),
            scopes=scope or None,
            layers=layers and sorted(set(layers)),
            rows=None if not row else [r - 1 if r > 0 else r for r in row],
            heads=heads,
            truncation=truncate,
        )
        if side is not None:
            result = result.side(side.value)
        shown = _main(result, scope)
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

    Of an encoder-decoder both sides; a vision or speech model is given noise.

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
    first = report.rows[0]  # the limits of all
    for title, limit in (
        ("map against\nvectors", first.maps_limit),
        ("sum against\nmodel", first.sums_limit),
        ("padded\nagainst not", first.padded_limit),
    ):
        table.add_column(f"{title}\n({limit:.0e})", justify="right", no_wrap=True)
    table.add_column("")
    for row in report.rows:
        name = f"{row.side} {row.scope}" if row.side else row.scope
        table.add_row(name, *(f"{error:.1e}" for error in (row.maps, row.sums, row.padded)), _verdict(row.ok))
    console = Console(highlight=False)
    console.print(table)
    console.print(_verdict(report.ok))
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="FAMILY", help="A family or model type, such as Llama: its scopes.", show_default=False),
    ] = None,
    scopes: Annotated[bool, typer.Option("--scopes", help="Also the scopes of every kind of layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the supported model families and what is special about each.

    Example: normscope models Llama
    """
    from normscope.models import FAMILIES

    entries = [_family(family) for family in FAMILIES]
    if name is not None:
        entries = _named(entries, name)
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    lines = list(map(_details, entries))
    if name is None:
        lines = _overview(entries, console.width if console.is_terminal else None)
        if not scopes:
            lines += ["", "normscope models FAMILY: its scopes and their aliases; --scopes: those of all."]
    if scopes:
        kinds = {stack["order"]: stack["scopes"] for entry in entries for stack in entry["stacks"]}
        lines += [f"\nScopes of {order}:\n{' '.join(listed)}" for order, listed in kinds.items()]
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _overview(entries: Sequence[dict[str, Any]], width: int | None) -> list[str]:
    """One line per family, of an encoder-decoder with the decoder's layer; notes are cut at the width of a terminal."""
    lines = [("family", "model types", "a layer is", "note")]
    for entry in entries:
        lines.append((entry["name"], ", ".join(entry["model_types"]), entry["stacks"][-1]["order"], entry["note"]))
    wide = [max(len(line[k]) for line in lines) for k in range(3)]
    texts = ["  ".join([*(f"{cell:{w}}" for cell, w in zip(line, wide, strict=False)), line[3]]) for line in lines]
    return texts if width is None else [text if len(text) <= width else f"{text[: width - 1]}…" for text in texts]


def _details(entry: dict[str, Any]) -> str:
    lines = [f"{entry['name']} ({', '.join(entry['model_types'])}): {entry['note']}"]
    for stack in entry["stacks"]:
        named: dict[str, list[str]] = {}
        for alias, scope in stack["aliases"].items():
            named.setdefault(scope, []).append(alias)
        lines.append(f"  {stack['side']} layer: {stack['order']}")
        width = max(map(len, stack["scopes"]))
        lines += [f"    {scope:{width}}  {', '.join(named.get(scope, []))}".rstrip() for scope in stack["scopes"]]
    return "\n".join(lines)


def _named(entries: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The families of a name or model type, in any case."""
    wanted = name.lower()
    found = [e for e in entries if wanted in (e["name"].lower(), *(kind.lower() for kind in e["model_types"]))]
    if not found:
        known = [known for e in entries for known in (e["name"], *e["model_types"])]
        raise NormscopeError(f"No family {name!r}.{nearest(name, known)} `normscope models` lists all of them.")
    return found


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


def _analyze(lens: Analyzer, given: Any, **options: Any) -> Analysis | EncoderDecoderAnalysis:
    """Run the analysis, with an estimate first when it will take long, and a bar over its layers."""
    writes = "generate" in options or (lens.two_sided and "target" not in options)  # tokens that are not known yet
    if not writes:
        estimate = lens.estimate(given, **options)
        if estimate.seconds > LONG:
            typer.echo(f"estimate: {estimate}", err=True)
    with _progress("layers") as progress:
        try:
            found: Analysis | EncoderDecoderAnalysis = lens.analyze(given, progress=progress, **options)
        except NormscopeError as error:
            raise _counted_from_one(error) from error
        return found


def _counted_from_one(error: NormscopeError) -> NormscopeError:
    """The refusal of a row, which the library counts from 0, as it was typed."""
    match = re.match(r"There is no row (-?\d+): valid are 0 to (\d+)", str(error))
    if match is None:
        return error
    row, last = map(int, match.groups())
    return NormscopeError(
        f"There is no row {row + 1 if row >= 0 else row}: there are the rows 1 to {last + 1} (or -{last + 1} to -1)."
    )


def _pair(lens: Analyzer, text: str, pair: str) -> tuple[str, str]:
    if lens.two_sided:
        raise NormscopeError("An encoder-decoder reads one text: give what it is to write with --target, not --pair.")
    return text, pair


def _check_side(lens: Analyzer, side: Side | None, rows: Sequence[int] | None) -> None:
    if side is not None and not lens.two_sided:
        raise NormscopeError("--side is for encoder-decoders; this model has one side. Leave it out.")
    if side is Side.encoder and rows:
        raise NormscopeError("--row chooses outputs of the decoder: leave it out with --side encoder.")


def _main(result: Analysis | EncoderDecoderAnalysis, scopes: Sequence[str] | None = None) -> Analysis:
    """What the terminal shows: of an encoder-decoder the side with the last scope asked for, the decoder first."""
    from normscope.analysis import EncoderDecoderAnalysis

    if not isinstance(result, EncoderDecoderAnalysis):
        return result
    return result.side_with(scopes[-1]) if scopes else result.main


def _export(result: Analysis | EncoderDecoderAnalysis, shown: Analysis, path: Path, text: str) -> Path:
    """Write a file; a figure is of the one scope and layer that were asked for, or of all of them."""
    from normscope.view import export

    figure = path.suffix.lower() in export.FIGURES
    scope = shown.scopes[0] if len(shown.scopes) == 1 else None
    layer = shown.layers[0] if len(shown.layers) == 1 else None
    picture = text if "grid" in shown.info else None
    return export.export(shown if figure else result, path, scope, layer, image=picture)


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


def _one_line(result: Analysis | EncoderDecoderAnalysis, written: Sequence[Path]) -> str:
    from normscope.view.labels import worst_completeness

    sides: dict[str, Analysis] = getattr(result, "sides", None) or {"": result}
    counts = "; ".join(
        f"{side} {len(one.rows)} tokens, {len(one.layers)} layers, {len(one.scopes)} scopes".strip()
        for side, one in sides.items()
    )
    error = max((worst_completeness(one)[0] for one in sides.values()), key=lambda e: (e != e, e))
    return f"{counts}, worst completeness error {error:.1e}: wrote {', '.join(map(str, written))}"


def _verdict(ok: bool) -> Text:
    return Text("PASS", style="green") if ok else Text("FAIL", style="bold red")


def _family(family: Family) -> dict[str, Any]:
    from normscope.scopes import aliases_of, names_of

    return {
        "name": family.name,
        "model_types": list(family.model_types),
        "input": family.input,
        "note": family.note,
        "stacks": [
            {
                "side": stack.side,
                "order": " ".join(re.findall("X?ATTN|RES|LN|FF", names_of(stack.blocks)[-1])),
                "scopes": list(names_of(stack.blocks)),
                "aliases": aliases_of(stack.blocks),
            }
            for stack in family.stacks
        ],
    }
