"""The facts of a report: which model was run on what, with which versions, and by which command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from normscope import default_model
from normscope._version import __version__
from normscope.analyzer import Analyzer
from normscope.corpus.store import Run
from normscope.model_source import ModelSource


def sequence_lengths(run: Run) -> list[int]:
    """The number of tokens of each analysed sequence, on the encoder side if there are two."""
    items = run.scan("items").select("side", "length").collect()
    first = items["side"][0]
    return [int(length) for side, length in items.iter_rows() if side == first]


def describe_sequences(lengths: Sequence[int], limit: int | None) -> str:
    """How many sequences, and how long they are."""
    only = f" (the first {limit:,} entries only)" if limit else ""
    total = sum(lengths)
    return f"{len(lengths):,} of {total / len(lengths):.1f} tokens on average, {total:,} in all{only}"


def describe_run(run: Run) -> str:
    """How many entries of a run could not be analysed, and how well sums close."""
    faults = len(run.scan("errors").select("id").collect()) if "errors" in run.tables else 0
    worst = run.scan("items").select("completeness").max().collect().item()
    entries = int(run.manifest["data"]["entries"])
    return f"{faults:,} of {entries:,} entries could not be analysed; worst completeness error {worst:.1e}"


def versions() -> str:
    """The versions of normscope and of what it computes with."""
    return f"normscope {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"


def model_name(lens: Analyzer) -> str:
    """The name of a model; of the default model, its own name and not its folder."""
    return default_model.NAME if default_model.is_default_model(lens.model_name) else lens.model_name


def describe_layers(lens: Analyzer) -> str:
    """The family with its layers, heads and width."""
    width = getattr(lens.loaded.base.config, "hidden_size", None)
    sides = [
        f"{f'{stack.side} ' if lens.two_sided else ''}{depth} layers with {heads} heads"
        for stack, depth, heads in zip(lens.loaded.stacks, lens.loaded.depths, lens.loaded.head_counts, strict=True)
    ]
    return f"{lens.family.name}: {', '.join(sides)}{f', width {width}' if width else ''}"


def command_line(command: Sequence[str], options: Iterable[tuple[str, Any]]) -> str:
    """The command that makes a report; options whose value is None are left out."""
    parts = [part for option, value in options if value is not None for part in (option, str(value))]
    return shlex.join(["normscope", *command, *parts])


def model_options(model: str | Path | ModelSource | Analyzer, lens: Analyzer) -> list[tuple[str, str | None]]:
    """A model as the command line names it, with the options its numbers depend on."""
    source = ModelSource(lens.model_name) if isinstance(model, Analyzer) else ModelSource.of(model)
    name = "default" if default_model.is_default_model(source.name) else source.name
    return [("--model", name), ("--dtype", source.dtype), ("--revision", source.revision)]


def reader_options(reader: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The options of a reader as the command line has them."""
    return [("--reader", f"{key}={_option_value(value)}") for key, value in reader.items()]


def _option_value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(_option_value, value))
    return str(value).lower() if isinstance(value, bool | None) else str(value)
