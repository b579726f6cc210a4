"""Attention blocks at the model's own states: what each input token contributes to each output, block by block.

GlobEnc, ALTI and ALTI-Logit start from ``T_ij = after([i=j] x_i + branch_tail(sum_h alpha^h_ij f^h_j))``, where
``f^h_j = v^h_j W_O^h`` and v are the model's values: attention rows sum to one, so a value bias is spread over j (EMNLP
2020). `branch_tail` is a norm or gain at the end of the branch, `after` the norm of a post-LN layer with its actual
statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.decompose.mixing import mix_values
from normscope.flow.maps import FrozenAttention, FrozenBlock, FrozenMap, FrozenStack, forward_block

ROW_BYTES = 32 * 2**20  # of vectors at a time


@dataclass(frozen=True)
class AttentionBlock:
    """The attention of one block. The feed-forward of a parallel layer is left out of `y`."""

    attention: FrozenAttention
    weights: Tensor  # (H, i, j); with a filter, a head for each tap and head
    values: Tensor  # (H, j, d_h): v^h_j
    vectors: Tensor  # (j, H, d): f^h_j, without the gate; of no heads if there is a gate
    x: Tensor  # (n, d): what the residual connection keeps of the input of the block
    branch_tail: tuple[FrozenMap, ...]
    after: FrozenMap | None
    y: Tensor  # (n, d): the output of the block, biases included

    def contributions(self) -> Iterator[tuple[slice, Tensor]]:
        """Some rows at a time: (rows, j, d) T_ij; for cross-attention, without the residual connection."""
        tokens, width = self.values.shape[1], self.attention.matrix.shape[2]
        for rows in attention_block_row_slices(len(self.x), self.x.element_size() * tokens * width):
            weights = self.weights[:, rows].permute(2, 1, 0)  # (j, rows, H)
            if self.attention.gate is None:
                T = torch.bmm(weights, self.vectors).transpose(0, 1)
            else:
                gate = self.attention.gate[:, rows].transpose(0, 1)
                mixed = mix_values(weights.transpose(0, 1), self.values.transpose(0, 1), gate[:, None])
                T = mixed @ self.attention.matrix.flatten(0, 1)
            for one in self.branch_tail:
                T = one.for_rows(rows).forward(T, None)
            if not self.attention.cross:
                T.diagonal(rows.start).add_(self.x[rows].t())
            yield rows, T if self.after is None else self.after.for_rows(rows).forward(T, None)

    def along(self, g: Tensor) -> Tensor:
        """(j,): what all outputs receive from each token along the directions g (n, d) in the attention's output."""
        if self.attention.gate is None:
            return torch.einsum("hij,id,jhd->j", self.weights, g, self.vectors)
        back = torch.einsum("id,hkd->hik", g, self.attention.matrix) * self.attention.gate
        by_tap = (x.unflatten(0, (-1, len(back))) for x in (self.weights, self.values))
        return torch.einsum("thij,thjk,hik->j", *by_tap, back)

    def residual(self) -> Tensor:
        """(n, d): the contribution of the residual connection alone."""
        return self.x if self.after is None else self.after.forward(self.x[:, None], None)[:, 0]


def attention_blocks(stack: FrozenStack, encoder: Tensor | None = None) -> Iterator[list[AttentionBlock]]:
    """The attention blocks of each layer: self-attention, then cross-attention to `encoder` (m, d)."""
    for layer, x in zip(stack.layers, stack.states[:-1], strict=True):
        found: list[AttentionBlock] = []
        for block in layer.blocks:
            found += _attention_block_branches(block, x, encoder)
            x = attention_block_output(block, x, encoder)
        yield found


def _attention_block_branches(block: FrozenBlock, x: Tensor, encoder: Tensor | None) -> Iterator[AttentionBlock]:
    for chain in block.branches:
        number = next((n for n, one in enumerate(chain) if isinstance(one, FrozenAttention)), None)
        if number is None:
            continue
        attention = chain[number]
        assert isinstance(attention, FrozenAttention)
        before = FrozenBlock((chain[:number],), None, residual=False)
        read = encoder if attention.cross else attention_block_output(before, x, None)
        assert read is not None
        values, weights = attention.projected(read[:, None]), attention.weights.all
        if attention.bias is not None:
            values = values + attention.bias[:, None]
        if attention.filter is not None:
            weights, values = attention.filter.spread(weights, values)
        vectors = values.new_empty(len(read), 0, read.shape[1])
        if attention.gate is None:
            vectors = torch.bmm(values, attention.matrix).transpose(0, 1).contiguous()
        y = attention_block_output(FrozenBlock((chain,), block.after, skip=block.skip), x, encoder)
        yield AttentionBlock(attention, weights, values, vectors, block.kept(x), chain[number + 1 :], block.after, y)


def attention_block_output(block: FrozenBlock, x: Tensor, encoder: Tensor | None) -> Tensor:
    """(n, d): the model's own vectors after a block, computed from those before it."""
    return forward_block(block, x[:, None], None if encoder is None else encoder[:, None], True)[:, 0]


def attention_block_row_slices(total: int, row_bytes: int) -> Iterator[slice]:
    """Slices of `total` rows that hold about ROW_BYTES each."""
    step = max(1, ROW_BYTES // row_bytes)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
