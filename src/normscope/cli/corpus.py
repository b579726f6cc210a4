"""`normscope corpus`: a corpus run from the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from normscope.corpus.readers import FORMATS
from normscope.errors import NormscopeError

FAULTY = 3  # exit code of a run that finished, but not with every entry


class Engine(StrEnum):
    """Where a corpus is computed."""

    local = "local"
    ray = "ray"


def corpus(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A file, or the name of a Hugging Face dataset.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the run.", show_default=False)],
    model: Annotated[str, typer.Option("--model", "-m", metavar="M", help="Hub name or folder.")] = "default",
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
    format: Annotated[
        str | None, typer.Option("--format", metavar="F", help=f"Format of the data: {', '.join(FORMATS)}.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--reader", metavar="KEY=VALUE", help="Option of the format's reader, such as text=sentence."),
    ] = None,
    mask: Annotated[
        int | None, typer.Option("--mask", metavar="SEED", help="Mask 12 % of the tokens, as in the papers.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut entries that are too long.")] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Entries in a forward pass.")] = 16,
    shard_size: Annotated[int, typer.Option("--shard-size", min=1, help="Entries that are written together.")] = 128,
    engine: Annotated[Engine, typer.Option("--engine", help="Where to compute.")] = Engine.local,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Ray workers, each with a model of its own.")] = 2,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Threads of each Ray worker.")] = 1,
    address: Annotated[str | None, typer.Option("--address", help="An existing Ray cluster.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="The first N entries only.")] = None,
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
    quieten()
    with bars() as show:
        summary = run(
            data,
            model_path(model),
            out,
            measures=[name.strip() for name in measures.split(",") if name.strip()],
            maps=maps or (),
            scopes=scope or None,
            layers=[number - 1 for number in layer] if layer else None,
            format=format,
            reader=reader_options(option or []),
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


def quieten() -> None:
    """Without the bars that transformers draws while it loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def model_path(name: str) -> str:
    from normscope import default_model

    return str(default_model.find()) if name == "default" else name


def reader_options(given: list[str]) -> dict[str, Any]:
    """KEY=VALUE as options of a reader; numbers, true and false are what they look like."""
    found: dict[str, Any] = {}
    for entry in given:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise NormscopeError(f"--reader takes KEY=VALUE, not {entry!r}.")
        plain = {"true": True, "false": False}
        found[key] = plain.get(value.lower(), int(value) if value.lstrip("-").isdigit() else value)
    return found


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if not task.speed else f"{task.speed:.1f}/s")


@contextmanager
def bars() -> Iterator[Callable[[str, int, int], None] | None]:
    """How much of what is done, its rate and the time left, on standard error where that is a terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what)
            shown.update(tasks[what], completed=done, total=total)

        yield update
