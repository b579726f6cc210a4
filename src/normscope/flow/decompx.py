"""DecompX (Modarressi et al. 2023): vectors through all layers and the head, with every bias split over the tokens.

A constant b that a component adds to the vectors ``x_i<-k`` is split over the tokens k by weights: "absdot"
``|b . x_i<-k|``, "abssim" the cosine instead, "norm" ``||x_i<-k||``, "equal" the same for all tokens that have
contributed so far. The constant ``b_V W_O + b_O`` of attention is split after the residual connection has been added,
b_1 before the activation, which is frozen at ``g(a) / a``. So ``sum_k x_i<-k`` is the model's own vector, and scores
sum to the logit. A split needs all tokens of one output at once, but outputs interact only in attention: the values of
a layer are computed first, in the d_h dimensions of its heads; then some rows at a time go through the whole layer and
overwrite its input.

The code published with the paper splits by "absdot", and in the first layer leaves b_V inside the values of its token,
``x_i<-k = ... + sum_h alpha^h_ik b_V^h W_O^h``, so that only b_O is split there: "published".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from normscope.flow.attention_blocks import attention_block_row_slices
from normscope.flow.exact import exact_input_by_source, exact_maps, exact_relative_error, exact_scores
from normscope.flow.interface import FlowMaps, MethodRun
from normscope.flow.maps import (
    FrozenAttention,
    FrozenBlock,
    FrozenFeedForward,
    FrozenLayer,
    FrozenMap,
    FrozenModel,
    FrozenPool,
)
from normscope.flow.result import Scores
from normscope.flow.targets import Target, build_target_scores

Split = Literal["absdot", "abssim", "norm", "equal"]
SPLITS = get_args(Split)
PUBLISHED = "published"


def run_decompx_maps(run: MethodRun) -> FlowMaps:
    """`decompx_maps`; with the option "none", the exact decomposition."""
    return exact_maps(run.model) if run.option == "none" else decompx_maps(run.model, run.option)


def run_decompx_scores(run: MethodRun, target: Target) -> Scores:
    """`decompx_scores`; with the option "none", the exact decomposition."""
    if run.option == "none":
        return exact_scores(run.model, target)
    return decompx_scores(run.model, target, run.option)


def decompx_maps(model: FrozenModel, option: str) -> tuple[Tensor, Tensor]:
    """(layers, rows, columns): ``||x^l_i<-k||`` after every layer of the last side, and (layers,) the completeness.

    Columns are the last side's tokens, then the encoder's; masked tokens are left out.
    """
    last = model.stacks[-1]
    columns = torch.cat([stack.real for stack in (last, *model.stacks[:-1])])
    norms, errors = [], []
    for X, actual in zip(decompx_states(model, option), last.states[1:], strict=True):
        norms.append(X.norm(dim=-1)[last.real][:, columns])
        errors.append(exact_relative_error(X.sum(1)[last.real], actual[last.real]))
    return torch.stack(norms), torch.tensor(errors, dtype=torch.float64)


def decompx_scores(model: FrozenModel, target: Target, option: str) -> Scores:
    """The target by input token, through the head; what remains is only what the target keeps apart."""
    assert model.logits is not None
    last = model.stacks[-1]
    *_, X = decompx_states(model, option)  # all are the same tensor
    split = _decompx_split_of_option(option)
    chain = (*last.tail, *model.head)
    pooled = any(isinstance(one, FrozenPool) for one in chain)
    found = X.new_zeros(X.shape[1])
    for read, row in enumerate(target.rows.tolist()):  # only the target's tokens are needed
        rows = slice(row, row + 1)
        maps, x = (chain, X) if pooled else (tuple(one.for_rows(rows) for one in chain), X[rows])
        direction = target.directions(model.logits, slice(read, read + 1))[0]
        found += _decompx_split_chain(maps, x, split)[0] @ direction
    columns = torch.cat([stack.real for stack in (last, *model.stacks[:-1])])
    return build_target_scores(target, model, found[columns], 0.0)


def decompx_states(model: FrozenModel, option: str) -> Iterator[Tensor]:
    """(n, sources, d) of the last side after every layer: one tensor, overwritten by the next layer."""
    split = _decompx_split_of_option(option)
    counts = [len(stack.states[0]) for stack in model.stacks]
    encoder: Tensor | None = None
    for stack in model.stacks:
        last = stack is model.stacks[-1]
        X = exact_input_by_source(stack.states[0], 0 if last else counts[-1], sum(counts), remainder=False)
        for number, layer in enumerate(stack.layers):
            _decompx_split_layer(layer, X, encoder, split, keep_value_bias=option == PUBLISHED and number == 0)
            if last:
                yield X
        if not last:
            for rows in attention_block_row_slices(len(X), X[0].numel() * X.element_size()):
                X[rows] = _decompx_split_chain([one.for_rows(rows) for one in stack.tail], X[rows], split)
            encoder = X


def _decompx_split_of_option(option: str) -> Split:
    return "absdot" if option == PUBLISHED else option  # type: ignore[return-value]


def _decompx_split_layer(
    layer: FrozenLayer, X: Tensor, encoder: Tensor | None, split: Split, keep_value_bias: bool = False
) -> None:
    """Overwrite X (n, sources, d). With `keep_value_bias`, the sources are the tokens, in order."""
    layer = _decompx_without_split_value_bias(layer) if keep_value_bias else layer
    values: dict[int, Tensor] = {}
    for block in layer.blocks:
        for chain in block.branches:
            for number, one in enumerate(chain):
                if isinstance(one, FrozenAttention):
                    made = _decompx_split_values(one, chain[:number], encoder if one.cross else X, split)
                    if keep_value_bias and one.bias is not None:
                        by_source = made.unflatten(2, (-1, one.bias.shape[1]))  # (H, j, sources, d_h)
                        by_source.diagonal(dim1=1, dim2=2).add_(one.bias[..., None])
                    values[id(one)] = made
    widest = max(
        [X.shape[2], *(w.shape[1] for one in _decompx_feed_forwards(layer) for u in one.units for w in u.weights)]
    )
    for rows in attention_block_row_slices(len(X), X.shape[1] * widest * X.element_size()):
        x = X[rows]
        for block in layer.blocks:
            x = _decompx_split_block(block, rows, x, values, split)
        X[rows] = x


def _decompx_without_split_value_bias(layer: FrozenLayer) -> FrozenLayer:
    """The layer without ``sum_j sum_h alpha^h_ij b_V^h W_O^h`` in the constants that are split."""
    blocks = []
    for block in layer.blocks:
        branches = []
        for chain in block.branches:
            branches.append(tuple(_decompx_attention_without_value_bias(one) for one in chain))
        blocks.append(replace(block, branches=tuple(branches)))
    return FrozenLayer(tuple(blocks))


def _decompx_attention_without_value_bias(one: FrozenMap) -> FrozenMap:
    if not isinstance(one, FrozenAttention) or one.bias is None:
        return one
    assert one.constant is not None
    spread = one.mix(one.bias[:, None].expand(-1, one.weights.columns, -1))[:, 0]
    return replace(one, constant=one.constant - spread)


def _decompx_split_values(
    one: FrozenAttention, before: tuple[FrozenMap, ...], read: Tensor | None, split: Split
) -> Tensor:
    """(H, j, sources * d_h) for all tokens; cross-attention reads the encoder's states without a norm."""
    assert read is not None
    made = read.new_empty(len(one.value), len(read), read.shape[1] * one.value.shape[2])
    for rows in attention_block_row_slices(len(read), read[0].numel() * read.element_size()):
        x = (
            read[rows]
            if one.cross
            else _decompx_split_chain([part.for_rows(rows) for part in before], read[rows], split)
        )
        made[:, rows] = one.projected(x)
    return made if one.filter is None else one.filter.forward(made)


