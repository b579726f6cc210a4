"""Options that several commands share, so that their names, help and completion agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from normscope import default_model
from normscope.cli import completion
from normscope.corpus.readers.formats import FORMATS
from normscope.errors import NormscopeError

DEFAULT = "default"
MODEL_HELP = f"Hub name, folder or GGUF file of the model; '{DEFAULT}' is {default_model.NAME}."
LISTS = ("pair", "header", "keep")  # reader options that take several names


class Precision(StrEnum):
    """Number formats of an analysis."""

    float32 = "float32"
    float64 = "float64"


class Grain(StrEnum):
    """Parts of a text that columns stand for."""

    word = "word"
    sentence = "sentence"
    line = "line"
    message = "message"


class Engine(StrEnum):
    """Engines that process a corpus."""

    local = "local"
    ray = "ray"


def completed_option(flag: str, metavar: str, help: str, complete: Callable[..., list[str]]) -> Any:
    """An option whose values a shell completes."""
    return typer.Option(flag, metavar=metavar, help=help, autocompletion=complete)


# Model

Model = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help=MODEL_HELP, autocompletion=completion.complete_model)
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help=f"{MODEL_HELP} Repeatable: one report compares the models.",
        autocompletion=completion.complete_model,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Device to compute on, such as cuda, cuda:1 or mps (default: cpu).",
        autocompletion=completion.complete_device,
        show_default=False,
    ),
]
Dtype = Annotated[
    Precision | None,
    typer.Option("--dtype", help="Compute in float32 or float64 (default: float32).", show_default=False),
]
Revision = Annotated[
    str | None,
    typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a model on the Hugging Face hub."),
]
Derive = Annotated[
    bool,
    typer.Option("--derive/--no-derive", help="Describe a model of an unknown type by watching it, or refuse it."),
]

# Text

Text = Annotated[
    str,
    typer.Argument(
        metavar="TEXT",
        help="Text to analyse; - reads it from standard input. For vision models, the path of a picture.",
        show_default=False,
    ),
]
Pair = Annotated[
    str | None,
    typer.Option(
        "--pair",
        metavar="TEXT2",
        help="Second text of a pair; for encoder-decoders, the target text (default: generated).",
    ),
]
Generate = Annotated[
    int | None,
    typer.Option("--generate", metavar="N", min=1, help="Generate N tokens and analyse the continuation too."),
]
Chat = Annotated[bool, typer.Option("--chat", help="Treat TEXT as a user's message and apply the chat template.")]
Sources = Annotated[
    list[Path] | None,
    typer.Option(
        "--source",
        metavar="FILE",
        help="Text file that goes before TEXT, by the template; columns are then sources. Repeatable.",
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="TEMPLATE",
        help="How sources and TEXT are joined: {sources} for all, {0}, {1} or {name} for one, {question} for TEXT.",
    ),
]
By = Annotated[
    Grain | None,
    typer.Option(
        "--by", help="Columns are the words, sentences or lines of TEXT, or a chat's messages.", show_default=False
    ),
]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut inputs that are too long for the model.")]
Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Write a file instead of printing; the suffix chooses the format. Repeatable.",
    ),
]

# Scopes and layers

Scopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        "-s",
        metavar="SCOPE",
        help="Scope to compute, such as ATTNRESLN-N or layer (default: all). Repeatable.",
        autocompletion=completion.complete_scope,
    ),
]
Layers = Annotated[
    list[int] | None,
    typer.Option(
        "--layer", "-l", metavar="L", min=1, help="Layer to compute, counted from 1 (default: all). Repeatable."
    ),
]

# Corpus and engine

DATA_HELP = "File with the corpus, or name of a Hugging Face dataset."
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help=f"Format of DATA: {', '.join(FORMATS)} (default: by its suffix).",
        autocompletion=completion.complete_format,
    ),
]
Reader = Annotated[
    list[str] | None,
    typer.Option("--reader", metavar="KEY=VALUE", help="Option of the reader, such as text=sentence. Repeatable."),
]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Read only the first N entries.")]
BatchSize = Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="Entries per forward pass.")]
EngineOption = Annotated[Engine, typer.Option("--engine", help="Compute in this process or on Ray.")]
Workers = Annotated[int, typer.Option("--workers", metavar="N", min=1, help="Ray workers; each loads the model.")]
Threads = Annotated[int, typer.Option("--threads", metavar="N", min=1, help="Threads per Ray worker.")]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="ADDRESS", help="Address of a running Ray cluster (default: start one)."),
]


def parse_cli_reader_options(given: list[str] | None, option: str = "--reader") -> dict[str, Any]:
    """Parse KEY=VALUE options, of a reader: integers, true, false, none, comma-separated lists or text."""
    found: dict[str, Any] = {}
    for entry in given or []:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise NormscopeError(f"{option} takes KEY=VALUE, not {entry!r}.")
        found[key] = _parse_reader_option(key, value)
    return found


def parse_cli_settings(given: list[str] | None) -> dict[str, dict[str, Any]]:
    """Parse MEASURE.KEY=VALUE settings of measures."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in parse_cli_reader_options(given, "--set").items():
        measure, point, key = name.partition(".")
        if not point or not measure or not key:
            raise NormscopeError(f"--set takes MEASURE.KEY=VALUE, such as explain.generate=20, not {name!r}.")
        found.setdefault(measure, {})[key] = value
    return found


def cli_options_for_engine(engine: Engine, workers: int, threads: int, address: str | None) -> dict[str, Any]:
    """The options of the engine as arguments of a corpus run."""
    return {"engine": engine.value, "workers": workers, "threads": threads, "address": address}


def _parse_reader_option(key: str, value: str) -> Any:
    if value.lower() == "none":
        return None
    if key in LISTS:
        return tuple(value.split(","))
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if re.fullmatch("-?[0-9]+", value) else value
