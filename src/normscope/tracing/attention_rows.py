"""Attention one block of rows at a time, so that nothing of the size tokens x tokens is kept.

The model's own attention function runs, and the probabilities of the rows that somebody needs are recomputed from what
it was given: after fused attention from queries, keys, mask and scale, otherwise by calling the family's eager function
with these rows only. Recomputed rows are compared with the output of the fused attention along a random direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from normscope.tracing.recorded import ELEMENT, coarser, row_blocks
from normscope.tracing.records import AttentionRows, Rows

BLOCK_SCORES = 2**19  # attention scores computed at a time
FEW = 3  # tokens on which an eager function is tested


@dataclass(frozen=True)
class AttentionCall:
    """A call of an attention function."""

    eager: Callable[..., Any]  # the eager function of the family
    module: nn.Module
    query: Tensor  # (b, H, i, d_h)
    key: Tensor  # (b, heads of the values, j, d_h)
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any]
    causal: bool = False  # although there is no mask

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, H, i, j)"""
        return (*self.query.shape[:3], self.key.shape[2])


def pick_rows(x: Tensor, rows: Rows) -> Tensor:
    """(b, h, R, ...): some rows of x (b or 1, h, i, ...)."""
    if isinstance(rows, slice):
        return x[:, :, rows]
    index = rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.expand(len(rows), *x.shape[1:]).gather(2, index)


def attend_in_blocks(
    function: Callable[..., Any], call: AttentionCall, real: Tensor | None
) -> tuple[Tensor, AttentionRows | None]:
    """The output (b, i, H, d_h) of an attention function, and the rows of its probabilities. `real` (b, i) is False for
    masked rows, which may be undefined; None if no rows are needed.

    In float64 the eager function runs although the model would use fused attention, because in many families it rounds
    the softmax to float32: rows are those of a pass that keeps all probabilities.
    """
    if function is not sdpa_attention_forward:
        return _attend_eagerly(call)
    with _FusedCalls() as seen:
        output = function(call.module, call.query, call.key, call.value, call.mask, **call.options)[0]
    if output.dtype != torch.float64:
        found = None if real is None else _fused_rows(call, seen.calls, output, real)
        if real is None or found is not None:
            return output, found
    eager, found = _attend_eagerly(replace(call, causal=_is_causal(call)))
    if real is None:
        return eager, found
    off = (eager - output)[real].abs().amax() / (ELEMENT[torch.float32] * call.value.abs().amax())
    return eager, replace(found, misfit=off)


class _FusedCalls(TorchFunctionMode):
    """Notes the arguments of PyTorch's fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Sequence[Any], Mapping[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


_FUSED_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _fused_rows(
    call: AttentionCall, seen: Sequence[tuple[Sequence[Any], Mapping[str, Any]]], output: Tensor, real: Tensor
) -> AttentionRows | None:
    """The rows of a fused attention; None if it was called otherwise than with the queries, keys and values given."""
    if len(seen) != 1:
        return None
    given = dict(zip(_FUSED_ARGUMENTS, seen[0][0], strict=False)) | dict(seen[0][1])
    own = given["query"].data_ptr() == call.query.data_ptr() and given["query"].shape == call.query.shape
    if not own or given.get("dropout_p") or given["key"].shape[2] != call.key.shape[2]:
        return None
    scale = given.get("scale") or call.query.shape[-1] ** -0.5
    mask, causal = given.get("attn_mask"), bool(given.get("is_causal"))
    if call.options.get("position_bias") is not None:  # added to the mask of every layer, which is not kept
        mask, causal = call.mask, _is_causal(call)
    direction = torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(0)).to(output)
    sizes = torch.linalg.vector_norm(call.value, dim=-1) * direction.norm()
    expected = torch.stack([call.value @ direction, sizes], -1)  # (b, heads of the values, j, 2)
    made = (output @ direction).transpose(1, 2)  # (b, H, i)
    tolerance = ELEMENT[coarser(output.dtype)]
    misfit = output.new_zeros(())

    def compute(rows: Rows) -> Tensor:
        weights = _fused_weights(call, mask, causal, scale, rows)
        grouped = _group_heads(weights, expected.shape[1])
        found, size = (grouped @ expected[:, :, : weights.shape[3]]).view(*weights.shape[:3], 2).unbind(-1)
        off = (found - pick_rows(made[..., None], rows)[..., 0]).abs() / (
            tolerance * size + torch.finfo(size.dtype).tiny
        )
        off = off.masked_fill(~pick_rows(real[:, None, :, None], rows)[..., 0], 0)
        torch.maximum(misfit, off.amax(), out=misfit)  # NaN stays
        return weights

    return AttentionRows(call.shape, compute, output.device, misfit=misfit)


def _is_causal(call: AttentionCall) -> bool:
    """Whether transformers' fused attention without a mask is causal."""
    own = call.options.get("is_causal")
    asked = getattr(call.module, "is_causal", True) if own is None else own
    return bool(asked) and call.mask is None and call.query.shape[2] > 1


