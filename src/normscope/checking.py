"""Proof that a model decomposes exactly: maps against the norms of vectors, their sums against the model itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from normscope.analysis import Analysis
from normscope.analyzer import Analyzer
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.errors import NormscopeError
from normscope.inputs.encode import encode
from normscope.inputs.item import Item
from normscope.inputs.samples import random_inputs
from normscope.models.loaded import LoadedModel
from normscope.models.scopes import layer_steps
from normscope.models.spec import Attention, Stack
from normscope.tracing import proof

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
        return all(row.ok for row in self.rows) and not any(error > proof.CLOSE for error in self.passes.values())


def check(lens: Analyzer, progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Every scope and layer of a few inputs, each alone and together in one padded batch; and of several kinds of
    input every layer of a watched pass against the model alone."""
    passes, refusals = {}, {}
    for kind, one in _proof_inputs(lens.loaded).items():
        try:
            passes[kind] = proof.compare_passes(lens.loaded, one)[1]
        except NormscopeError as error:
            passes[kind], refusals[kind] = inf, str(error)
    given = _samples(lens)
    rows: dict[tuple[str, str], CheckRow] = {}
    batched = list(lens.stream(given, batch_size=len(given)))
    for number, (one, together) in enumerate(zip(given, batched, strict=True)):
        others = _sides(together)
        for side, alone in _sides(lens.analyze(one)).items():
            stack = lens.family.stack(side) if side else lens.loaded.stacks[0]
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


def _proof_inputs(loaded: LoadedModel) -> dict[str, proof.ProofInput]:
    """Inputs of all kinds: alone, padded on either side, with holes in the mask, long."""
    alone = [encode(loaded, one)[0] for one in random_inputs(loaded, LENGTHS)]
    found = {"alone": proof.proof_input(loaded, alone[:1])}
    if loaded.family.input != "text":
        return found
    found["padded right"] = proof.proof_input(loaded, alone)
    found["padded left"] = _pad_left(loaded, alone)
    holed = random_inputs(loaded, LENGTHS[:1])[0]
    mask = torch.ones_like(holed["input_ids"])
    mask[1::3] = 0
    found["holes in the mask"] = proof.proof_input(loaded, encode(loaded, {**holed, "attention_mask": mask}))
    found["long"] = proof.proof_input(loaded, [encode(loaded, one)[0] for one in random_inputs(loaded, [LONG])])
    return found


def _pad_left(loaded: LoadedModel, items: list[Item]) -> proof.ProofInput:
    """The texts with their padding in front, as generation has it; of an encoder-decoder the sources."""
    given = proof.proof_input(loaded, items)
    batch, real = dict(given.inputs), dict(given.real)
    ids, mask = batch["input_ids"].clone(), batch["attention_mask"].clone()
    for row, count in enumerate((mask.shape[1] - mask.sum(-1)).tolist()):
        ids[row], mask[row] = ids[row].roll(count), mask[row].roll(count)
    batch |= {"input_ids": ids, "attention_mask": mask}
    side = loaded.stacks[0].side
    if side == "decoder" and "position_ids" in loaded.limits.keys:
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    virtual = real[side].shape[1] - mask.shape[1]
    real[side] = torch.cat([torch.ones_like(mask[:, :virtual]), mask], dim=1).bool()
    return proof.ProofInput(batch, real)


def _sides(result: Analysis | EncoderDecoderAnalysis) -> dict[str, Analysis]:
    """The analyses in a result by side; one side alone has no name."""
    return dict(result.sides) if isinstance(result, EncoderDecoderAnalysis) else {"": result}


def _limits(lens: Analyzer) -> tuple[float, float, float]:
    double = lens.loaded.base.config.model_type in DOUBLE
    return LIMITS[lens.dtype] if double or lens.dtype == torch.float32 else SINGLE


def _beyond_one(weights: Tensor, stack: Stack) -> float:
    """How far rows of weights are from 1, or above it where attention sinks take a part of them."""
    parts = [step.part for step in layer_steps(stack.blocks)]
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
    return list(random_inputs(lens.loaded, LENGTHS))
