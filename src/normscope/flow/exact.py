"""The exact decomposition of a whole model: the algebra of every layer, with the remainder kept apart.

The frozen model is affine, so a late vector is ``x_i = sum_k x_i<-k + r_i``: k runs over the input tokens, and r_i
comes from biases. Forwards, `exact_maps` carries the vectors of a block of sources at a time through all layers
(sources do not interact), so memory is n x block x d. Backwards, `exact_scores` takes the direction of a target to
every layer: by linearity this gives ``<g, x_i<-k>`` for all tokens at once, at the cost of about one more pass. The
logits of a whole answer, added up, are one direction too; `exact_score_matrix` carries many targets back, in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from normscope.flow.interface import FlowMaps, MethodRun
from normscope.flow.maps import (
    BackwardState,
    FrozenAttention,
    FrozenFeedForward,
    FrozenModel,
    FrozenStack,
    backward_block,
    backward_layer,
    forward_block,
    forward_layer,
)
from normscope.flow.result import ScoreMatrix, Scores
from normscope.flow.targets import Target, build_target_matrix, build_target_scores, start_at_target
from normscope.step_progress import FOLLOWED

BLOCK_BYTES = 256 * 2**20
BLOCK_TARGETS = 8  # carried back together: more are no faster, and would stop or report later


def run_exact_maps(run: MethodRun) -> FlowMaps:
    """`exact_maps` of a run."""
    return exact_maps(run.model)


def run_exact_scores(run: MethodRun, target: Target) -> Scores | ScoreMatrix:
    """`exact_scores` of a run, or `exact_score_matrix` if every scalar is explained by itself."""
    return exact_score_matrix(run.model, target) if target.each else exact_scores(run.model, target)


def exact_maps(model: FrozenModel, block_bytes: int = BLOCK_BYTES) -> tuple[Tensor, Tensor]:
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
        remainder = first + count == total  # the last block includes the remainder
        for layer, X in enumerate(_exact_states_by_source(model, order, first, count, remainder)):
            norms[layer, :, first : first + count] = torch.linalg.vector_norm(X[:, :count], dim=-1)
            sums[layer] += X.sum(1)
        if followed := FOLLOWED.get():
            followed.report("columns of the maps", first + count, total)
    real = last.real
    errors = [
        exact_relative_error(found[real], actual[real]) for found, actual in zip(sums, last.states[1:], strict=True)
    ]
    columns = torch.cat([stack.real for stack in order])
    return norms[:, real][:, :, columns], torch.tensor(errors, dtype=torch.float64)


def _exact_states_by_source(
    model: FrozenModel, order: list[FrozenStack], first: int, count: int, remainder: bool
) -> list[Tensor]:
    """The last side's states (n, count [+ 1], d) after each layer, by the sources first .. first + count - 1."""
    encoder: Tensor | None = None
    found: list[Tensor] = []
    for stack in model.stacks:
        begin = 0 if stack is order[0] else len(order[0].states[0])
        X = exact_input_by_source(stack.states[0], begin - first, count, remainder)
        found = []
        for number, layer in enumerate(stack.layers):
            if number in stack.added:
                X = X + exact_input_by_source(stack.added[number], begin - first, count, remainder)
            X = forward_layer(layer, X, encoder, remainder)
            found.append(X)
        encoder = forward_block(stack.end, X, encoder, remainder)
    return found


def exact_input_by_source(x: Tensor, begin: int, count: int, remainder: bool) -> Tensor:
    """(n, count [+ 1], d): the input x (n, d) by source. Token t is source begin + t, if that is within 0 .. count - 1;
    the remainder starts at zero."""
    tokens, width = x.shape
    made = x.new_zeros(tokens, count + int(remainder), width)
    for t in range(max(0, -begin), min(tokens, count - begin)):
        made[t, begin + t] = x[t]
    return made


def exact_relative_error(found: Tensor, actual: Tensor) -> float:
    """``max_i ||found_i - actual_i|| / ||actual_i||``"""
    return float(((found - actual).norm(dim=-1) / actual.norm(dim=-1).clamp_min(1e-30)).max())