def _group_heads(x: Tensor, shared: int) -> Tensor:
    """(b, shared, H / shared * R, ...): the rows of heads that share keys and values, one below another."""
    found: Tensor = x.unflatten(1, (shared, -1)).flatten(2, 3)
    return found


def _fused_weights(call: AttentionCall, mask: Tensor | None, causal: bool, scale: float, rows: Rows) -> Tensor:
    """The probabilities that a fused attention uses; zero for a row that may attend to nothing."""
    last = rows.stop if causal and isinstance(rows, slice) else call.key.shape[2]
    query = pick_rows(call.query, rows) * scale
    scores = _group_heads(query, call.key.shape[1]) @ call.key[:, :, :last].transpose(-1, -2)
    scores = scores.view(*query.shape[:3], last)
    bias = call.options.get("position_bias")
    if bias is not None:
        scores += (pick_rows(bias, rows) if bias.shape[2] > 1 else bias)[..., :last]
    if causal:
        first = rows.start if isinstance(rows, slice) else 0
        scores[..., first:].masked_fill_(~_causal_mask(call, rows, last)[..., first:], -torch.inf)
    if mask is None:
        return scores.softmax(-1)
    mask = pick_rows(mask, rows) if mask.shape[2] > 1 else mask
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, -torch.inf).softmax(-1).masked_fill_(~mask.any(-1, keepdim=True), 0)
    return scores.add_(mask).softmax(-1)


def _attend_eagerly(call: AttentionCall) -> tuple[Tensor, AttentionRows]:
    """The output of the eager function, some rows at a time, and its rows."""
    items, heads, length, columns = call.shape
    if not _computes_rows_alone(call):
        output, weights = _eager_rows(call, slice(0, length))
        return output, AttentionRows(call.shape, lambda rows: pick_rows(weights, rows), output.device, weights.sum(-1))
    outputs, sums = [], []
    for rows in row_blocks(length, BLOCK_SCORES // (items * heads * columns)):
        output, weights = _eager_rows(call, rows)
        outputs.append(output)
        sums.append(weights.sum(-1))
    rows_of = AttentionRows(call.shape, lambda rows: _eager_rows(call, rows)[1], call.query.device, torch.cat(sums, -1))
    return torch.cat(outputs, 1), rows_of


def _eager_rows(call: AttentionCall, rows: Rows) -> tuple[Tensor, Tensor]:
    """Output and probabilities of the eager function for some rows."""
    length, columns = call.shape[2:]
    last = rows.stop if call.causal and isinstance(rows, slice) else columns

    def some(x: Any) -> Any:
        by_row = isinstance(x, Tensor) and x.dim() == 4 and x.shape[2:] == (length, columns)
        return pick_rows(x, rows)[..., :last] if by_row else x

    options = {name: some(value) for name, value in call.options.items()}
    mask = _causal_mask(call, rows, last) if call.causal else some(call.mask)
    if mask is not None and mask.dtype == torch.bool:  # made for fused attention
        lowest = torch.finfo(torch.float32).min
        mask = torch.zeros_like(mask, dtype=call.query.dtype).masked_fill_(~mask, lowest)
    key, value = call.key[:, :, :last], call.value[:, :, :last]
    with torch.no_grad():
        output, weights = call.eager(call.module, pick_rows(call.query, rows), key, value, mask, **options)
    return output, weights


def _causal_mask(call: AttentionCall, rows: Rows, last: int) -> Tensor:
    """(b or 1, 1, R, last): True for the columns up to each row's own."""
    columns, every = torch.arange(last, device=call.query.device), torch.arange(call.shape[2], device=call.query.device)
    own = every[rows][None] if isinstance(rows, slice) else rows
    return columns <= own[:, None, :, None]


def _computes_rows_alone(call: AttentionCall) -> bool:
    """Whether a row that the eager function computes alone equals the one that it computes among others."""
    length, columns = call.shape[2:]
    few, some = min(length, FEW), min(columns, FEW)
    if few < 2:
        return length < 2

    def corner(x: Any) -> Any:
        by_pair = isinstance(x, Tensor) and x.dim() == 4 and x.shape[3] == columns
        return x[:, :, : few if x.shape[2] == length else None, :some] if by_pair else x

    small = AttentionCall(
        call.eager,
        call.module,
        call.query[:, :, :few],
        call.key[:, :, :some],
        call.value[:, :, :some],
        corner(call.mask),
        {name: corner(value) for name, value in call.options.items()},
        call.causal,
    )
    whole = _eager_rows(small, slice(0, few))[1]
    alone = _eager_rows(small, slice(1, 2))[1]
    return alone.shape == whole[:, :, 1:2].shape and torch.allclose(alone, whole[:, :, 1:2], 1e-4, 1e-6, True)
