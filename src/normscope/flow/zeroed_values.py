"""What a layer outputs if the value vector of one token is zero, for every token at once, from the model's own weights.

Without the values of token j, the output of attention is ``m_i - sum_h alpha^h_ij f^h_j`` with
``f^h_j = v^h_j W_O^h``. Linear maps act on the vectors m_i and f^h_j alone, and a norm multiplies all of them by one
number for each pair (i, j), its new statistic. So the first product of a feed-forward needs no vector for each pair:

    ``W_1 z_ij + b_1 = r_ij W_1 m_i - r_ij sum_h alpha^h_ij W_1 f^h_j + ...``

Only its activation and W_2 are computed for each pair. Activations and norms are the real ones, not frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from normscope.decompose.activations import projections_of
from normscope.decompose.kernels import multiply_packed_kernel, pack_kernel_matrix
from normscope.flow.attention_blocks import attention_block_output
from normscope.flow.maps import (
    FrozenAttention,
    FrozenBlock,
    FrozenFeedForward,
    FrozenLayer,
    FrozenMap,
    FrozenNorm,
    FrozenScale,
)
from normscope.tracing.records import Unit

BLOCK_BYTES = 4 * 2**20  # of hidden units computed at a time, which fit in cache


@dataclass(frozen=True)
class ZeroedStates:
    """``x_ij = sum_t r^t_ij b^t_i - sum_h a^h_ij f^h_j``: outputs i without the values of each token j. One more
    column, the first, has all values: its a is zero."""

    terms: tuple[tuple[Tensor | None, Tensor], ...]  # r (columns, n) or None for ones, and b (n or 1, d)
    weights: Tensor  # (columns, n, H): a
    vectors: Tensor  # (columns, H, d): f

    def add(self, b: Tensor) -> ZeroedStates:
        """With vectors (n or 1, d) added that are the same for all tokens j."""
        return replace(self, terms=(*self.terms, (None, b)))

    def through(self, weight: Tensor) -> ZeroedStates:
        """``x_ij W``"""
        terms = tuple((r, b @ weight) for r, b in self.terms)
        packed = pack_kernel_matrix(weight, self.vectors[..., 0].numel())
        return replace(self, terms=terms, vectors=_multiply_packed(self.vectors, packed))

    def scaled(self, gain: Tensor) -> ZeroedStates:
        """``x_ij * gain`` for a gain (d,)"""
        terms = tuple((r, b * gain) for r, b in self.terms)
        return replace(self, terms=terms, vectors=self.vectors * gain)

    def normed(self, norm: FrozenNorm) -> ZeroedStates:
        """After a norm with the statistics of x_ij."""
        given = self
        if norm.centered:
            terms = tuple((r, b - b.mean(-1, keepdim=True)) for r, b in self.terms)
            given = replace(self, terms=terms, vectors=self.vectors - self.vectors.mean(-1, keepdim=True))
        squares = torch.empty_like(self.weights[..., 0])
        for rows in self.row_blocks(self.vectors.shape[-1]):
            squares[:, rows] = given.states(rows).square_().mean(-1)
        r = _new_inverse(squares, norm.inverse)
        terms = tuple((r if own is None else own * r, b) for own, b in given.terms)
        made = ZeroedStates(terms, given.weights * r[..., None], given.vectors).scaled(norm.gain)
        return made if norm.constant is None else made.add(norm.constant[None])

    def states(self, rows: slice, columns: slice = slice(None)) -> Tensor:
        """(columns, rows, d): x_ij itself."""
        made = torch.bmm(self.weights[columns, rows], self.vectors[columns]).neg_()
        for r, b in self.terms:
            some = b[rows] if len(b) > 1 else b
            if r is None:
                made.add_(some)
            else:
                made.addcmul_(r[columns, rows, None], some)
        return made

    def row_blocks(self, width: int) -> Iterator[slice]:
        """Slices of the rows whose vectors of a width fit in cache."""
        columns, n, _ = self.weights.shape
        step = max(1, BLOCK_BYTES // (columns * width * self.vectors.element_size()))
        for start in range(0, n, step):
            yield slice(start, min(start + step, n))


def takes_zeroed_values(layer: FrozenLayer) -> bool:
    """Whether `zeroed_value_distances` computes the layer: attention, alone or beside a feed-forward, then at most one
    block with a feed-forward; no experts, no gates on attention, no norms inside."""
    later = layer.blocks[1:]
    parts = [[_count_parts(chain) for chain in block.branches] for block in layer.blocks]
    if len(later) > 1 or not all(_is_plain(one) for block in layer.blocks for chain in block.branches for one in chain):
        return False
    known = sorted(parts[0]) in ([(1, 0)], [(0, 1), (1, 0)])  # attention; attention beside a feed-forward
    return known and all(one == [(0, 1)] for one in parts[1:]) and all(block.residual for block in later)


def _count_parts(chain: tuple[FrozenMap, ...]) -> tuple[int, int]:
    """The numbers of attentions and feed-forwards."""
    kinds = (FrozenAttention, FrozenFeedForward)
    attentions, feed_forwards = (sum(isinstance(one, kind) for one in chain) for kind in kinds)
    return attentions, feed_forwards


def zeroed_value_distances(layer: FrozenLayer, x: Tensor, tokens: Tensor) -> Tensor:
    """(n, tokens): how far each output of a layer that reads x (n, d) turns without the values of each of some tokens;
    exactly zero where it does not attend to the token."""
    states = _attention_block_states(layer.blocks[0], x, tokens)
    affected = (states.weights != 0).any(-1)  # (columns, n)
    found = x.new_zeros(affected.shape)
    for rows, columns, y in _zeroed_layer_outputs(layer, states, affected):
        found[columns, rows] = zeroed_distance(y[:1], y)
    return found.masked_fill_(~affected, 0)[1:].t()


def zeroed_distance(y: Tensor, other: Tensor) -> Tensor:
    """(..., n): ``1 - cos = ||y / ||y|| - y' / ||y'||||^2 / 2``, without cancellation in small distances."""
    unit, changed = (one / one.norm(dim=-1, keepdim=True) for one in (y, other))
    found: Tensor = (unit - changed).square_().sum(-1) / 2
    return found


def _zeroed_layer_outputs(
    layer: FrozenLayer, states: ZeroedStates, affected: Tensor
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Some rows at a time: (columns, rows, d) the outputs of the layer, in the columns up to the last that affects
    them."""
    later = layer.blocks[1:]
    if not later:
        for rows in states.row_blocks(states.vectors.shape[-1]):
            columns = _columns_affecting(affected[:, rows])
            yield rows, columns, states.states(rows, columns)
        return
    (block,) = later
    (chain,) = block.branches
    number = next(n for n, one in enumerate(chain) if isinstance(one, FrozenFeedForward))
    read = reduce(_after_map, chain[:number], states)
    feed_forward = chain[number]
    assert isinstance(feed_forward, FrozenFeedForward)
    (unit,) = feed_forward.parts
    hidden = [read.through(projection.weight) for projection in projections_of(unit)]
    out = pack_kernel_matrix(unit.out, affected.numel())
    for rows in states.row_blocks(unit.out.shape[0]):
        columns = _columns_affecting(affected[:, rows])
        made = _feed_forward_output(unit, [one.states(rows, columns) for one in hidden], out)
        for one in chain[number + 1 :]:
            made = _after_map_of_rows(one.for_rows(rows), made)
        kept = states.states(rows, columns)
        made += kept if block.skip is None else kept * block.skip
        yield rows, columns, made if block.after is None else _after_map_of_rows(block.after.for_rows(rows), made)


