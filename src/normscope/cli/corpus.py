"""`normscope corpus`: a corpus run from the command line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from normscope.cli.runs import (
    Address,
    BatchSize,
    Engine,
    Format,
    Limit,
    Reader,
    Threads,
    Where,
    Workers,
    reader_options,
)
from normscope.cli.shared import DEFAULT, Model, bars, counted, model_path, quiet
from normscope.errors import NormscopeError

FAULTY = 3  # exit code of a run that finished, but not with every entry


def corpus(
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help="A file, or the name of a Hugging Face dataset.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder of the run.")] = None,
    model: Model = DEFAULT,
    measures: Annotated[
        str, typer.Option("--measures", metavar="NAMES", help="Measures, with commas between them; 'list' lists them.")
    ] = "mixing",
    maps: Annotated[
        list[str] | None, typer.Option("--maps", metavar="SCOPE", help="Keep the maps of this scope; repeatable.")
    ] = None,
    scope: Annotated[
        list[str] | None, typer.Option("--scope", "-s", metavar="S", help="Compute this scope only; repeatable.")
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", "-l", metavar="L", min=1, help="This layer only, from 1; repeatable.")
    ] = None,
    format: Format = None,
    reader: Reader = None,
    mask: Annotated[
        int | None, typer.Option("--mask", metavar="SEED", help="Mask 12 % of the tokens, as in the papers.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut entries that are too long.")] = False,
    batch_size: BatchSize = 16,
    shard_size: Annotated[int, typer.Option("--shard-size", min=1, help="Entries that are written together.")] = 128,
    engine: Where = Engine.local,
    workers: Workers = 2,
    threads: Threads = 1,
    address: Address = None,
    limit: Limit = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first entry that cannot be analysed.")] = False,
) -> None:
    """Measure every entry of a corpus, into tables that polars, pandas and DuckDB read. The same command resumes.

    Example: normscope corpus wiki.txt --format pairs --mask 0 --measures mixing,similarity -o run
    """
    from normscope.corpus.measuring import known
    from normscope.corpus.running import run

    if measures == "list":
        for name, about in known().items():
            typer.echo(f"{name:14} {about}")
        return
    if data is None or out is None:
        raise NormscopeError("Say what is to be measured and where the tables go: normscope corpus DATA --out DIR.")
    with quiet(), bars() as show, counted():
        summary = run(
            data,
            model_path(model),
            out,
            measures=[name.strip() for name in measures.split(",") if name.strip()],
            maps=maps or (),
            scopes=scope or None,
            layers=[number - 1 for number in layer] if layer else None,
            format=format,
            reader=reader_options(reader or []),
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
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130)
    if summary.faults:
        raise typer.Exit(FAULTY)
