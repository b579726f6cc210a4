"""Check that a model is decomposed exactly: maps against norms of vectors, sums of vectors against the model."""

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
PAIRS = (  # source and target
    ("Colin Fleming played tennis.", "Colin Fleming a joué au tennis."),
    ("Where is the station? It is just behind the old town hall.", "Où est la gare ?"),
    ("Yes.", "Oui, bien sûr, avec le plus grand plaisir."),
)
LENGTHS = (9, 23, 4)  # of random inputs, in tokens
LONG_LENGTH = 512  # tokens of the long input, if the model has that many positions
LIMITS = {  # (maps, sums, padded) relative to the row's largest cell or the model's vector
    torch.float32: (2e-6, 1e-5, 1e-4),
    torch.float64: (1e-9, 1e-9, 1e-9),
}
# Model types that transformers can compute entirely in float64. The others compute norms or softmax in float32.
DOUBLE_MODELS = (
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "mpnet", "deberta-v2"),
    *("gpt2", "bart", "marian", "whisper", "dinov2"),
)
SINGLE_LIMITS = (1e-9, 1e-6, 1e-5)  # limits for the other models in float64
VECTORS_AT_ONCE = 2**15  # contribution vectors checked per layer; for longer inputs, evenly spaced rows


@dataclass
class CheckRow:
    """The worst errors of one scope of one side over all inputs and layers."""

    scope: str
    side: str  # of an encoder-decoder; empty for other models
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
    """The errors that `check` measured, by scope."""

    rows: tuple[CheckRow, ...]
    inputs: int = field(default=0)
    # kind of input -> error of a traced pass against the model alone; infinite: refused, NaN: the model gives NaN
    passes: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)  # kind of input -> reason

    @property
    def ok(self) -> bool:
        """Whether all errors are within their limits."""
        return all(row.ok for row in self.rows) and not any(error > proof.CLOSE for error in self.passes.values())


def check(lens: Analyzer, progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Check every scope and layer on a few inputs, each alone and all in one padded batch, and compare every layer of a
    traced pass with the model alone on several kinds of input."""
    passes, refusals = {}, {}
    for kind, one in _proof_inputs(lens.loaded).items():
        try:
            passes[kind] = proof.compare_proof_passes(lens.loaded, one)[1]
        except NormscopeError as error:
            passes[kind], refusals[kind] = inf, str(error)
    given = _check_inputs(lens)
    rows: dict[tuple[str, str], CheckRow] = {}
    batched = list(lens.stream(given, batch_size=len(given)))
    for number, (one, together) in enumerate(zip(given, batched, strict=True)):
        others = _analyses_by_side(together)
        for side, alone in _analyses_by_side(lens.analyze(one)).items():
            stack = lens.family.stack(side) if side else lens.loaded.stacks[0]
            for scope in alone.scopes:
                row = rows.setdefault((side, scope), CheckRow(scope, side, *_error_limits(lens)))
                row.padded = max(row.padded, _largest_difference(others[side][scope], alone[scope]))
                if scope == "MIX-W":  # rows need not sum to one: the error of the values that they mix
                    row.sums = max(row.sums, _largest_error(alone.completeness[scope]))
                elif scope.endswith("-W"):
                    row.sums = max(row.sums, _weight_sum_error(alone[scope], stack))
                else:
                    _check_all_vectors(alone, scope, row)
        if progress is not None:
            progress(number + 1, len(given))
    return CheckReport(tuple(rows.values()), len(given), passes, refusals)


def _proof_inputs(loaded: LoadedModel) -> dict[str, proof.ProofInput]:
    """Several kinds of input: alone, padded on either side, with holes in the mask, long."""
    alone = [encode(loaded, one)[0] for one in random_inputs(loaded, LENGTHS)]
    found = {"alone": proof.proof_input(loaded, alone[:1])}
    if loaded.family.input != "text":
        return found
    found["padded right"] = proof.proof_input(loaded, alone)
    found["padded left"] = _left_padded_input(loaded, alone)
    holed = random_inputs(loaded, LENGTHS[:1])[0]
    mask = torch.ones_like(holed["input_ids"])
    mask[1::3] = 0
    found["holes in the mask"] = proof.proof_input(loaded, encode(loaded, {**holed, "attention_mask": mask}))
    found["long"] = proof.proof_input(loaded, [encode(loaded, one)[0] for one in random_inputs(loaded, [LONG_LENGTH])])
    return found


def _left_padded_input(loaded: LoadedModel, items: list[Item]) -> proof.ProofInput:
    """The items padded on the left, as for generation; for an encoder-decoder, the source side."""
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


def _analyses_by_side(result: Analysis | EncoderDecoderAnalysis) -> dict[str, Analysis]:
    """The analyses of a result by side. An Analysis has the empty name."""
    return dict(result.sides) if isinstance(result, EncoderDecoderAnalysis) else {"": result}


def _error_limits(lens: Analyzer) -> tuple[float, float, float]:
    double = lens.loaded.base.config.model_type in DOUBLE_MODELS
    return LIMITS[lens.dtype] if double or lens.dtype == torch.float32 else SINGLE_LIMITS


def _weight_sum_error(weights: Tensor, stack: Stack) -> float:
    """How far the sums of rows of weights are from 1, or above 1 if attention sinks take a part."""
    parts = [step.part for step in layer_steps(stack.blocks)]
    excess = weights.sum(-1) - 1
    sinks = any(isinstance(part, Attention) and part.sinks for part in parts)
    return _largest_error(excess.clamp_min(0) if sinks else excess.abs())


def _check_all_vectors(result: Analysis, scope: str, row: CheckRow) -> None:
    step = -(-len(result.rows) * len(result.columns) // VECTORS_AT_ONCE)
    chosen = range(0, len(result.rows), step)
    for place, layer in enumerate(result.layers):
        found = result.parts(scope, layer, chosen)
        norms = torch.linalg.vector_norm(found.contributions, dim=-1)
        row.maps = max(row.maps, _largest_difference(result[scope][place, ::step], norms))
        missing = torch.linalg.vector_norm(found.contributions.sum(1) + found.bias - found.actual, dim=-1)
        length = torch.maximum(torch.linalg.vector_norm(found.actual, dim=-1), norms.amax(-1))
        row.sums = max(row.sums, _largest_error(missing / length))


def _largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest cell of its row."""
    return _largest_error((a - b).abs() / b.abs().amax(-1, keepdim=True))


def _largest_error(errors: Tensor) -> float:
    """The largest error, with NaN as infinity because comparisons with NaN are false."""
    worst = float(errors.amax())
    return worst if isfinite(worst) else inf


def _check_inputs(lens: Analyzer) -> list[Any]:
    """A few inputs: texts, or random inputs if there is no tokenizer."""
    if lens.family.input == "text" and lens.tokenizer is not None:
        return list(PAIRS if lens.two_sided else TEXTS)
    return list(random_inputs(lens.loaded, LENGTHS))
