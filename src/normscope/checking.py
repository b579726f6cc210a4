"""Proof that a model decomposes exactly: maps against the norms of vectors, their sums against the model itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from normscope import proving
from normscope.analysis import Analysis
from normscope.analyzer import Analyzer
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.errors import NormscopeError
from normscope.inputs import Item, real
from normscope.models.spec import Attention, Stack
from normscope.samples import made_up
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
LENGTHS = (9, 23, 4)  # of made-up inputs
LONG = 512  # tokens of a long input, where the model has so many positions
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
    # kind of input -> watched pass against the model alone; infinite: refused, NaN: not finite by itself
    passes: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)  # kind of input -> why

    @property
    def ok(self) -> bool:
        """Whether all errors are within their limits."""
        return all(row.ok for row in self.rows) and not any(error > proving.CLOSE for error in self.passes.values())


def check(lens: Analyzer, progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Every scope and layer of a few inputs, each alone and together in one padded batch; and of several kinds of
    input every layer of a watched pass against the model alone."""
    passes, refusals = {}, {}
    for kind, one in _passes(lens).items():
        try:
            passes[kind] = proving.compare(one)[1]
        except NormscopeError as error:
            passes[kind], refusals[kind] = inf, str(error)
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
    return CheckReport(tuple(rows.values()), len(given), passes, refusals)


def _passes(lens: Analyzer) -> dict[str, proving.Pass]:
    """Inputs of all kinds: alone, padded on either side, with holes in the mask, long."""
    alone = [lens.items(one)[0] for one in made_up(lens, LENGTHS)]
    sides = [stack.side for stack in lens.stacks]
    found = {"alone": lens.as_pass(lens.batch(alone[:1]), {s: real(alone[:1], s, lens.base.device) for s in sides})}
    if lens.family.input != "text":
        return found
    found["padded right"] = lens.as_pass(lens.batch(alone), {s: real(alone, s, lens.base.device) for s in sides})
    found["padded left"] = _padded_left(lens, alone)
    holed = made_up(lens, LENGTHS[:1])[0]
    mask = torch.ones_like(holed["input_ids"])
    mask[1::3] = 0
    holes = lens.items({**holed, "attention_mask": mask})
    found["holes in the mask"] = lens.as_pass(lens.batch(holes), {s: real(holes, s, lens.base.device) for s in sides})
    long = [lens.items(one)[0] for one in made_up(lens, [LONG])]
    found["long"] = lens.as_pass(lens.batch(long), {s: real(long, s, lens.base.device) for s in sides})
    return found


def _padded_left(lens: Analyzer, items: list[Item]) -> proving.Pass:
    """The texts with their padding in front, as generation has it; of an encoder-decoder the sources."""
    batch = lens.batch(items)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for row, count in enumerate((mask.shape[1] - mask.sum(-1)).tolist()):
        batch["input_ids"][row], batch["attention_mask"][row] = ids[row].roll(count), mask[row].roll(count)
    if lens.stacks[0].side == "decoder" and "position_ids" in lens.limits.keys:
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    sides = {stack.side: real(items, stack.side, lens.base.device) for stack in lens.stacks}
    virtual = sides[lens.stacks[0].side].shape[1] - mask.shape[1]
    sides[lens.stacks[0].side] = torch.cat([torch.ones_like(mask[:, :virtual]), mask], dim=1).bool()
    return lens.as_pass(batch, sides)


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
    """A few inputs: texts, or made-up ones where there is no tokenizer."""
    if lens.family.input == "text" and lens.tokenizer is not None:
        return list(PAIRS if lens.two_sided else TEXTS)
    return list(made_up(lens, LENGTHS))