def exact_scores(model: FrozenModel, target: Target) -> Scores:
    """The target by token, at the input and before every layer, from one backward pass."""
    layers: dict[str, Tensor] = {}
    remainders: dict[str, Tensor] = {}
    at_input: dict[str, Tensor] = {}
    state = start_at_target(model, target, 0, 1)
    for stack in reversed(model.stacks):
        state = _enter_stack_backward(model, stack, state)
        by_token, constants = [_exact_products(state, stack.states[-1])[0]], [state.constants[0]]
        added = torch.zeros_like(by_token[0])  # from the layers passed so far
        for number in reversed(range(len(stack.layers))):
            backward_layer(stack.layers[number], state)
            if number in stack.added:
                added = added + _exact_products(state, stack.added[number])[0]
            by_token.append(_exact_products(state, stack.states[number])[0] + added)
            constants.append(state.constants[0])
            if followed := FOLLOWED.get():
                followed.report(f"layers back through the {stack.side}", len(by_token) - 1, len(stack.layers))
        at_input[stack.side] = by_token[-1][stack.real]
        layers[stack.side] = torch.stack(by_token[::-1])[:, stack.real]
        remainders[stack.side] = torch.stack(constants[::-1]).cpu()
    found = torch.cat([at_input[stack.side] for stack in (model.stacks[-1], *model.stacks[:-1])])
    scores = build_target_scores(target, model, found, float(state.constants))
    after = scores.remainder - float(state.constants)  # what no direction holds, after all layers
    return replace(scores, layers=layers, remainders={side: one + after for side, one in remainders.items()})


def exact_score_matrix(model: FrozenModel, target: Target, block_bytes: int = BLOCK_BYTES) -> ScoreMatrix:
    """Every scalar of the target by token: the directions of some at a time go through one backward pass together."""
    found, constants = zip(*exact_score_blocks(model, target, block_bytes), strict=True)
    return build_target_matrix(target, model, torch.cat(found), torch.cat(constants))


def exact_score_blocks(
    model: FrozenModel, target: Target, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Tensor, Tensor]]:
    """Some scalars at a time: their scores (targets, columns) at the input, and what constants add to them."""
    total = len(target.descriptions)
    widest = max(exact_row_width(model, stack) for stack in model.stacks)
    tokens = max(len(stack.states[0]) for stack in model.stacks)
    size = model.stacks[-1].states[0].element_size()
    step = min(max(1, block_bytes // (size * tokens * widest)), BLOCK_TARGETS)
    for first in range(0, total, step):
        state = start_at_target(model, target, first, min(step, total - first))
        at_input: dict[str, Tensor] = {}
        for stack in reversed(model.stacks):
            state = _enter_stack_backward(model, stack, state)
            added: Tensor | float = 0.0
            for number in reversed(range(len(stack.layers))):
                backward_layer(stack.layers[number], state)
                if number in stack.added:
                    added = added + _exact_products(state, stack.added[number])
            at_input[stack.side] = (_exact_products(state, stack.states[0]) + added)[:, stack.real]
        found = [at_input[stack.side] for stack in (model.stacks[-1], *model.stacks[:-1])]
        yield torch.cat(found, dim=1), state.constants


def exact_row_width(model: FrozenModel, stack: FrozenStack) -> int:
    """The numbers that one token of one target takes on its way back through a layer, about."""
    inside = [
        max((part.out.shape[0] for part in one.parts), default=0)
        if isinstance(one, FrozenFeedForward)
        else 2 * one.value.shape[0] * one.value.shape[2]
        for layer in stack.layers[:1]
        for block in layer.blocks
        for chain in block.branches
        for one in chain
        if isinstance(one, FrozenAttention | FrozenFeedForward)
    ]
    return 4 * stack.states[0].shape[-1] + 2 * max(inside, default=0)


def _enter_stack_backward(model: FrozenModel, stack: FrozenStack, state: BackwardState) -> BackwardState:
    """From the input of the next side to the last layer's states of an encoder; the last side's stay."""
    if stack is not model.stacks[-1]:
        assert state.encoder is not None
        state = BackwardState(state.encoder, state.constants)
        backward_block(stack.end, state)
    return state


def _exact_products(state: BackwardState, x: Tensor) -> Tensor:
    """(targets, n): ``<g_i, x_i>``"""
    return (state.direction * x).sum(-1)
