"""What the commands that go through a corpus share: its data, how much of it, and where it is computed."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any

import typer

from normscope.corpus.readers import FORMATS
from normscope.errors import NormscopeError

LISTS = ("pair", "header")  # options of readers that are several names


class Engine(StrEnum):
    """Where a corpus is computed."""

    local = "local"
    ray = "ray"


Format = Annotated[str | None, typer.Option("--format", metavar="F", help=f"Format of the data: {', '.join(FORMATS)}.")]
Reader = Annotated[
    list[str] | None,
    typer.Option("--reader", metavar="KEY=VALUE", help="Option of the format's reader, such as text=sentence."),
]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="The first N entries only.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Entries in a forward pass.")]
Where = Annotated[Engine, typer.Option("--engine", help="Where to compute.")]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Ray workers, each with a model of its own.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="Threads of each Ray worker.")]
Address = Annotated[str | None, typer.Option("--address", help="An existing Ray cluster.")]


def reader_options(given: list[str]) -> dict[str, Any]:
    """KEY=VALUE as options of a reader; numbers, true, false and none are what they look like, and names of several
    columns have commas between them."""
    found: dict[str, Any] = {}
    for entry in given:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise NormscopeError(f"--reader takes KEY=VALUE, not {entry!r}.")
        found[key] = _plain(key, value)
    return found


def _plain(key: str, value: str) -> Any:
    if value.lower() == "none":
        return None
    if key in LISTS:
        return tuple(value.split(","))
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if re.fullmatch("-?[0-9]+", value) else value
