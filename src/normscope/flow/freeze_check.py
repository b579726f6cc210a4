"""Compare the maps of a frozen layer with what the model computed at each step.

The completeness of a flow would not show a mistake there: a large residual stream hides what a small part adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from normscope.decompose.activations import projections_of
from normscope.flow.maps import (
    UPCAST,
    FrozenAttention,
    FrozenFeedForward,
    FrozenMap,
    FrozenNorm,
    FrozenScale,
)
from normscope.models.spec import Attention, Experts, FeedForward, Norm
from normscope.tracing.recorded import (
    ELEMENT,
    PRODUCT,
    closeness_misfit,
    gated_hidden,
    is_close_to_product,
    mixed_values,
    replay_with_bias,
    row_blocks,
    unit_rows,
)
from normscope.tracing.records import AttentionRecord, LayerRecord

PROBED = {torch.float32: 1e-5, torch.float64: 1e-9}  # of ||x|| ||w|| along a direction, where errors add up or cancel
FEED_FORWARD_ROWS = 512  # of a feed-forward compared at a time
COMPLETE_ROWS = 512  # in about so many rows, all of a short text, the output is compared completely
RECURRENT = 1e-5  # of ||x|| ||w|| if x is the output of a recurrence
MIXED = {torch.float32: 1e-5, torch.float64: 1e-7}  # of ||x|| ||w|| if x is rounded too, or integrated numerically


def find_freeze_mismatch(
    record: LayerRecord,
    parts: Sequence[FrozenMap | None],
    encoder: Tensor | None,
    seen: tuple[slice | Tensor, slice | Tensor],
    dtype: torch.dtype,
) -> str:
    """How a layer, for one item, differs from its maps; "" if it does not.

    `encoder` (m, d) is the input of cross-attention, `seen` the tokens of the layer and of the encoder that are not
    masked.
    """
    real = seen[0]
    entered = record.input[0]
    branches: list[Tensor] = []  # the current state of each
    for step, part, one in zip(record.steps, record.parts, parts, strict=True):
        if step.starts:
            branches.append(entered)
        if isinstance(one, FrozenScale) and step.role != "sum":
            branches[-1] = branches[-1] * one.gain
            continue
        made: Tensor = part.output[0]  # type: ignore[union-attr]  # every part but a scale has one
        if step.role == "sum":
            kept = entered * one.gain if isinstance(one, FrozenScale) else entered
            if not _freeze_matches_residual_sum([kept, *branches], made, real, dtype):
                return "its residual connection does not add up its parts"
            entered, branches = made, []
            continue
        given = entered if step.role == "after" else branches[-1]
        if isinstance(one, FrozenAttention):
            assert isinstance(part, AttentionRecord)
            assert isinstance(step.part, Attention)
            read = encoder if one.cross else given
            mismatch = _freeze_attention_mismatch(one, part, step.part, read, seen, dtype)
        elif isinstance(one, FrozenNorm):
            assert isinstance(step.part, Norm)
            norm, tolerance = replace(one, inverse=one.inverse[real]), max(ELEMENT[dtype], UPCAST)
            off = norm_misfit(norm, step.part.offset, given[real], made[real], tolerance)
            mismatch = "" if off <= 1 else _describe_freeze_mismatch(step.part)
        else:
            assert isinstance(one, FrozenFeedForward)
            matches = _freeze_matches_feed_forward(one, given, made, real, dtype)
            mismatch = "" if matches else _describe_freeze_mismatch(step.part)
        if mismatch:
            return mismatch
        if step.role == "after":
            entered = made
        else:
            branches[-1] = made
    return ""


def _describe_freeze_mismatch(part: object) -> str:
    if isinstance(part, Norm):
        return f"{part.path} does not compute the expected norm"
    assert isinstance(part, FeedForward | Experts)
    where = part.module if isinstance(part, Experts) else f"{part.into} and {part.out}"
    return f"the feed-forward of {where} computes something else"


def _freeze_matches_residual_sum(
    summands: list[Tensor], made: Tensor, real: slice | Tensor, dtype: torch.dtype
) -> bool:
    total = sum(summands[1:], summands[0])
    if torch.equal(total, made):  # the model adds them up in the same order
        return True
    size = sum((one.abs() for one in summands[1:]), summands[0].abs())[real]
    total = total[real]
    return closeness_misfit(lambda rows: (total[rows], size[rows]), made[real], ELEMENT[dtype]) <= 1


def _freeze_attention_mismatch(
    one: FrozenAttention,
    part: AttentionRecord,
    spec: Attention,
    read: Tensor | None,
    seen: tuple[slice | Tensor, slice | Tensor],
    dtype: torch.dtype,
) -> str:
    """Compare the values with ``x W_V + b_V`` of the states read, and the output with the attended values. Recomputed
    weights are compared with the attended values when they are computed."""
    assert read is not None
    heads, width, small = one.value.shape
    rows, columns = seen[0], seen[1] if one.cross else seen[0]
    step = heads // one.shared  # heads that share values
    flat = one.value[::step].transpose(0, 1).reshape(width, -1)
    bias = None if one.bias is None else one.bias[::step].flatten()
    made, tolerance = part.values[0], PRODUCT[dtype]
    if one.read_scale is not None:  # what the projections alone give
        scale = one.read_scale[:: step if len(one.read_scale) > 1 else 1, :, None]
        made = (made if one.bias is None else made - one.bias[::step, None]) / scale
        bias, tolerance = None, max(PRODUCT[dtype], UPCAST)
    made = made.transpose(0, 1).flatten(1)
    if len(read) != len(made) or not is_close_to_product(read[columns], flat, bias, made[columns], tolerance):
        return (
            f"the values of {spec.module} are not the output of {spec.value} for the states before it: a hook changes "
            "them, or they are made in more than one step"
        )
    if part.mixed is None:
        mixed = torch.bmm(part.weights[0], mixed_values(part)[0].repeat_interleave(step, 0)).transpose(0, 1).flatten(1)
    else:
        mixed = part.mixed[0]
    if part.gate is not None:
        mixed = mixed * part.gate[0].flatten(1)
    if part.row_scale is not None:
        mixed = mixed * part.row_scale[0][:, None]
    matrix = part.matrix.reshape(heads * small, -1)
    # A recurrence and its gated norm are computed in float32.
    tolerance = MIXED[dtype] if part.filter is None else RECURRENT
    fits = is_close_to_product(mixed[rows], matrix, part.bias, part.output[0][rows], tolerance)
    return "" if fits else f"{spec.output} does not output its linear map of the attended values"


def _freeze_matches_feed_forward(
    one: FrozenFeedForward, x: Tensor, made: Tensor, real: slice | Tensor, dtype: torch.dtype
) -> bool:
    """Compare the hidden units with ``x W_k + b_k`` and the output with ``g(hidden) W_2 + b_2``: in all rows along a
    fixed random direction, which costs no product of matrices, and in up to twice COMPLETE_ROWS rows completely."""
    if any(len(projection.weight) != x.shape[-1] for part in one.parts for projection in projections_of(part)):
        return False
    kept = torch.arange(len(x), device=x.device)[real]
    for block in row_blocks(len(kept), FEED_FORWARD_ROWS):
        rows = slice(block.start, block.stop) if isinstance(real, slice) else kept[block]
        total, size = torch.zeros_like(made[rows, :1]), torch.zeros_like(made[rows, :1])
        for part in (unit_rows(part, rows) for part in one.parts):
            share = 1 if part.routing is None else part.routing[0, :, None]
            read, share = (x[rows] * share, 1) if part.scaled_input else (x[rows], share)
            for projection in projections_of(part):
                into = freeze_probe(projection.hidden.shape[-1], x)
                bias = None if projection.bias is None else (projection.bias @ into)
                weight, hidden = projection.weight @ into, projection.hidden[0] @ into
                if not is_close_to_product(read, weight, bias, hidden, PROBED[dtype]):
                    return False
            out = freeze_probe(made.shape[-1], x)
            hidden, weight = gated_hidden(part)[0], part.out @ out
            hidden = hidden if part.inverse is None else hidden * part.inverse[0, :, None]
            total += share * replay_with_bias(hidden @ weight, None if part.out_bias is None else part.out_bias @ out)
            size += share * hidden.norm(dim=-1, keepdim=True) * weight.norm()
        if one.constant is not None:
            size += one.constant[rows].norm(dim=-1, keepdim=True) * out.norm()
        found, tolerance = made[rows] @ out, _inner_tolerance(one, PROBED[dtype])
        if closeness_misfit(lambda some: (total[some], size[some]), found, tolerance) > 1:  # noqa: B023
            return False
    return _freeze_gate_matches(one, x, made, kept[:: max(1, len(kept) // COMPLETE_ROWS)], dtype)


def freeze_probe(width: int, x: Tensor) -> Tensor:
    """(width, 1): the fixed direction, each component 1 or -1."""
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(width))
    return (2 * signs - 1).to(x)


def _freeze_gate_matches(one: FrozenFeedForward, x: Tensor, made: Tensor, rows: Tensor, dtype: torch.dtype) -> bool:
    """Whether the coefficients of a feed-forward's activation give its output in some rows."""
    some = one.for_rows(rows)
    total = torch.zeros_like(made[rows]) if some.constant is None else some.constant.clone()
    size = total.abs()
    for unit, biases in zip(some.units, some.biases, strict=True):
        hidden = largest = x.new_zeros(())
        for weight, c, bias in zip(unit.weights, unit.coefficients, biases, strict=True):
            entered = x[rows] @ weight
            hidden = hidden + c[0] * entered
            largest = largest + (c[0] * (entered if bias is None else entered + bias)).abs()
        total += hidden @ unit.out
        size += largest.norm(dim=-1, keepdim=True) * unit.out.norm(dim=0)
    tolerance = _inner_tolerance(one, MIXED[dtype])
    return closeness_misfit(lambda where: (total[where], size[where]), made[rows], tolerance) <= 1


def _inner_tolerance(one: FrozenFeedForward, tolerance: float) -> float:
    """The tolerance of a feed-forward, which may have a norm inside."""
    return tolerance if all(part.inverse is None for part in one.parts) else max(tolerance, UPCAST)


def norm_misfit(one: FrozenNorm, offset: float, x: Tensor, made: Tensor, tolerance: float) -> float:
    """How far a norm of x (rows, d) is from `made`; equal up to 1. The gain of the norm is a weight plus `offset`."""

    def guess(rows: slice) -> tuple[Tensor, Tensor]:
        found = one.for_rows(rows).forward(x[rows, None], None)[:, 0]
        inverse = one.inverse[rows, None]
        size = x[rows].abs() * inverse
        if one.centered:  # the mean is rounded too, by a fraction of the deviation
            size += x[rows].mean(-1, keepdim=True).abs() * inverse + 1
        size *= one.gain.abs() + offset
        return (found, size) if one.constant is None else (found + one.constant, size + one.constant.abs())

    return closeness_misfit(guess, made, tolerance)
