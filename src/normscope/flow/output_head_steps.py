"""The known forms of a step between two modules of an output head, each checked in every element.

A step takes vectors s (rows, d) to t. It may pool the rows, and is then the identity, a named activation, a softcap, a
factor, or the addition of a constant vector; the numbers decide which. A step of any other form is unknown and never
guessed. An activation g is frozen at its integrated gradient ``(g(a) - g(0)) / a``, whose limit at a = 0 is g'(0), so
that ``t = gain * s + g(0)``: constants are attributed to no token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from normscope.decompose.activations import CLOSED_FORMS, gate_coefficient
from normscope.flow.maps import FrozenMap, FrozenPool, FrozenScale
from normscope.tracing.recorded import ELEMENT, PIECE, closeness_misfit, is_close

Function = Callable[[Tensor], Tensor]
ACTIVATIONS = ("tanh", "relu", "gelu", "gelu_pytorch_tanh", "gelu_new", "silu", "quick_gelu", "sigmoid")
MIN_ELEMENTS = 4  # to recognise a factor, or a step after pooling
MAX_SPECIAL = 16  # special tokens before the patches of an image
SPREAD = 1e-2  # relative spread of the numbers needed to distinguish a factor from a constant


@dataclass(frozen=True)
class StepCandidates:
    """The activations, numbers and vectors of a model that a step may use."""

    activations: Mapping[str, Function]
    softcap: float | None
    factors: tuple[float, ...]  # numbers of the config, their inverses and roots
    constants: Mapping[int, Tensor]  # width -> (count, width): parameters and buffers that are vectors
    real: Tensor  # (n,): False for masked tokens


@dataclass(frozen=True)
class HeadStep:
    """A step of known form."""

    maps: tuple[FrozenMap, ...] = ()
    fits: Callable[[Tensor, Tensor], bool] = torch.equal  # whether the step takes s to t in another pass
    sure: bool = True  # False: a factor or constant not found in the model, which may depend on the input
    note: str = ""


def head_step_candidates(model: PreTrainedModel, real: Tensor, dtype: torch.dtype) -> StepCandidates:
    """The candidates in the config and the parameters of a model."""
    values = list(_head_step_config_entries(model.config.to_dict()))
    named = [value for _, value in values if isinstance(value, str) and value in ACT2FN]
    numbers = [(key, float(v)) for key, v in values if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
    capped = [v for key, v in numbers if key == "final_logit_softcapping"]
    vectors: dict[int, list[Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dim() > 0 and tensor.numel() == tensor.shape[-1]:
            vectors.setdefault(tensor.numel(), []).append(tensor.detach().flatten().to(real.device, dtype))
    activations = {name: ACT2FN[name] for name in dict.fromkeys((*ACTIVATIONS, *named))}
    factors = tuple(factor for _, v in numbers for factor in (v, 1 / v, v**0.5, v**-0.5))
    constants = {width: torch.stack(some) for width, some in vectors.items()}
    return StepCandidates(activations, capped[0] if capped else None, factors, constants, real)


def _head_step_config_entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of a config and its nested configs."""
    for key, value in config.items():
        yield key, value
        if isinstance(value, Mapping):
            yield from _head_step_config_entries(value)


def find_output_head_steps(s: Tensor, t: Tensor, dtype: torch.dtype, known: StepCandidates) -> list[HeadStep]:
    """The steps that take s to t, both computed in `dtype`: usually one or none, several if tokens are equal."""
    if is_close(s, t, dtype):
        return [HeadStep()]
    if len(t) == 1 and len(s) > 1:
        return _find_pooling_head_steps(s, t, dtype, known)
    one = _find_elementwise_head_step(s, t, dtype, known)
    return [] if one is None else [one]


