"""`normscope corpus`: a corpus run from the command line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from normscope.cli import completion, loading, options
from normscope.cli.progress import bars, quiet
from normscope.corpus.readers import formats
from normscope.corpus.store import check_run_folder
from normscope.errors import NormscopeError

FAULTY = 3  # exit code of a run that finished, but not with every entry


def corpus(
    data: Annotated[str | None, typer.Argument(metavar="DATA", help=options.DATA_HELP, show_default=False)] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for the tables.")] = None,
    measures: Annotated[
        str,
        typer.Option(
            "--measures",
            metavar="NAMES",
            help="Measures, separated by commas; 'list' lists them.",
            autocompletion=completion.complete_measures,
        ),
    ] = "mixing",
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--maps",
            metavar="SCOPE",
            help="Also keep the maps of this scope. Repeatable.",
            autocompletion=completion.complete_scope,
        ),
    ] = None,
    scope: options.Scopes = None,
    layer: options.Layers = None,
    format: options.Format = None,
    reader: options.Reader = None,
    mask: Annotated[
        int | None,
        typer.Option(
            "--mask", metavar="SEED", help="Mask 12 % of the tokens, as the papers do, with this random seed."
        ),
    ] = None,
    truncate: options.Truncate = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first entry that cannot be analysed.")] = False,
    limit: options.Limit = None,
    batch_size: options.BatchSize = 16,
    shard_size: Annotated[
        int, typer.Option("--shard-size", metavar="N", min=1, help="Entries that are written together.")
    ] = 128,
    engine: options.Where = options.Engine.local,
    workers: options.Workers = 2,
    threads: options.Threads = 1,
    address: options.Address = None,
    model: options.Model = options.DEFAULT,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
) -> None:
    """Measure every entry of a corpus and write tables for polars, pandas or DuckDB. The same command resumes.

    Example: normscope corpus wiki.txt --format pairs --mask 0 --measures mixing,similarity -o run
    """
    if measures == "list":
        from normscope.corpus.measure_registry import describe_measures

        for name, about in describe_measures().items():
            typer.echo(f"{name:14} {about}")
        return
    if data is None or out is None:
        raise NormscopeError("Say what to measure and where the tables go: normscope corpus DATA --out DIR.")
    given = options.reader_options(reader)
    formats.check_corpus(data, format, **given)
    check_run_folder(out)
    source = loading.source_of(model, device, dtype, revision)
    with quiet(), bars() as show:
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
            engine=engine.value,
            workers=workers,
            threads=threads,
            address=address,
            strict=strict,
            limit=limit,
            progress=None if show is None else partial(show, "entries"),
        )
    typer.echo(str(summary))
    if not summary.finished:
        typer.echo("stopped; the same command resumes", err=True)
        raise typer.Exit(130)
    if summary.faults:
        raise typer.Exit(FAULTY)
