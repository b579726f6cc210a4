"""Whether a frozen layer is the layer: each of its maps against what the model computed at that step.

The completeness of a flow does not prove it: a large residual stream hides what a small part adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from normscope.flow.frozen import FrozenAttention, FrozenFeedForward, FrozenNorm, FrozenScale, Map
from normscope.flow.modules import UPCAST, norm_misfit
from normscope.models.scopes import Step
from normscope.models.spec import Attention, Experts, FeedForward, Norm
from normscope.tracing.closeness import ELEMENT, PRODUCT, is_product, misfit
from normscope.tracing.records import AttentionRecord, LayerRecord

MIXED = {torch.float32: 1e-5, torch.float64: 1e-7}  # of ||x|| ||w|| where x is rounded too, or a numerical integral


def mistake(
    record: LayerRecord,
    steps: Sequence[Step],
    parts: Sequence[Map | None],
    encoder: Tensor | None,
    real: Tensor,
    dtype: torch.dtype,
) -> str:
    """What a layer, of one item, does otherwise than its maps say; "" where they say all of it.

    `encoder` (m, d) is what cross-attention reads, `real` (n,) the tokens that are not masked.
    """
    entered = record.input[0]
    branches: list[Tensor] = []  # each as far as it has come
    for step, part, one in zip(steps, record.parts, parts, strict=True):
        if step.starts:
            branches.append(entered)
        if isinstance(one, FrozenScale):
            branches[-1] = branches[-1] * one.gain
            continue
        made: Tensor = part.output[0]  # type: ignore[union-attr]  # every part but a scale has one
        if one is None:
            if not _is_sum([entered, *branches], made, real, dtype):
                return "its residual connection does not add up its parts"
            entered, branches = made, []
            continue
        given = entered if step.role == "after" else branches[-1]
        if isinstance(one, FrozenAttention):
            assert isinstance(part, AttentionRecord)
            assert isinstance(step.part, Attention)
            wrong = _attention(one, part, step.part, encoder if one.cross else given, real, dtype)
        elif isinstance(one, FrozenNorm):
            assert isinstance(step.part, Norm)
            kept, tolerance = replace(one, inverse=one.inverse[real]), max(ELEMENT[dtype], UPCAST)
            off = norm_misfit(kept, step.part.offset, given[real], made[real], tolerance)
            wrong = "" if off <= 1 else _otherwise(step.part)
        else:
            assert isinstance(one, FrozenFeedForward)
            wrong = "" if _is_feed_forward(one, given, made, real, dtype) else _otherwise(step.part)
        if wrong:
            return wrong
        if step.role == "after":
            entered = made
        else:
            branches[-1] = made
    return ""


def _otherwise(part: object) -> str:
    if isinstance(part, Norm):
        return f"{part.path} is not the norm that it should be"
    assert isinstance(part, FeedForward | Experts)
    where = part.module if isinstance(part, Experts) else f"{part.into} and {part.out}"
    return f"the feed-forward of {where} computes something else"


def _is_sum(summands: list[Tensor], made: Tensor, real: Tensor, dtype: torch.dtype) -> bool:
    total = sum(summands[1:], summands[0])[real]
    size = sum((one.abs() for one in summands[1:]), summands[0].abs())[real]
    return misfit(lambda rows: (total[rows], size[rows]), made[real], ELEMENT[dtype]) <= 1


def _attention(
    one: FrozenAttention, part: AttentionRecord, spec: Attention, read: Tensor | None, real: Tensor, dtype: torch.dtype
) -> str:
    """Whether the values are ``x W_V + b_V`` of what is read, and the output is made of them."""
    assert read is not None
    heads, width, small = one.value.shape
    flat = one.value.transpose(0, 1).reshape(width, heads * small)
    bias = None if one.bias is None else one.bias.flatten()
    used = part.values[0].repeat_interleave(heads // len(part.values[0]), 0)
    seen = one.weights[:, real].amax((0, 1)) > 0
    if len(read) != len(seen) or not is_product(
        read[seen], flat, bias, used.transpose(0, 1).flatten(1)[seen], PRODUCT[dtype]
    ):
        return _values_otherwise(spec)
    mixed = torch.bmm(one.weights[:, real], used).transpose(0, 1).flatten(1)
    matrix = part.matrix.reshape(heads * small, -1)
    fits = is_product(mixed, matrix, part.bias, part.output[0][real], MIXED[dtype])
    return "" if fits else f"{spec.output} does not output what it makes of the attended values"


def _values_otherwise(spec: Attention) -> str:
    return (
        f"the values of {spec.module} are not what {spec.value} makes of the states before it: a hook changes them, or "
        "they are made in more than one step"
    )


def _is_feed_forward(one: FrozenFeedForward, x: Tensor, made: Tensor, real: Tensor, dtype: torch.dtype) -> bool:
    if any(len(weight) != x.shape[-1] for unit in one.units for weight in unit.weights):
        return False
    total = torch.zeros_like(made) if one.constant is None else one.constant.clone()
    size = total.abs()
    for unit, biases in zip(one.units, one.biases, strict=True):
        rows = slice(None) if unit.chosen is None else unit.chosen[0]
        hidden = largest = x.new_zeros(())
        for weight, c, bias in zip(unit.weights, unit.coefficients, biases, strict=True):
            gate, entered = c[0][rows], x[rows] @ weight
            hidden = hidden + gate * entered
            largest = largest + (gate * (entered if bias is None else entered + bias)).abs()
        total[rows] += hidden @ unit.out
        size[rows] += largest.norm(dim=-1, keepdim=True) * unit.out.norm(dim=0)
    total, size = total[real], size[real]
    return misfit(lambda rows: (total[rows], size[rows]), made[real], MIXED[dtype]) <= 1