def _find_pooling_head_steps(s: Tensor, t: Tensor, dtype: torch.dtype, known: StepCandidates) -> list[HeadStep]:
    """The steps that pool all vectors into one, perhaps followed by an elementwise function."""
    pools = [
        pool for pool in _head_step_candidate_pools(s, known.real) if len(pool.weights) * s.shape[-1] == t.shape[-1]
    ]
    plain = [
        HeadStep((pool,), lambda s, t, pool=pool: _matches_head_step_pool(pool, dtype, s, t))  # type: ignore[misc]
        for pool in pools
        if _matches_head_step_pool(pool, dtype, s, t)
    ]
    if plain or t.numel() < MIN_ELEMENTS:
        return plain
    changed = [
        (pool, _find_elementwise_head_step(pool.forward(s[:, None], None)[:, 0], t, dtype, known)) for pool in pools
    ]
    return [_pool_then_head_step(pool, one) for pool, one in changed if one is not None]


def _pool_then_head_step(pool: FrozenPool, one: HeadStep) -> HeadStep:
    def fits(s: Tensor, t: Tensor) -> bool:
        return one.fits(pool.forward(s[:, None], None)[:, 0], t)

    return HeadStep((pool, *one.maps), fits, one.sure, one.note)


def _matches_head_step_pool(pool: FrozenPool, dtype: torch.dtype, s: Tensor, t: Tensor) -> bool:
    """Whether pooling s gives t: exactly for a single row, within rounding for a mean."""
    made = pool.forward(s[:, None], None)[:, 0]
    if len(pool.weights) == 1 and int(pool.weights.count_nonzero()) == 1:
        return torch.equal(made.to(dtype), t.to(dtype))
    size = pool.forward(s.abs()[:, None], None)[:, 0]
    return closeness_misfit(lambda rows: (made[rows], size[rows]), t, ELEMENT[dtype]) <= 1


def _head_step_candidate_pools(s: Tensor, real: Tensor) -> Iterator[FrozenPool]:
    """The ways to pool all tokens: one token, the mean of all or of those not masked, or the first token beside the
    mean of the others, with or without register tokens."""
    eye = torch.eye(len(s), dtype=s.dtype, device=s.device)
    for n in range(len(s)):
        yield FrozenPool(eye[n : n + 1])
    yield FrozenPool(eye.mean(0, keepdim=True))
    if len(real) == len(s) and 1 < int(real.sum()) < len(s):
        yield FrozenPool(eye[real].mean(0, keepdim=True))
    for special in range(1, min(len(s), MAX_SPECIAL + 1)):  # skips registers after the first token
        yield FrozenPool(torch.stack([eye[0], eye[special:].mean(0)]))


@dataclass(frozen=True)
class _ElementwiseCandidate:
    """An elementwise function that a step may be."""

    guess: Callable[[Tensor], tuple[Tensor, Tensor]]  # rows -> outputs, and the size of each element
    freeze: Callable[[Tensor], FrozenScale]  # the map frozen at these vectors
    sure: bool = True
    note: str = ""

    def misfit(self, s: Tensor, t: Tensor, dtype: torch.dtype) -> float:
        """How far the function of s is from t; equal up to 1."""
        return closeness_misfit(lambda rows: self.guess(s[rows]), t, ELEMENT[dtype])


def _find_elementwise_head_step(s: Tensor, t: Tensor, dtype: torch.dtype, known: StepCandidates) -> HeadStep | None:
    """The elementwise function that takes s to t; the closest if several do within rounding."""
    if s.shape != t.shape or s.numel() == 0:
        return None
    candidates = [
        *_activation_head_step_candidates(known),
        *_softcap_head_step_candidates(known),
        *_factor_head_step_candidates(s, t, known),
        *_constant_head_step_candidates(s, t, dtype, known),
    ]
    off = [one.misfit(s, t, dtype) for one in candidates]
    nearest = min(range(len(off)), key=off.__getitem__)
    if not off[nearest] <= 1:
        return None
    best = candidates[nearest]
    return HeadStep((best.freeze(s),), lambda s, t: best.misfit(s, t, dtype) <= 1, best.sure, best.note)


