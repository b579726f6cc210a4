"""Equality of tensors, and the roles that single modules can play: linear maps, norms, scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from normscope.derivation.watch import Call
from normscope.models.modules import norm_epsilon
from normscope.models.spec import Norm

IDENTITY = -1.0  # as the offset of a norm: the module is an nn.Identity, so that its kind is unknown
CLOSE = 1e-5  # relative difference of equal tensors; parts that compute in float32 differ by 1e-7


def rows(x: Tensor) -> Tensor:
    """(tokens, width): items and tokens in one dimension."""
    return x.reshape(-1, x.shape[-1])


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors have the same rows, up to rounding."""
    if a is None or b is None or a.numel() != b.numel() or a.shape[-1] != b.shape[-1] or not a.numel():
        return False
    a, b = rows(a), rows(b)
    return bool((a - b).abs().max() <= CLOSE * b.abs().max())


def is_linear(call: Call) -> bool:
    """Whether a call is that of a linear module."""
    return isinstance(call.module, nn.Linear) or type(call.module) is Conv1D


def norm_of_call(call: Call) -> Norm | None:
    """The norm that a module computes, whatever its class: the output is, unit by unit, an affine function of the
    input divided by its standard deviation (after subtracting the mean) or by its root mean square."""
    if isinstance(call.module, nn.Identity):
        return Norm(call.path, offset=IDENTITY)
    x, y = rows(call.input), rows(call.output)
    if x.shape != y.shape or list(call.module.children()) or len(x) < 4 or same(x, y):
        return None
    kinds: tuple[Literal["layer", "rms"], ...] = ("layer", "rms")
    for kind in kinds:
        gain = _norm_gain(call.module, x, y, kind)
        if gain is not None:
            return Norm(call.path, kind, *_gain_from_weight(call.module, gain))
    return None


def _gain_from_weight(module: nn.Module, gain: Tensor) -> tuple[float, bool]:
    """The number to add to the module's weight to get the gain, and whether no number does."""
    weight = getattr(module, "weight", None)
    weight = weight if isinstance(weight, Tensor) else torch.ones_like(gain)
    if weight.shape == gain.shape:
        for offset in (0.0, 1.0):
            if same(weight.detach() + offset, gain):
                return offset, False
    return 0.0, True


def _norm_gain(module: nn.Module, x: Tensor, y: Tensor, kind: str) -> Tensor | None:
    """(d,): the gain with which the module is a norm of this kind, or None."""
    epsilon = norm_epsilon(module)
    read = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    for eps in (1e-5, 1e-6, 1e-8, 0.0) if epsilon is None else (epsilon,):
        unit = read / (read.square().mean(-1, keepdim=True) + eps).sqrt()
        centred = unit - unit.mean(0)
        gain = (centred * (y - y.mean(0))).sum(0) / centred.square().sum(0).clamp_min(1e-30)
        shift = y.mean(0) - gain * unit.mean(0)
        if same(unit * gain + shift, y):
            return gain
    return None


@dataclass(frozen=True)
class ColumnMatch:
    """Where the columns of one tensor stand in another: column k of head h is `starts[h] + k`."""

    call: Call
    starts: tuple[int, ...]


def match_columns(values: Tensor, call: Call, made: Tensor | None = None) -> ColumnMatch | None:
    """The places of values (heads, tokens, width) in the output of a linear module, or in what was made of it; None if
    it does not hold them all, each head's columns side by side."""
    heads, tokens, width = values.shape
    made = rows(call.output if made is None else made)
    if len(made) != tokens or made.shape[1] < width:
        return None
    probe = torch.randn(tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(made)
    keys, order = (probe @ made).sort()
    wanted = torch.einsum("t,htw->hw", probe, values)
    above = torch.searchsorted(keys, wanted).clamp_max(len(keys) - 1)
    below = (above - 1).clamp_min(0)
    nearest = torch.where((keys[above] - wanted).abs() < (keys[below] - wanted).abs(), above, below)
    columns = order[nearest]
    starts = columns[:, 0]
    if not torch.equal(columns, starts[:, None] + torch.arange(width, device=starts.device)):
        return None
    found = made[:, columns.flatten()].view(tokens, heads, width).transpose(0, 1)
    return ColumnMatch(call, tuple(starts.tolist())) if same(found, values) else None


def match_scaled_columns(values: Tensor, call: Call) -> tuple[ColumnMatch, Tensor] | None:
    """The same for values that are multiplied by one factor for each head, with these factors (heads,)."""
    made = rows(call.output)
    if len(made) != values.shape[1]:
        return None
    match = match_columns(_unit_columns(values), call, _unit_columns(made))
    if match is None:
        return None
    starts = torch.tensor(match.starts, device=made.device)
    plain = made[:, starts[:, None] + torch.arange(values.shape[2], device=made.device)].transpose(0, 1)
    factors = (values * plain).sum((1, 2)) / plain.square().sum((1, 2))
    return (match, factors) if same(plain * factors[:, None, None], values) else None


def _unit_columns(x: Tensor) -> Tensor:
    """Columns over tokens, (..., tokens, width), of length 1 and with a first number above zero."""
    signed = x * torch.where(x[..., :1, :] < 0, -1.0, 1.0).to(x)
    length: Tensor = signed.norm(dim=-2, keepdim=True).clamp_min(1e-30)
    return signed / length