def _columns_affecting(affected: Tensor) -> slice:
    """The columns up to the last that affects any of these rows; a causal model reads no later token."""
    used = affected.any(1).nonzero()
    return slice(0, int(used[-1]) + 1 if len(used) else 1)


def _attention_block_states(block: FrozenBlock, x: Tensor, tokens: Tensor) -> ZeroedStates:
    """The outputs of the block with attention. Its other branch reads x, which is the same for all tokens j."""
    number = next(n for n, chain in enumerate(block.branches) if any(_is_attention(one) for one in chain))
    chain = block.branches[number]
    place = next(n for n, one in enumerate(chain) if _is_attention(one))
    attention = chain[place]
    assert isinstance(attention, FrozenAttention)
    read = attention_block_output(FrozenBlock((chain[:place],), None, residual=False), x, None)
    values = attention.values(read[:, None])
    output = attention.mix(values)[:, 0]
    output = output if attention.constant is None else output + attention.constant
    if attention.bias is not None:
        values = values + attention.bias[:, None]
    some = torch.bmm(values[:, tokens], attention.matrix).transpose(0, 1)  # (tokens, H, d)
    weights = attention.weights.all[:, :, tokens].permute(2, 1, 0)
    weights = torch.cat([weights.new_zeros(1, *weights.shape[1:]), weights])
    states = ZeroedStates(((None, output),), weights, torch.cat([some[:1], some]))
    states = reduce(_after_map, chain[place + 1 :], states)
    others = tuple(one for n, one in enumerate(block.branches) if n != number)
    beside = FrozenBlock(others, None, block.residual, block.skip)
    if others or block.residual:
        states = states.add(attention_block_output(beside, x, None))
    return states if block.after is None else _after_map(states, block.after)


