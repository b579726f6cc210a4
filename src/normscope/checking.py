"""Proof that a model decomposes exactly: maps against the norms of vectors, their sums against the model itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from normscope.analysis import Analysis, EncoderDecoderAnalysis
from normscope.analyzer import Analyzer
from normscope.models.spec import Attention, Stack
from normscope.scopes import steps_of

TEXTS: tuple[str | tuple[str, str], ...] = (
    "Colin Fleming played the highway tiny soap opera.",
    ("Where is the station?", "It is just behind the old town hall, on the left side of the river."),
    "Yes.",
)
PAIRS = (  # of a source and a target
    ("Colin Fleming played tennis.", "Colin Fleming a joué au tennis."),
    ("Where is the station? It is just behind the old town hall.", "Où est la gare ?"),
    ("Yes.", "Oui, bien sûr, avec le plus grand plaisir."),
)
LENGTHS = (9, 23, 4)  # of made-up inputs, for a model without a tokenizer
LIMITS = {  # (maps, sums, padded) relative to the row's largest cell or the model's vector
    torch.float32: (2e-6, 1e-5, 1e-4),
    torch.float64: (1e-9, 1e-9, 1e-9),
}
# Model types that transformers computes in float64 throughout; of the others, norms or softmax are in float32.
DOUBLE = (
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "mpnet", "deberta-v2"),
    *("gpt2", "bart", "marian", "whisper", "dinov2"),
)
SINGLE = (1e-9, 1e-6, 1e-5)  # limits of those in float64
VECTORS = 2**15  # contribution vectors that are looked at at once: of a long input, rows spread over all of it


@dataclass
class CheckRow:
    """The worst errors of one scope of one side over all inputs and layers."""

    scope: str
    side: str  # of an encoder-decoder
    maps_limit: float
    sums_limit: float
    padded_limit: float
    maps: float = 0.0  # |map - norm of vectors()| over the row's largest cell
    sums: float = 0.0  # |sum of vectors + bias - the model's vector| over the larger of its length and the largest cell
    padded: float = 0.0  # |map alone - map in a padded batch| over the row's largest cell

    @property
    def ok(self) -> bool:
        """Whether all errors are within their limits."""
        return self.maps <= self.maps_limit and self.sums <= self.sums_limit and self.padded <= self.padded_limit


@dataclass
class CheckReport:
    """What `check` found, scope by scope."""

    rows: tuple[CheckRow, ...]
    inputs: int = field(default=0)

    @property
    def ok(self) -> bool:
        """Whether all errors are within their limits."""
        return all(row.ok for row in self.rows)


def check(lens: Analyzer, progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Every scope and layer of a few inputs, each alone and together in one padded batch."""
    given = _samples(lens)
    rows: dict[tuple[str, str], CheckRow] = {}
    batched = list(lens.stream(given, batch_size=len(given)))
    for number, (one, together) in enumerate(zip(given, batched, strict=True)):
        others = _sides(together)
        for side, alone in _sides(lens.analyze(one)).items():
            stack = lens.family.stack(side) if side else lens.stacks[0]
            for scope in alone.scopes:
                row = rows.setdefault((side, scope), CheckRow(scope, side, *_limits(lens)))
                row.padded = max(row.padded, _distance(others[side][scope], alone[scope]))
                if scope.endswith("-W"):
                    row.sums = max(row.sums, _beyond_one(alone[scope], stack))
                else:
                    _check_vectors(alone, scope, row)
        if progress is not None:
            progress(number + 1, len(given))
    return CheckReport(tuple(rows.values()), len(given))


def _sides(result: Analysis | EncoderDecoderAnalysis) -> dict[str, Analysis]:
    """The analyses in a result by side; one side alone has no name."""
    return dict(result.sides) if isinstance(result, EncoderDecoderAnalysis) else {"": result}


def _limits(lens: Analyzer) -> tuple[float, float, float]:
    double = lens.base.config.model_type in DOUBLE
    return LIMITS[lens.dtype] if double or lens.dtype == torch.float32 else SINGLE


def _beyond_one(weights: Tensor, stack: Stack) -> float:
    """How far rows of weights are from 1, or above it where attention sinks take a part of them."""
    parts = [step.part for step in steps_of(stack.blocks)]
    excess = weights.sum(-1) - 1
    sinks = any(isinstance(part, Attention) and part.sinks for part in parts)
    return _largest(excess.clamp_min(0) if sinks else excess.abs())


def _check_vectors(result: Analysis, scope: str, row: CheckRow) -> None:
    step = -(-len(result.rows) * len(result.columns) // VECTORS)
    chosen = range(0, len(result.rows), step)
    for place, layer in enumerate(result.layers):
        found = result.parts(scope, layer, chosen)
        norms = torch.linalg.vector_norm(found.contributions, dim=-1)
        row.maps = max(row.maps, _distance(result[scope][place, ::step], norms))
        missing = torch.linalg.vector_norm(found.contributions.sum(1) + found.bias - found.actual, dim=-1)
        length = torch.maximum(torch.linalg.vector_norm(found.actual, dim=-1), norms.amax(-1))
        row.sums = max(row.sums, _largest(missing / length))


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference over the largest cell of its row."""
    return _largest((a - b).abs() / b.amax(-1, keepdim=True))


def _largest(errors: Tensor) -> float:
    """NaN counts as infinite: no comparison would find it."""
    worst = float(errors.amax())
    return worst if isfinite(worst) else inf


def _samples(lens: Analyzer) -> list[Any]:
    """A few inputs: texts, or made-up tokens where there is no tokenizer, pictures and sounds of noise."""
    generator = torch.Generator().manual_seed(0)
    config: Any = lens.base.config
    if lens.family.input == "image":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        pictures = torch.randn(len(LENGTHS), config.num_channels, height, width, generator=generator)
        return [{"pixel_values": picture} for picture in pictures]
    targets = [_ids(lens, n, generator) for n in reversed(LENGTHS)]
    if lens.family.input == "audio":
        sounds = torch.randn(len(LENGTHS), config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return [{"input_features": s, "decoder_input_ids": t} for s, t in zip(sounds, targets, strict=True)]
    if lens.tokenizer is not None:
        return list(PAIRS if lens.two_sided else TEXTS)
    made: list[Any] = [{"input_ids": _ids(lens, n, generator)} for n in LENGTHS]
    if lens.two_sided:
        made = [one | {"decoder_input_ids": target} for one, target in zip(made, targets, strict=True)]
    return made


def _ids(lens: Analyzer, count: int, generator: torch.Generator) -> Tensor:
    low = min(5, lens.limits.vocabulary - 1)
    size = (min(count, lens.limits.positions or count),)
    return torch.randint(low, lens.limits.vocabulary, size, generator=generator)
