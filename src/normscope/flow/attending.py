"""Blocks that attend, at the model's own states: what each token brings to each output, one block at a time.

GlobEnc, ALTI and ALTI-Logit begin with ``T_ij = after([i=j] x_i + behind(sum_h alpha^h_ij f^h_j))``, where
``f^h_j = v^h_j W_O^h`` and v is what the model used: attention rows sum to one, so that a value bias is spread over j
(EMNLP 2020). `behind` is a norm or gain on the branch, `after` the norm of a post-LN layer with its real statistic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.flow.freeze import FrozenStack
from normscope.flow.frozen import FrozenAttention, FrozenBlock, Map
from normscope.flow.propagation import forward_block

ROW_BYTES = 32 * 2**20  # of vectors at a time


@dataclass(frozen=True)
class Attending:
    """The attention of one block. A feed-forward beside it, in a parallel layer, is left out of `y`."""

    attention: FrozenAttention
    vectors: Tensor  # (j, H, d): f^h_j
    x: Tensor  # (n, d): what entered the block
    behind: tuple[Map, ...]
    after: Map | None
    y: Tensor  # (n, d): what comes out, biases included

    def brought(self) -> Iterator[tuple[slice, Tensor]]:
        """Some rows at a time: (rows, j, d) T_ij; without the residual connection where the columns are encoder's."""
        tokens, _, width = self.vectors.shape
        for rows in spans(len(self.x), self.x.element_size() * tokens * width):
            weights = self.attention.weights[:, rows].permute(2, 1, 0)
            T = torch.bmm(weights, self.vectors).transpose(0, 1)
            for one in self.behind:
                T = one.at(rows).forward(T, None)
            if not self.attention.cross:
                T.diagonal(rows.start).add_(self.x[rows].t())
            yield rows, T if self.after is None else self.after.at(rows).forward(T, None)

    def kept(self) -> Tensor:
        """(n, d): what the residual connection brings by itself."""
        return self.x if self.after is None else self.after.forward(self.x[:, None], None)[:, 0]


def attending(stack: FrozenStack, encoder: Tensor | None = None) -> Iterator[list[Attending]]:
    """The blocks of each layer that attend, in order: self-attention, then cross-attention to `encoder` (m, d)."""
    for layer, x in zip(stack.layers, stack.states[:-1], strict=True):
        found: list[Attending] = []
        for block in layer.blocks:
            found += _attending(block, x, encoder)
            x = real(block, x, encoder)
        yield found


def _attending(block: FrozenBlock, x: Tensor, encoder: Tensor | None) -> Iterator[Attending]:
    for chain in block.branches:
        number = next((n for n, one in enumerate(chain) if isinstance(one, FrozenAttention)), None)
        if number is None:
            continue
        attention = chain[number]
        assert isinstance(attention, FrozenAttention)
        read = encoder if attention.cross else real(FrozenBlock((chain[:number],), None, residual=False), x, None)
        assert read is not None
        values = attention.values(read[:, None])
        if attention.bias is not None:
            values = values + attention.bias[:, None]
        vectors = torch.bmm(values, attention.matrix).transpose(0, 1).contiguous()
        y = real(FrozenBlock((chain,), block.after), x, encoder)
        yield Attending(attention, vectors, x, chain[number + 1 :], block.after, y)


def real(block: FrozenBlock, x: Tensor, encoder: Tensor | None) -> Tensor:
    """(n, d): the model's own vectors behind a block, from those before it: one source, which takes the constants."""
    return forward_block(block, x[:, None], None if encoder is None else encoder[:, None], True)[:, 0]


def spans(total: int, size: int) -> Iterator[slice]:
    """Slices of `total` rows of `size` bytes each."""
    step = max(1, ROW_BYTES // size)
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
