"""Proof that a model decomposes exactly: maps against the norms of vectors, their sums against the model itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normscope.analysis import Analysis
from normscope.analyzer import Analyzer
from normscope.inputs import Input

TEXTS: tuple[str | tuple[str, str], ...] = (
    "Colin Fleming played the highway tiny soap opera.",
    ("Where is the station?", "It is just behind the old town hall, on the left side of the river."),
    "Yes.",
)
LENGTHS = (9, 23, 4)  # of made-up inputs, for a model without a tokenizer
LIMITS = {  # (maps, sums, padded) relative to the row's largest cell or the model's vector
    torch.float32: (2e-6, 1e-5, 1e-4),
    torch.float64: (1e-9, 1e-9, 1e-9),
}


@dataclass
class CheckRow:
    """The worst errors of one scope over all inputs and layers."""

    scope: str
    maps_limit: float
    sums_limit: float
    padded_limit: float
    maps: float = 0.0  # |map - norm of vectors()| over the row's largest cell
    sums: float = 0.0  # |sum of vectors + bias - the model's vector| over the larger of its length and the largest cell
    padded: float = 0.0  # |map alone - map in a padded batch| over the row's largest cell

    @property
    def ok(self) -> bool:
        return self.maps <= self.maps_limit and self.sums <= self.sums_limit and self.padded <= self.padded_limit


@dataclass
class CheckReport:
    rows: tuple[CheckRow, ...]
    inputs: int = field(default=0)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


def check(lens: Analyzer, progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Every scope and layer of a few inputs, each alone and together in one padded batch."""
    given = _samples(lens)
    limits = LIMITS[lens.dtype]
    rows: dict[str, CheckRow] = {}
    batched = list(lens.stream(given, batch_size=len(given)))
    for number, (one, together) in enumerate(zip(given, batched, strict=True)):
        alone = lens.analyze(one)
        for scope in alone.scopes:
            row = rows.setdefault(scope, CheckRow(scope, *limits))
            row.padded = max(row.padded, _distance(together[scope], alone[scope]))
            if scope.endswith("-W"):
                row.sums = max(row.sums, float((alone[scope].sum(-1) - 1).abs().amax()))
            else:
                _check_vectors(alone, scope, row)
        if progress is not None:
            progress(number + 1, len(given))
    return CheckReport(tuple(rows.values()), len(given))


def _check_vectors(result: Analysis, scope: str, row: CheckRow) -> None:
    for place, layer in enumerate(result.layers):
        found = result.parts(scope, layer)
        norms = torch.linalg.vector_norm(found.contributions, dim=-1)
        row.maps = max(row.maps, _distance(result[scope][place], norms))
        missing = torch.linalg.vector_norm(found.contributions.sum(1) + found.bias - found.actual, dim=-1)
        length = torch.maximum(torch.linalg.vector_norm(found.actual, dim=-1), norms.amax(-1))
        row.sums = max(row.sums, float((missing / length).amax()))


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference over the largest cell of its row; NaN counts as infinite."""
    apart = ((a - b).abs() / b.amax(-1, keepdim=True)).amax()
    return float(apart) if bool(torch.isfinite(apart)) else float("inf")


def _samples(lens: Analyzer) -> list[Input]:
    if lens.tokenizer is not None:
        return list(TEXTS)
    generator = torch.Generator().manual_seed(0)
    low = min(5, lens.limits.vocabulary - 1)
    return [
        {
            "input_ids": torch.randint(
                low, lens.limits.vocabulary, (min(n, lens.limits.positions or n),), generator=generator
            )
        }
        for n in LENGTHS
    ]
