"""Put the operations of a layer together: which residual sums lead from its input to its output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from normscope.derivation.attention import Operation, UnexplainedError
from normscope.derivation.match import is_linear, norm_of_call, rows, same
from normscope.derivation.multipliers import named_multiplier
from normscope.derivation.watch import LayerLog
from normscope.models.spec import Attention, Block, Branch, Experts, FeedForward, Norm


@dataclass(frozen=True)
class NormCall:
    """A call of a norm."""

    norm: Norm
    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class Ending:
    """One way in which an operation's output can enter a residual sum."""

    post: Norm | None
    scale: str | float | None
    vector: Tensor
    bias: str | None = None  # a parameter of an attention, added to its output


def find_blocks(log: LayerLog, operations: Sequence[Operation]) -> tuple[Block, ...]:
    """The blocks of the layer; raises an error if no sequence of residual sums explains its output."""
    norms = [
        NormCall(norm, rows(call.input), rows(call.output))
        for call in log.calls
        if not is_linear(call) and (norm := norm_of_call(call)) is not None
    ]
    fitting = tuple(one for one in operations if one.output.shape == rows(log.input).shape)
    if len(fitting) < sum(isinstance(one.op, Attention) for one in operations):
        raise UnexplainedError("its attention returns vectors of another width than its input")
    found = _search(log, norms, rows(log.input), fitting)
    if found is None:
        raise UnexplainedError("its output is not a sum of its input and what its attention and feed-forward return")
    return found


def _search(
    log: LayerLog, norms: Sequence[NormCall], state: Tensor, left: tuple[Operation, ...]
) -> tuple[Block, ...] | None:
    """The blocks from `state` to the layer's output that use all operations left."""
    output = rows(log.output)
    if not left:
        return () if same(state, output) else None
    ready = [(one, entry) for one in left if (entry := _entry(one, state, norms, log)) is not None]
    for count in range(len(ready), 0, -1):
        for chosen in combinations(ready, count):
            rest = tuple(one for one in left if all(one is not other for other, _ in chosen))
            for total, block in _sums(log, norms, state, chosen, output):
                for norm, after in _after(norms, total):
                    following = _search(log, norms, after, rest)
                    if following is not None:
                        return (replace(block, after=norm), *following)
    return None


def _entry(one: Operation, state: Tensor, norms: Sequence[NormCall], log: LayerLog) -> Norm | bool | None:
    """The norm through which an operation reads the state; False if it reads it directly, None if it does not."""
    if isinstance(one.op, Attention) and one.op.cross:
        return _query_norm(one, state, norms, log)
    if same(one.reads, state):
        return next((norm.norm for norm in norms if _is_identity(norm) and same(norm.input, state)), False)
    for norm in norms:
        if same(norm.input, state) and same(norm.output, one.reads):
            return norm.norm
    return None


def _is_identity(norm: NormCall) -> bool:
    return norm.input.shape == norm.output.shape and torch.equal(norm.input, norm.output)


def _query_norm(one: Operation, state: Tensor, norms: Sequence[NormCall], log: LayerLog) -> Norm | bool | None:
    """The same for a cross-attention, whose queries read the state."""
    assert isinstance(one.op, Attention)
    inside = [call for call in log.calls if call.path.startswith(f"{one.op.module}.") and is_linear(call)]
    for call in inside:
        if same(call.input, state):
            return False
        for norm in norms:
            if same(norm.input, state) and same(norm.output, call.input):
                return norm.norm
    return None


def _sums(
    log: LayerLog,
    norms: Sequence[NormCall],
    state: Tensor,
    chosen: Sequence[tuple[Operation, Norm | bool]],
    output: Tensor,
) -> Iterator[tuple[Tensor, Block]]:
    """Residual sums of the state and the chosen operations that occur in the layer, as the input of a module or as its
    output: plain ones first, then with multipliers."""
    seen = [output, *(rows(call.input) for call in log.calls if rows(call.input).shape == output.shape)]
    endings = [list(_endings(log, norms, one)) for one, _ in chosen]
    for combination in _product(endings):
        total = state + sum(ending.vector for ending in combination)
        if any(same(total, one) for one in seen):
            yield total, Block(_branches(chosen, combination))
    for combination in _product(endings):
        vectors = [ending.vector for ending in combination]
        for skip, kept in _kept_streams(log, state):
            found = _fit_scales(kept, vectors, seen)
            if found is None:
                continue
            total, (first, *scales) = found
            scaled = [_with_scale(e, s, log) for e, s in zip(combination, scales, strict=True)]
            if all(scaled) and (skip is None or abs(first - 1) < 1e-6):
                multiplier = skip if skip is not None else named_multiplier(log.layer, first)
                yield total, Block(_branches(chosen, [e for e in scaled if e]), skip=multiplier)


