"""The facts of a report: what was run on what, and the command that makes it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from normscope import default_model
from normscope._version import __version__
from normscope.model_source import ModelSource

if TYPE_CHECKING:
    from normscope.analyzer import Analyzer
    from normscope.corpus.store import Run
    from normscope.papers.experiments import RunPlan, Setting


def lengths(run: Run) -> list[int]:
    """The tokens of each sequence that was analysed; of an encoder-decoder, of the encoder."""
    items = run.scan("items").select("side", "length").collect()
    first = items["side"][0]
    return [int(length) for side, length in items.iter_rows() if side == first]


def facts(
    setting: Setting, plans: Sequence[RunPlan], runs: Mapping[str, Run], counts: Sequence[int]
) -> tuple[tuple[str, str], ...]:
    lens = setting.lens
    found = [("model", model_name(lens)), ("layers", _layers(lens)), ("precision", str(lens.dtype).split(".")[-1])]
    if setting.data:
        options = ", ".join(f"{key}={value}" for key, value in setting.reader.items())
        read_as = ", ".join(text for text in (setting.format and f"read as {setting.format}", options) if text)
        found.append(("data", f"{setting.data} ({read_as})" if read_as else setting.data))
    if counts:
        only = f" (the first {setting.limit:,} entries only)" if setting.limit else ""
        found.append(
            (
                "sequences",
                f"{len(counts):,} of {sum(counts) / len(counts):.1f} tokens on average, {sum(counts):,} in all{only}",
            )
        )
    if setting.frequencies is not None:
        found.append(("word frequencies", str(setting.frequencies)))
    for plan in plans:
        found.append((f"run \u201c{plan.name}\u201d", _run_fact(setting, plan, runs[plan.name])))
    names = {"normscope": __version__, "transformers": transformers.__version__, "torch": str(torch.__version__)}
    found.append(("versions", ", ".join(f"{name} {version}" for name, version in names.items())))
    return tuple(found)


def _run_fact(setting: Setting, plan: RunPlan, run: Run) -> str:
    if not plan.masked:
        masked = "nothing masked"
    elif setting.mask_seed is not None:
        masked = f"12 % of the tokens masked (seed {setting.mask_seed})"
    else:
        masked = "nothing masked: the model has no mask token"
    faults = len(run.scan("errors").select("id").collect()) if "errors" in run.tables else 0
    worst = run.scan("items").select("completeness").max().collect().item()
    entries = int(run.manifest["data"]["entries"])
    return f"{masked}; {faults:,} of {entries:,} entries could not be analysed; worst completeness error {worst:.1e}"


def model_name(lens: Analyzer) -> str:
    """The name of a model; the default model's own, not its folder."""
    return default_model.NAME if default_model.is_in(lens.model_name) else lens.model_name


def _layers(lens: Analyzer) -> str:
    width = getattr(lens.base.config, "hidden_size", None)
    sides = [
        f"{f'{stack.side} ' if lens.two_sided else ''}{depth} layers with {heads} heads"
        for stack, depth, heads in zip(lens.stacks, lens.depths, lens.head_counts, strict=True)
    ]
    return f"{lens.family.name}: {', '.join(sides)}{f', width {width}' if width else ''}"


def command_line(
    paper: str,
    model: str | Path | ModelSource | Analyzer,
    setting: Setting,
    out: str | Path,
    readings: Sequence[str],
    experiments: Sequence[str] | None,
    batch_size: int,
) -> str:
    """The command that makes this report."""
    parts = ["normscope", "paper", paper, *([setting.data] if setting.data else [])]
    options: list[tuple[str, Any]] = [
        *model_options(model, setting.lens),
        ("--format", setting.format),
        *(("--reader", f"{key}={typed(value)}") for key, value in setting.reader.items()),
        *(("--experiment", entry) for entry in experiments or ()),
        *(("--reading", entry) for entry in readings),
        ("--frequencies", setting.frequencies),
        ("--example", setting.example),
        ("--limit", setting.limit),
        ("--batch-size", None if batch_size == 16 else batch_size),
        ("--out", out),
    ]
    for option, value in options:
        parts += [] if value is None else [option, str(value)]
    return shlex.join(parts)


def model_options(model: str | Path | ModelSource | Analyzer, lens: Analyzer) -> list[tuple[str, str | None]]:
    """A model as the command line names it, with what its numbers depend on."""
    source = ModelSource.of(model) if isinstance(model, str | Path | ModelSource) else ModelSource(lens.model_name)
    name = "default" if default_model.is_in(source.name) else source.name
    return [("--model", name), ("--dtype", source.dtype), ("--revision", source.revision)]


def typed(value: Any) -> str:
    """A value as it is typed; several have commas between them."""
    if isinstance(value, tuple | list):
        return ",".join(map(typed, value))
    return str(value).lower() if isinstance(value, bool | None) else str(value)