def _activation_head_step_candidates(known: StepCandidates) -> Iterator[_ElementwiseCandidate]:
    for name, function in known.activations.items():

        def guess(a: Tensor, function: Function = function) -> tuple[Tensor, Tensor]:
            made = function(a)
            return made, a.abs() + made.abs()

        def freeze(a: Tensor, name: str = name, function: Function = function) -> FrozenScale:
            constant = function(a.new_zeros(1)).expand(a.shape[-1])
            return FrozenScale(gate_coefficient("ig", name, function, a), constant if bool(constant.any()) else None)

        yield _ElementwiseCandidate(guess, freeze)


def _softcap_head_step_candidates(known: StepCandidates) -> Iterator[_ElementwiseCandidate]:
    """``c tanh(a / c)``, frozen at its ratio to a."""
    if known.softcap is not None:
        cap = known.softcap

        def guess(a: Tensor) -> tuple[Tensor, Tensor]:
            made = cap * torch.tanh(a / cap)
            return made, made.abs()

        note = f"softcap {cap:g} held at its ratio"
        yield _ElementwiseCandidate(guess, lambda a: FrozenScale(CLOSED_FORMS["tanh"](a / cap)), note=note)


def _factor_head_step_candidates(s: Tensor, t: Tensor, known: StepCandidates) -> Iterator[_ElementwiseCandidate]:
    """``t = k s`` with one k for all rows and units, by least squares. Unless k is found in the config it may depend on
    the input. With few or nearly equal numbers a factor cannot be distinguished from a constant."""
    total, square, product = 0.0, 0.0, 0.0
    for x, y in zip(s.flatten().split(PIECE), t.flatten().split(PIECE), strict=True):
        a, b = x.double(), y.double()
        total, square, product = total + float(a.sum()), square + float(a @ a), product + float(a @ b)
    count = s.numel()
    if count < MIN_ELEMENTS or not square - total**2 / count > SPREAD**2 * square:
        return
    factor = product / square

    def guess(a: Tensor) -> tuple[Tensor, Tensor]:
        made = a * factor
        return made, made.abs()

    sure = any(abs(factor - one) <= 1e-6 * abs(one) for one in known.factors)
    yield _ElementwiseCandidate(guess, lambda a: FrozenScale(a.new_full((a.shape[-1],), factor)), sure)


def _constant_head_step_candidates(
    s: Tensor, t: Tensor, dtype: torch.dtype, known: StepCandidates
) -> Iterator[_ElementwiseCandidate]:
    """``t = s + b`` with one b for all rows: a vector of the model, or any vector that is the same in all rows."""
    vectors = known.constants.get(s.shape[-1], s[:0])
    near = (s[0] + vectors - t[0]).abs() <= ELEMENT[dtype] * (s[0].abs() + vectors.abs())
    named = [_constant_head_step_candidate(b) for b in vectors[near.all(-1)]]
    yield from named
    b = (t.mean(0, dtype=torch.float64) - s.mean(0, dtype=torch.float64)).to(s.dtype)
    if _distinguishes_head_step_constant(s, b, ELEMENT[dtype]) and not any(
        one.misfit(s, t, dtype) <= 1 for one in named
    ):
        yield replace(_constant_head_step_candidate(b), sure=False)


def _constant_head_step_candidate(b: Tensor) -> _ElementwiseCandidate:
    def guess(a: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a.abs() + b.abs()

    return _ElementwiseCandidate(guess, lambda a: FrozenScale(torch.ones_like(b), b))


def _distinguishes_head_step_constant(s: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether the rows of s differ enough to distinguish a constant b from a factor: in every unit that b changes, the
    factor ``1 + b / s`` of one row would be wrong in another by more than rounding."""
    if len(s) < 2:
        return False
    largest = s.abs().amax(0)
    size = largest + b.abs()
    spread = s.amax(0) - s.amin(0)
    changed = b.abs() > tolerance * size
    return bool((b.abs() * spread > 10 * tolerance * size * largest)[changed].all())
