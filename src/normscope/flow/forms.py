"""The forms that a step between two modules of a head may have, each verified in every element.

A step takes vectors s (rows, d) to t: it pools the rows or keeps them, and then is the identity, a named activation, a
softcap, one factor, or one constant vector. The numbers tell which. A step of no such form is unknown; nothing is
guessed. An activation g is held at its integrated gradient ``(g(a) - g(0)) / a``, whose limit at a = 0 is g'(0), so
that ``t = gain * s + g(0)``: constants belong to no token.
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
from normscope.flow.frozen import FrozenPool, FrozenScale, Map
from normscope.tracing.closeness import ELEMENT, PIECE, equal, misfit

Function = Callable[[Tensor], Tensor]
ACTIVATIONS = ("tanh", "relu", "gelu", "gelu_pytorch_tanh", "gelu_new", "silu", "quick_gelu", "sigmoid")
ENOUGH = 4  # elements that a factor, or a change of a pooled vector, is verified in at the least
SPECIAL = 16  # tokens before the patches of a picture, at the most
SPREAD = 1e-2  # how much numbers must differ, relative to their size, to tell a factor from a constant


@dataclass(frozen=True)
class Known:
    """What a step may refer to."""

    activations: Mapping[str, Function]
    softcap: float | None
    factors: tuple[float, ...]  # the config's numbers, and what models make factors of them
    constants: Mapping[int, Tensor]  # width -> (count, width): the model's parameters and buffers that are vectors
    real: Tensor  # (n,): the tokens that are not masked


@dataclass(frozen=True)
class Link:
    """A step of a known form."""

    maps: tuple[Map, ...] = ()
    fits: Callable[[Tensor, Tensor], bool] = torch.equal  # whether the same step takes other vectors to others
    sure: bool = True  # False: a factor or a constant that the model does not name may depend on the input
    note: str = ""


def known_of(model: PreTrainedModel, real: Tensor, dtype: torch.dtype) -> Known:
    """What the config and the parameters of a model name."""
    values = list(_values(model.config.to_dict()))
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
    return Known(activations, capped[0] if capped else None, factors, constants, real)


def _values(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of a config and of the configs inside it."""
    for key, value in config.items():
        yield key, value
        if isinstance(value, Mapping):
            yield from _values(value)


def between(s: Tensor, t: Tensor, dtype: torch.dtype, known: Known) -> list[Link]:
    """The steps that take s to t, both computed in `dtype`: usually one or none, several where tokens are equal."""
    if equal(s, t, dtype):
        return [Link()]
    if len(t) == 1 and len(s) > 1:
        return _pooled(s, t, dtype, known)
    one = _elementwise(s, t, dtype, known)
    return [] if one is None else [one]


def _pooled(s: Tensor, t: Tensor, dtype: torch.dtype, known: Known) -> list[Link]:
    """One vector made of all of them, and perhaps changed then."""
    pools = [pool for pool in _pools(s, known.real) if len(pool.weights) * s.shape[-1] == t.shape[-1]]
    plain = [
        Link((pool,), lambda s, t, pool=pool: _is_pool(pool, dtype, s, t))  # type: ignore[misc]
        for pool in pools
        if _is_pool(pool, dtype, s, t)
    ]
    if plain or t.numel() < ENOUGH:
        return plain
    changed = [(pool, _elementwise(pool.forward(s[:, None], None)[:, 0], t, dtype, known)) for pool in pools]
    return [_after(pool, one) for pool, one in changed if one is not None]


def _after(pool: FrozenPool, one: Link) -> Link:
    def fits(s: Tensor, t: Tensor) -> bool:
        return one.fits(pool.forward(s[:, None], None)[:, 0], t)

    return Link((pool, *one.maps), fits, one.sure, one.note)


def _is_pool(pool: FrozenPool, dtype: torch.dtype, s: Tensor, t: Tensor) -> bool:
    """A row that is taken out is copied; a mean is rounded."""
    made = pool.forward(s[:, None], None)[:, 0]
    if len(pool.weights) == 1 and int(pool.weights.count_nonzero()) == 1:
        return torch.equal(made.to(dtype), t.to(dtype))
    size = pool.forward(s.abs()[:, None], None)[:, 0]
    return misfit(lambda rows: (made[rows], size[rows]), t, ELEMENT[dtype]) <= 1


def _pools(s: Tensor, real: Tensor) -> Iterator[FrozenPool]:
    """How one vector may be made of all tokens', each way once: one of them, their mean, that of the tokens that are
    not masked, or the first and the mean of the rest, or of the last of them."""
    eye = torch.eye(len(s), dtype=s.dtype, device=s.device)
    for n in range(len(s)):
        yield FrozenPool(eye[n : n + 1])
    yield FrozenPool(eye.mean(0, keepdim=True))
    if len(real) == len(s) and 1 < int(real.sum()) < len(s):
        yield FrozenPool(eye[real].mean(0, keepdim=True))
    for special in range(1, min(len(s), SPECIAL + 1)):  # registers between the first and the rest are left out
        yield FrozenPool(torch.stack([eye[0], eye[special:].mean(0)]))


