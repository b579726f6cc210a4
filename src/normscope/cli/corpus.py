"""`normscope corpus`: measure every entry of a corpus."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli import completion, loading, options
from normscope.cli.progress import progress_bars, silence_library_progress
from normscope.corpus.readers import formats
from normscope.corpus.store import Run, check_store_folder
from normscope.errors import NormscopeError
from normscope.files import check_output_folder

if TYPE_CHECKING:
    from normscope.corpus.runner import Summary
    from normscope.models.source import ModelSource

FAULTY = 3  # exit code of a finished run in which some entries failed


DataArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DATA...",
        help=f"{options.DATA_HELP} Several files, folders and patterns are read one after the other.",
        show_default=False,
    ),
]
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
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Memory limit of a batch, such as 8GB (default: most of the free memory at the start).",
        show_default=False,
    ),
]
RetryOption = Annotated[bool, typer.Option("--retry-errors", help="Compute the shards with faults again.")]
VersionsOption = Annotated[
    bool,
    typer.Option("--allow-versions", help="Resume with another patch release of normscope, torch or transformers."),
]
KeepOption = Annotated[
    str | None,
    typer.Option("--keep", metavar="COLUMNS", help="Columns of the data to take along, such as label,topic."),
]
CsvOption = Annotated[bool, typer.Option("--csv", help="Also write the finished tables as CSV files, to DIR/csv.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="MEASURE.KEY=VALUE", help="Set an option of a measure. Repeatable."),
]
VERIFY, REPORT = "verify", "report"  # in the place of DATA
SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def corpus_command(
    data: DataArgument = None,
    out: OutOption = None,
    measures: MeasuresOption = "mixing",
    maps: MapsOption = None,
    scope: options.Scopes = None,
    layer: options.Layers = None,
    format: options.Format = None,
    reader: options.Reader = None,
    keep: KeepOption = None,
    mask: MaskOption = None,
    truncate: options.Truncate = False,
    strict: StrictOption = False,
    limit: options.Limit = None,
    batch_size: options.BatchSize = 16,
    shard_size: ShardSizeOption = 128,
    memory: MemoryOption = None,
    retry_errors: RetryOption = False,
    allow_versions: VersionsOption = False,
    csv: CsvOption = False,
    settings: SetOption = None,
    model: options.Model = options.DEFAULT,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    derive: options.Derive = True,
    engine: options.EngineOption = options.Engine.local,
    workers: options.Workers = 2,
    threads: options.Threads = 1,
    address: options.Address = None,
) -> None:
    """Measure every entry of a corpus and write tables for polars, pandas or DuckDB.

    Running the same command again resumes, and repairs damaged files. `normscope corpus verify DIR` reads all files of
    a run and names those that are damaged; `normscope corpus report DIR` writes a page about it.

    Example: normscope corpus wiki.txt --format pairs --mask 0 --measures mixing,similarity -o run
    """
    if measures == "list":
        _print_measures()
        return
    if data is not None and data[0] == VERIFY:
        _verify_run(data[1:], out)
        return
    if data is not None and data[0] == REPORT:
        chosen_model = None if model == options.DEFAULT else loading.find_model_source(model, device, dtype, revision)
        _report_run(data[1:], out, chosen_model)
        return
    if not data or out is None:
        raise NormscopeError("DATA and --out are required: normscope corpus DATA --out DIR.")
    chosen = data[0] if len(data) == 1 else data
    choices: dict[str, Any] = {
        "measures": [name.strip() for name in measures.split(",") if name.strip()],
        "maps": maps or (),
        "scopes": scope or None,
        "layers": [number - 1 for number in layer] if layer else None,
        "format": format,
        "reader": check_corpus_options(chosen, format, reader, keep, out),
        "mask_seed": mask,
        "settings": options.parse_cli_settings(settings),
        "memory_budget": None if memory is None else parse_cli_size(memory),
        **{"truncation": truncate, "strict": strict, "limit": limit, "batch_size": batch_size},
        **{"shard_size": shard_size, "retry_errors": retry_errors, "allow_versions": allow_versions, "csv": csv},
        **options.cli_options_for_engine(engine, workers, threads, address),
    }
    _run_corpus(chosen, loading.find_model_source(model, device, dtype, revision, derive), out, choices)


def parse_cli_size(given: str) -> int:
    """A number of bytes from a text such as 8GB, 500 MB or 2GiB."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", given)
    unit = None if match is None else SIZES.get(match[2].upper())
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise NormscopeError(f"--memory takes a size such as 8GB or 500MB, not {given!r}.")
    return int(float(match[1]) * unit)


def _run_corpus(data: str | list[str], source: ModelSource, out: Path, choices: dict[str, Any]) -> None:
    with silence_library_progress(), progress_bars() as show:
        from normscope.corpus.runner import run

        summary = run(data, source, out, progress=None if show is None else partial(show, "entries"), **choices)
    _print_run_summary(summary)


def _verify_run(folders: list[str], out: Path | None) -> None:
    """Print the damaged files of a run and those that are not part of it; exit with code 1 if there are any."""
    if len(folders) != 1 or out is not None:
        raise NormscopeError("Give one folder: normscope corpus verify DIR. (For a file called verify, use ./verify.)")
    run = Run(folders[0])
    damaged = run.verify()
    strays = [] if any(name.startswith("shards/") for name in damaged) else run.strays()
    for name in damaged:
        typer.echo(f"damaged: {name}")
    for name in strays:
        typer.echo(f"not part of the run: {name}")
    if damaged:
        typer.echo("Run the command that made this run again to repair it.", err=True)
    if strays:
        typer.echo("Remove these files: other tools read them with the tables.", err=True)
    if damaged or strays:
        raise typer.Exit(1)
    done = sum(run.shard_entries())
    typer.echo(f"{folders[0]}: all files are as they were written; {done} of {run.manifest['data']['entries']} entries")


def _report_run(folders: list[str], out: Path | None, model: ModelSource | None) -> None:
    """Write the report of a run, and print where it is."""
    if len(folders) != 1:
        raise NormscopeError("Give one folder: normscope corpus report DIR. (For a file called report, use ./report.)")
    check_output_folder(folders[0] if out is None else out)
    with silence_library_progress():
        from normscope.reports.corpus_report import write_corpus_report

        path = write_corpus_report(folders[0], out, model=model, command=f"normscope corpus report {folders[0]}")
    typer.echo(f"wrote {path}")


def check_corpus_options(
    data: str | list[str], format: str | None, reader: list[str] | None, keep: str | None, out: Path
) -> dict[str, Any]:
    """The options of the reader; raises if DATA cannot be read or the folder cannot be written."""
    given = options.parse_cli_reader_options(reader)
    if keep is not None:
        given["keep"] = tuple(name.strip() for name in keep.split(",") if name.strip())
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