def _after_map(states: ZeroedStates, one: FrozenMap) -> ZeroedStates:
    if isinstance(one, FrozenNorm):
        return states.normed(one)
    assert isinstance(one, FrozenScale)
    return states.scaled(one.gain)


def _after_map_of_rows(one: FrozenMap, made: Tensor) -> Tensor:
    """The same for the vectors (columns, rows, d) themselves."""
    if isinstance(one, FrozenScale):
        return made * one.gain
    assert isinstance(one, FrozenNorm)
    if one.centered:
        made = made - made.mean(-1, keepdim=True)
    made = made * _new_inverse(made.square().mean(-1), one.inverse)[..., None] * one.gain
    return made if one.constant is None else made + one.constant


def _new_inverse(squares: Tensor, inverse: Tensor) -> Tensor:
    """(columns, rows): ``1 / sqrt(mean square + epsilon)``; the first column's is the model's own, which tells
    epsilon."""
    return (squares - squares[0] + inverse.pow(-2)).clamp_min(torch.finfo(squares.dtype).tiny).rsqrt()


def _feed_forward_output(unit: Unit, hidden: list[Tensor], packed: Tensor) -> Tensor:
    """``g(x W_1 + b_1) W_2 + b_2``, or gated ``(g(x W_1 + b_1) * (x W_3 + b_3)) W_2 + b_2``, from the products with
    W_1 and W_3; W_2 may be packed."""
    biases = [projection.bias for projection in projections_of(unit)]
    added = [one if bias is None else one.add_(bias) for one, bias in zip(hidden, biases, strict=True)]
    made = unit.activation(added[0])
    out = _multiply_packed(made if len(added) == 1 else made * added[1], packed)
    return out if unit.out_bias is None else out + unit.out_bias


def _multiply_packed(x: Tensor, matrix: Tensor) -> Tensor:
    """``x W`` for x (..., k) and a matrix from `pack_kernel_matrix`."""
    if not matrix.is_mkldnn:
        return x @ matrix
    flat = x.reshape(-1, x.shape[-1])
    made = multiply_packed_kernel(flat, matrix, flat, add=False)
    return made.view(*x.shape[:-1], -1)


def _is_attention(one: FrozenMap) -> bool:
    return isinstance(one, FrozenAttention)


def _is_plain(one: FrozenMap) -> bool:
    """Whether a map is computed here: nothing in it depends on its input in a way that it does not show."""
    if isinstance(one, FrozenAttention):
        return not one.cross and one.gate is None and one.filter is None and one.weights.scale is None
    if isinstance(one, FrozenFeedForward):
        (unit, *more) = one.parts
        special = (unit.routing, unit.joint, unit.inverse)
        return not more and not unit.scaled_input and all(part is None for part in special)
    return isinstance(one, FrozenNorm) or (
        isinstance(one, FrozenScale) and one.constant is None and one.gain.dim() == 1
    )
