"""What several papers share: masked input, layers in words, numbers by layer, and claims beside published numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from normscope.corpus.measuring import Columns
from normscope.labels import format_ranges
from normscope.measures import similarity
from normscope.papers import published
from normscope.papers.runs import RunPlan
from normscope.papers.study import Setting
from normscope.reports.report import Claim, nan_to_none

CLEAR = 0.1  # a correlation closer to zero supports no claim about its sign


def masked_run(setting: Setting) -> str:
    """The name of the run that the papers mask; models without masked-LM training read unmasked text."""
    return "masked" if setting.masks and getattr(setting.readings, "masking", True) else "plain"


def describe_input(setting: Setting) -> str:
    """Whether the text of `masked_run` is masked, and why not."""
    if masked_run(setting) == "masked":
        return "12 % of the tokens of each sequence are masked, as in the paper."
    why = "as asked for" if setting.masks else "since this model was trained with no masked tokens"
    return f"The text is read as it is, {why}; the paper masks 12 % of the tokens."


def masked_plan(setting: Setting, measures: tuple[str, ...], scopes: tuple[str, ...], name: str = "") -> RunPlan:
    """A plan for the run that the papers mask, or for another that masks the same tokens."""
    run = masked_run(setting)
    return RunPlan(name or run, measures, scopes, masked=run == "masked")


def layer_numbers(key: str, values: Iterable[float], layers: Iterable[int] | None = None) -> dict[str, float]:
    """`key.L1`, `key.L2`, ... -> the values of the layers."""
    values = list(values)
    return {
        f"{key}.L{n}": v for n, v in zip(range(1, len(values) + 1) if layers is None else layers, values, strict=True)
    }


def finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """The numbers that are defined."""
    return {key: value for key, value in numbers.items() if value is not None and math.isfinite(value)}


def layers_text(layers: Sequence[int]) -> str:
    """ "layers 3-7, 9-11" for sorted numbers, "layer 6" for one, "no layer" for none."""
    return f"layer{'s' if len(layers) > 1 else ''} {format_ranges(layers)}" if layers else "no layer"


def typed_columns(types: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> Columns:
    """Rows as columns of the given types; text (type object) as lists, since an empty array of objects cannot be
    written."""
    values = list(zip(*rows, strict=True)) or [()] * len(types)
    return {
        name: list(column) if type is object else np.array(column, dtype=type)
        for (name, type), column in zip(types.items(), values, strict=True)
    }


def claim_beside(
    text: str, holds: bool | None, template: str, ours: Sequence[float], reference: Mapping[str, float], *keys: str
) -> Claim:
    """A claim that is stated in the same words with our numbers and with the published ones."""
    return Claim(text, holds, template.format(*ours), published.quote(reference, template, *keys))


def published_curves(reference: Mapping[str, float], keys: Mapping[str, str], depth: int) -> dict[str, list[float]]:
    """name -> the published values of layers 1 to `depth`, given the keys with {} for the layer; only complete curves,
    and none if the published model has more layers."""
    if any(key.format(depth + 1) in reference for key in keys.values()):
        return {}
    found = {name: [reference.get(key.format(n)) for n in range(1, depth + 1)] for name, key in keys.items()}
    return {name: [v for v in values if v is not None] for name, values in found.items() if None not in values}


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's; None for fewer than three pairs, or if one side is constant."""
    return _correlation(similarity.spearman, a, b)


def linear_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's; None for fewer than three pairs, or if one side is constant."""
    return _correlation(similarity.correlation, a, b)


def _correlation(measure: Any, a: Sequence[float], b: Sequence[float]) -> float | None:
    if len(a) < 3:
        return None
    return nan_to_none(float(measure(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))))
