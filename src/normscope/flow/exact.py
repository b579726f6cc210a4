"""The exact decomposition of a whole model: every layer's own algebra, with the remainder kept apart.

The frozen model is affine, so that a late vector is ``x_i = sum_k x_i<-k + r_i``: k runs over the input tokens, r_i
comes from biases. Forwards, `maps` carries the vectors of some sources at a time through all layers (they do not meet),
so that memory is n x block x d. Backwards, `scores` takes one direction, that of a logit, to every layer: by linearity
``<g, x_i<-k>`` is found for all tokens at once, at the cost of about one more pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from normscope.flow.freeze import FrozenModel, FrozenStack
from normscope.flow.propagation import Backwards, adjoint_block, adjoint_layer, back, forward_block, forward_layer
from normscope.flow.result import Scores
from normscope.flow.targets import Aim, scored

BLOCK_BYTES = 256 * 2**20


def maps(model: FrozenModel, block_bytes: int = BLOCK_BYTES) -> tuple[Tensor, Tensor]:
    """(layers, rows, columns): ``||x^l_i<-k||`` after every layer of the last side, and (layers,) the completeness.

    Columns are the last side's tokens, then the encoder's; masked tokens are left out.
    """
    last = model.stacks[-1]
    order = [last, *model.stacks[:-1]]  # sources: the last side's tokens first
    total = sum(len(stack.states[0]) for stack in order)
    tokens, width = last.states[0].shape
    longest = max(len(stack.states[0]) for stack in order)
    size = last.states[0].element_size()
    step = max(1, min(total, block_bytes // (size * longest * width * 6)))
    norms = last.states[0].new_empty(len(last.layers), tokens, total)
    sums = [torch.zeros_like(state) for state in last.states[1:]]
    for first in range(0, total, step):
        count = min(step, total - first)
        remainder = first + count == total  # with the last block goes the remainder
        for layer, X in enumerate(_states(model, order, first, count, remainder)):
            norms[layer, :, first : first + count] = torch.linalg.vector_norm(X[:, :count], dim=-1)
            sums[layer] += X.sum(1)
    real = last.real
    error = [missed(found[real], actual[real]) for found, actual in zip(sums, last.states[1:], strict=True)]
    columns = torch.cat([stack.real for stack in order])
    return norms[:, real][:, :, columns], torch.tensor(error, dtype=torch.float64)


def _states(model: FrozenModel, order: list[FrozenStack], first: int, count: int, remainder: bool) -> list[Tensor]:
    """The last side's states (n, count [+ 1], d) after each layer, by the sources first .. first + count - 1."""
    encoder: Tensor | None = None
    found: list[Tensor] = []
    for stack in model.stacks:
        begin = 0 if stack is order[0] else len(order[0].states[0])
        X = sources(stack.states[0], begin - first, count, remainder)
        found = []
        for layer in stack.layers:
            X = forward_layer(layer, X, encoder, remainder)
            found.append(X)
        encoder = forward_block(stack.end, X, encoder, remainder)
    return found


def sources(x: Tensor, begin: int, count: int, remainder: bool) -> Tensor:
    """(n, count [+ 1], d): at the start, token t is the source begin + t of those, where it is one of them at all."""
    tokens, width = x.shape
    made = x.new_zeros(tokens, count + int(remainder), width)
    for t in range(max(0, -begin), min(tokens, count - begin)):
        made[t, begin + t] = x[t]
    return made


def missed(found: Tensor, actual: Tensor) -> float:
    """``max_i ||found_i - actual_i|| / ||actual_i||``"""
    return float(((found - actual).norm(dim=-1) / actual.norm(dim=-1).clamp_min(1e-30)).max())


def scores(model: FrozenModel, aim: Aim) -> Scores:
    """A target by token, at the input and before every layer, from one pass backwards."""
    assert model.logits is not None
    at = Backwards(aim.direction(model.logits))
    back(model.head, at)
    layers: dict[str, Tensor] = {}
    remainders: dict[str, Tensor] = {}
    ends: dict[str, Tensor] = {}
    for stack in reversed(model.stacks):
        if stack is not model.stacks[-1]:
            assert at.encoder is not None
            at = Backwards(at.encoder, None, at.constants)
        adjoint_block(stack.end, at)
        by_token, constants = [_along(at.direction, stack.states[-1])], [at.constants]
        for layer, state in zip(reversed(stack.layers), reversed(stack.states[:-1]), strict=True):
            adjoint_layer(layer, at)
            by_token.append(_along(at.direction, state))
            constants.append(at.constants)
        ends[stack.side] = by_token[-1][stack.real]
        layers[stack.side] = torch.stack(by_token[::-1])[:, stack.real]
        remainders[stack.side] = torch.tensor(constants[::-1], dtype=torch.float64)
    found = torch.cat([ends[stack.side] for stack in (model.stacks[-1], *model.stacks[:-1])])
    return replace(scored(aim, model.logits, found, at.constants), layers=layers, remainders=remainders)


def _along(direction: Tensor, state: Tensor) -> Tensor:
    return (direction * state).sum(-1)
