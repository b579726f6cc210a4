"""`normscope corpus`: measure every entry of a corpus."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli import completion, loading, options
from normscope.cli.progress import progress_bars, silence_library_progress
from normscope.corpus.readers import formats
from normscope.corpus.store import check_store_folder
from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from normscope.corpus.runner import Summary

FAULTY = 3  # exit code of a finished run in which some entries failed


DataArgument = Annotated[str | None, typer.Argument(metavar="DATA", help=options.DATA_HELP, show_default=False)]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for the tables.")]
MeasuresOption = Annotated[
    str,
    typer.Option(
        "--measures",
        metavar="NAMES",
        help="Measures, separated by commas; 'list' lists them.",
        autocompletion=completion.complete_measures,
    ),
]
MapsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--maps",
        metavar="SCOPE",
        help="Also keep the maps of this scope. Repeatable.",
        autocompletion=completion.complete_scope,
    ),
]
MaskOption = Annotated[
    int | None,
    typer.Option("--mask", metavar="SEED", help="Mask 12 % of the tokens, as the papers do, with this random seed."),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Stop at the first entry that cannot be analysed.")]
ShardSizeOption = Annotated[
    int, typer.Option("--shard-size", metavar="N", min=1, help="Entries that are written together.")
]


def corpus_command(
    data: DataArgument = None,
    out: OutOption = None,
    measures: MeasuresOption = "mixing",
    maps: MapsOption = None,
    scope: options.Scopes = None,
    layer: options.Layers = None,
    format: options.Format = None,
    reader: options.Reader = None,
    mask: MaskOption = None,
    truncate: options.Truncate = False,
    strict: StrictOption = False,
    limit: options.Limit = None,
    batch_size: options.BatchSize = 16,
    shard_size: ShardSizeOption = 128,
    model: options.Model = options.DEFAULT,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    engine: options.EngineOption = options.Engine.local,
    workers: options.Workers = 2,
    threads: options.Threads = 1,
    address: options.Address = None,
) -> None:
    """Measure every entry of a corpus and write tables for polars, pandas or DuckDB.

    Running the same command again resumes.

    Example: normscope corpus wiki.txt --format pairs --mask 0 --measures mixing,similarity -o run
    """
    if measures == "list":
        _print_measures()
        return
    if data is None or out is None:
        raise NormscopeError("DATA and --out are required: normscope corpus DATA --out DIR.")
    given = _check_corpus_options(data, format, reader, out)
    source = loading.find_model_source(model, device, dtype, revision)
    with silence_library_progress(), progress_bars() as show:
        from normscope.corpus.runner import run

        summary = run(
            data,
            source,
            out,
            measures=[name.strip() for name in measures.split(",") if name.strip()],
            maps=maps or (),
            scopes=scope or None,
            layers=[number - 1 for number in layer] if layer else None,
            format=format,
            reader=given,
            mask_seed=mask,
            truncation=truncate,
            batch_size=batch_size,
            shard_size=shard_size,
            **options.cli_options_for_engine(engine, workers, threads, address),
            strict=strict,
            limit=limit,
            progress=None if show is None else partial(show, "entries"),
        )
    _print_run_summary(summary)


def _check_corpus_options(data: str, format: str | None, reader: list[str] | None, out: Path) -> dict[str, Any]:
    """The options of the reader; raises if DATA cannot be read or the folder cannot be written."""
    given = options.parse_cli_reader_options(reader)
    formats.check_corpus_format(data, format, **given)
    check_store_folder(out)
    return given


def _print_measures() -> None:
    from normscope.corpus.measure_registry import describe_measures

    known = describe_measures()
    width = max(map(len, known))
    for name, about in known.items():
        typer.echo(f"{name:{width}}  {about}")


def _print_run_summary(summary: Summary) -> None:
    """Print the outcome of a run; exit with code 130 if it was stopped, 3 if some entries failed."""
    typer.echo(str(summary))
    if not summary.finished:
        typer.echo("stopped; run the same command again to resume", err=True)
        raise typer.Exit(130)
    if summary.faults:
        raise typer.Exit(FAULTY)