def _with_scale(ending: Ending, factor: float, log: LayerLog) -> Ending | None:
    """An ending multiplied by a factor; None if it has another multiplier already."""
    if ending.scale is None:
        return replace(ending, scale=named_multiplier(log.layer, factor))
    return ending if abs(factor - 1) < 1e-6 else None


def _kept_streams(log: LayerLog, state: Tensor) -> Iterator[tuple[str | None, Tensor]]:
    """The state as it is, and multiplied by each parameter of its width that the layer itself has."""
    yield None, state
    for name, one in log.layer.named_parameters(recurse=False):
        if one.shape == state.shape[-1:]:
            yield name, state * one.detach()


def _branches(chosen: Sequence[tuple[Operation, Norm | bool]], endings: Sequence[Ending]) -> tuple[Branch, ...]:
    pairs = zip(chosen, endings, strict=True)
    return _with_shared_expert(
        tuple(
            Branch(
                _with_bias(one.op, ending.bias),
                pre=pre if isinstance(pre, Norm) else None,
                post=ending.post,
                scale=ending.scale,
            )
            for (one, pre), ending in pairs
        )
    )


def _with_bias(op: Attention | FeedForward | Experts, bias: str | None) -> Attention | FeedForward | Experts:
    return op if bias is None or not isinstance(op, Attention) else replace(op, output_bias=bias)


def _with_shared_expert(branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    """Branches in which a feed-forward beside experts is a part of them."""
    experts = next((one for one in branches if isinstance(one.op, Experts) and one.op.shared is None), None)
    if experts is None:
        return branches
    beside = next((one for one in branches if isinstance(one.op, FeedForward)), None)
    if beside is None or replace(beside, op=experts.op) != experts:
        return branches
    assert isinstance(experts.op, Experts)
    assert isinstance(beside.op, FeedForward)
    both = replace(experts, op=replace(experts.op, shared=beside.op))
    return tuple(both if one is experts else one for one in branches if one is not beside)


def _product(endings: Sequence[Sequence[Ending]]) -> Iterator[tuple[Ending, ...]]:
    if not endings:
        yield ()
        return
    for first in endings[0]:
        for others in _product(endings[1:]):
            yield (first, *others)


def _endings(log: LayerLog, norms: Sequence[NormCall], one: Operation) -> Iterator[Ending]:
    """An operation's output as it is, after a norm, or multiplied by a parameter, in this order. The product with a
    parameter of the layer itself need not be seen: the residual sum is."""
    after = [(None, one.output), *((n.norm, n.output) for n in norms if same(n.input, one.output))]
    for post, vector in after:
        yield Ending(post, None, vector)
        for path, parameter in log.layer.named_parameters():
            if parameter.shape == vector.shape[-1:]:
                scaled = vector * parameter.detach()
                outputs = (call.output for call in log.calls if rows(call.output).shape == vector.shape)
                if "." not in path or any(same(scaled, one) for one in outputs):
                    yield Ending(post, path, scaled)
                own = isinstance(one.op, Attention) and path.startswith(f"{one.op.module}.") and path.count(".") == 1
                if own and post is None:
                    yield Ending(None, None, vector + parameter.detach(), path)


def _fit_scales(kept: Tensor, vectors: Sequence[Tensor], seen: Sequence[Tensor]) -> tuple[Tensor, list[float]] | None:
    """A tensor that was seen, and the factors with which the stream and the vectors add up to it."""
    matrix = torch.stack([one.flatten() for one in (kept, *vectors)], 1)
    for one in seen:
        if same(one, kept):
            continue
        factors = torch.linalg.lstsq(matrix, one.flatten()[:, None]).solution[:, 0]
        fitted = (matrix @ factors).view_as(one)
        if same(fitted, one) and bool((factors[1:].abs() > 1e-3).all()):
            exact = bool((fitted - one).abs().max() <= 1e-11 * one.abs().max())  # nothing was computed in float32
            digits = 10 if exact else 6
            return one, [0.0 if abs(f) < 1e-9 else float(f"{f:.{digits}g}") for f in factors.tolist()]
    return None


def _after(norms: Sequence[NormCall], total: Tensor) -> Iterator[tuple[Norm | None, Tensor]]:
    """The state after a block: its sum, or a norm of it."""
    yield None, total
    for norm in norms:
        if same(norm.input, total):
            yield norm.norm, norm.output