@dataclass(frozen=True)
class _Candidate:
    """An elementwise function that may be the step."""

    guess: Callable[[Tensor], tuple[Tensor, Tensor]]  # of some rows: what comes out, and the size of each element
    held: Callable[[Tensor], FrozenScale]  # at these vectors
    sure: bool = True
    note: str = ""

    def off(self, s: Tensor, t: Tensor, dtype: torch.dtype) -> float:
        return misfit(lambda rows: self.guess(s[rows]), t, ELEMENT[dtype])


def _elementwise(s: Tensor, t: Tensor, dtype: torch.dtype, known: Known) -> Link | None:
    """The function of each element that takes s to t: of those that do, within rounding, the nearest."""
    if s.shape != t.shape or s.numel() == 0:
        return None
    candidates = [*_activations(known), *_softcaps(known), *_factors(s, t, known), *_constants(s, t, dtype, known)]
    off = [one.off(s, t, dtype) for one in candidates]
    nearest = min(range(len(off)), key=off.__getitem__)
    if not off[nearest] <= 1:
        return None
    best = candidates[nearest]
    return Link((best.held(s),), lambda s, t: best.off(s, t, dtype) <= 1, best.sure, best.note)


def _activations(known: Known) -> Iterator[_Candidate]:
    for name, function in known.activations.items():

        def guess(a: Tensor, function: Function = function) -> tuple[Tensor, Tensor]:
            made = function(a)
            return made, a.abs() + made.abs()

        def held(a: Tensor, name: str = name, function: Function = function) -> FrozenScale:
            constant = function(a.new_zeros(1)).expand(a.shape[-1])
            return FrozenScale(gate_coefficient("ig", name, function, a), constant if bool(constant.any()) else None)

        yield _Candidate(guess, held)


def _softcaps(known: Known) -> Iterator[_Candidate]:
    """``c tanh(a / c)``, held at its ratio."""
    if known.softcap is not None:
        cap = known.softcap

        def guess(a: Tensor) -> tuple[Tensor, Tensor]:
            made = cap * torch.tanh(a / cap)
            return made, made.abs()

        note = f"softcap {cap:g} held at its ratio"
        yield _Candidate(guess, lambda a: FrozenScale(CLOSED_FORMS["tanh"](a / cap)), note=note)


def _factors(s: Tensor, t: Tensor, known: Known) -> Iterator[_Candidate]:
    """``t = k s`` with one k for all rows and units, by least squares: it is a number of the config, or may depend on
    the input. Of a few numbers, or of numbers that are all alike, it cannot be told from a constant."""
    total, square, product = 0.0, 0.0, 0.0
    for x, y in zip(s.flatten().split(PIECE), t.flatten().split(PIECE), strict=True):
        a, b = x.double(), y.double()
        total, square, product = total + float(a.sum()), square + float(a @ a), product + float(a @ b)
    count = s.numel()
    if count < ENOUGH or not square - total**2 / count > SPREAD**2 * square:
        return
    factor = product / square

    def guess(a: Tensor) -> tuple[Tensor, Tensor]:
        made = a * factor
        return made, made.abs()

    sure = any(abs(factor - one) <= 1e-6 * abs(one) for one in known.factors)
    yield _Candidate(guess, lambda a: FrozenScale(a.new_full((a.shape[-1],), factor)), sure)


def _constants(s: Tensor, t: Tensor, dtype: torch.dtype, known: Known) -> Iterator[_Candidate]:
    """``t = s + b`` with one b for all rows: a vector that the model has, or one that is the same in all rows."""
    vectors = known.constants.get(s.shape[-1], s[:0])
    near = (s[0] + vectors - t[0]).abs() <= ELEMENT[dtype] * (s[0].abs() + vectors.abs())
    named = [_constant(b) for b in vectors[near.all(-1)]]
    yield from named
    b = (t.mean(0, dtype=torch.float64) - s.mean(0, dtype=torch.float64)).to(s.dtype)
    if _tells(s, b, ELEMENT[dtype]) and not any(one.off(s, t, dtype) <= 1 for one in named):
        yield replace(_constant(b), sure=False)


def _constant(b: Tensor) -> _Candidate:
    def guess(a: Tensor) -> tuple[Tensor, Tensor]:
        return a + b, a.abs() + b.abs()

    return _Candidate(guess, lambda a: FrozenScale(torch.ones_like(b), b))


def _tells(s: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether the rows of s differ enough to tell a constant b from a factor: in every unit that b changes, the factor
    ``1 + b / s`` of one row would be wrong in another by more than rounding."""
    if len(s) < 2:
        return False
    largest = s.abs().amax(0)
    size = largest + b.abs()
    spread = s.amax(0) - s.amin(0)
    changed = b.abs() > tolerance * size
    return bool((b.abs() * spread > 10 * tolerance * size * largest)[changed].all())
