"""Facts stated in a report: model, data, versions, and the command that produced it."""

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
from normscope.models.source import ModelSource


def sequence_lengths(run: Run) -> list[int]:
    """The number of tokens of each analysed sequence, on the encoder side if there are two."""
    items = run.scan("items").select("side", "length").collect()
    first = items["side"][0]
    return [int(length) for side, length in items.iter_rows() if side == first]


def sequence_facts(lengths: Sequence[int], limit: int | None) -> str:
    """The number of sequences and their lengths, in words."""
    only = f" (only the first {limit:,} entries)" if limit else ""
    total = sum(lengths)
    return f"{len(lengths):,} with {total / len(lengths):.1f} tokens on average, {total:,} in total{only}"


def run_facts(run: Run) -> str:
    """The number of entries that could not be analysed, and the worst completeness error, in words."""
    faults = len(run.scan("errors").select("id").collect()) if "errors" in run.tables else 0
    worst = run.scan("items").select("completeness").max().collect().item()
    entries = int(run.manifest["data"]["entries"])
    return f"{faults:,} of {entries:,} entries could not be analysed; worst completeness error {worst:.1e}"


def package_version_facts() -> str:
    """The versions of normscope, transformers and torch."""
    return f"normscope {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"


def fact_model_name(lens: Analyzer) -> str:
    """The name of a model; for the default model, its name instead of its folder."""
    return model_label(lens.model_name)


def model_label(name: str) -> str:
    """A model's name or path; for the default model, its name instead of its folder."""
    return default_model.NAME if default_model.is_in(name) else name


def layer_facts(lens: Analyzer) -> str:
    """The model family with its number of layers, heads and width, in words."""
    width = getattr(lens.loaded.base.config, "hidden_size", None)
    sides = [
        f"{f'{stack.side} ' if lens.two_sided else ''}{depth} layers with {heads} heads"
        for stack, depth, heads in zip(lens.loaded.stacks, lens.loaded.depths, lens.loaded.head_counts, strict=True)
    ]
    return f"{lens.family.name}: {', '.join(sides)}{f', width {width}' if width else ''}"


def shell_command(command: Sequence[str], options: Iterable[tuple[str, Any]]) -> str:
    """A normscope command as a shell line, without options whose value is None."""
    parts = [part for option, value in options if value is not None for part in (option, str(value))]
    return shlex.join(["normscope", *command, *parts])


def model_arguments(model: str | Path | ModelSource | Analyzer, lens: Analyzer) -> list[tuple[str, str | None]]:
    """The command-line options that select a model, with those that affect its numbers."""
    return source_arguments(ModelSource(lens.model_name) if isinstance(model, Analyzer) else ModelSource.of(model))


def source_arguments(source: ModelSource) -> list[tuple[str, str | None]]:
    """The same for a model given by name."""
    name = "default" if default_model.is_in(source.name) else source.name
    return [("--model", name), ("--dtype", source.dtype), ("--revision", source.revision)]


def reader_arguments(reader: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Reader options as command-line arguments."""
    return [("--reader", f"{key}={_argument_text(value)}") for key, value in reader.items()]


def _argument_text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(_argument_text, value))
    return str(value).lower() if isinstance(value, bool | None) else str(value)