def _decompx_split_block(block: FrozenBlock, rows: slice, x: Tensor, values: dict[int, Tensor], split: Split) -> Tensor:
    total, late = block.kept(x), None
    for chain in block.branches:
        state = x
        for number, one in enumerate(part.for_rows(rows) for part in chain):
            if not isinstance(one, FrozenAttention):
                state = _decompx_split_map(one, state, split)
                continue
            state = one.mix(values[id(chain[number])])
            if number == len(chain) - 1:
                late = one.constant
            else:
                state = _decompx_add_split_constant(state, one.constant, split)
        total = state.add_(total)
    total = _decompx_add_split_constant(total, late, split)
    return total if block.after is None else _decompx_split_map(block.after.for_rows(rows), total, split)


def _decompx_split_chain(chain: tuple[FrozenMap, ...] | list[FrozenMap], X: Tensor, split: Split) -> Tensor:
    for one in chain:
        X = _decompx_split_map(one, X, split)
    return X


def _decompx_split_map(one: FrozenMap, X: Tensor, split: Split) -> Tensor:
    if isinstance(one, FrozenFeedForward):
        return _decompx_split_feed_forward(one, X, split)
    return _decompx_add_split_constant(one.forward(X, None), one.constant, split)


def _decompx_split_feed_forward(one: FrozenFeedForward, X: Tensor, split: Split) -> Tensor:
    """``(c * (p_k + w_k b_1)) W_2``, the second term computed as ``w_k`` times one vector per output."""
    out = torch.zeros_like(X)
    rest = torch.zeros_like(X[:, 0]) if one.constant is None else one.constant
    for unit, biases in zip(one.units, one.biases, strict=True):
        rows = slice(None) if unit.chosen is None else unit.chosen[0]
        gated, early = [], []
        for weight, c, bias in zip(unit.weights, unit.coefficients, biases, strict=True):
            hidden = X[rows] @ weight
            if bias is not None:
                constant = (c[0] * bias) @ unit.out
                rest = rest - constant
                early.append((decompx_split_weights(hidden, bias, split)[..., None], constant[rows, None]))
            gated.append(hidden.mul_(c[0][rows][:, None]))
        made = sum(gated[1:], gated[0]) @ unit.out
        for share, constant in early:
            made.addcmul_(share, constant)
        out[rows] += made
    return _decompx_add_split_constant(out, rest, split)


def _decompx_add_split_constant(X: Tensor, constant: Tensor | None, split: Split) -> Tensor:
    """``x_k + w_k b``, in place."""
    if constant is None:
        return X
    share = decompx_split_weights(X, constant, split)
    return X.addcmul_(share[..., None], constant if constant.dim() == 1 else constant[:, None])


def decompx_split_weights(X: Tensor, b: Tensor, split: Split) -> Tensor:
    """(n, sources) w, which sum to one for each output; zero vectors get zero weight. b is (d,) or (n, d)."""
    if split in ("absdot", "abssim"):
        found = (X @ b if b.dim() == 1 else torch.bmm(X, b[:, :, None])[:, :, 0]).abs_()
        if split == "abssim":  # the norm of b cancels
            found /= X.norm(dim=-1).clamp_min(torch.finfo(X.dtype).tiny)
    else:
        found = X.norm(dim=-1)
        if split == "equal":
            found = (found != 0).to(X.dtype)
    return found / found.sum(-1, keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)


def _decompx_feed_forwards(layer: FrozenLayer) -> Iterator[FrozenFeedForward]:
    for block in layer.blocks:
        for chain in block.branches:
            yield from (one for one in chain if isinstance(one, FrozenFeedForward))
