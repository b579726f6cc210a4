"""Describe an attention: where its values come from, and which projection reads what it mixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normscope.derivation.attention_ends import find_ending, find_values
from normscope.derivation.match import ColumnMatch, is_linear, norm_of_call, rows, same
from normscope.derivation.watch import Call, LayerLog, Product
from normscope.errors import NormscopeError
from normscope.models.modules import MATMUL
from normscope.models.spec import Attention, Experts, FeedForward, Norm


class UnexplainedError(NormscopeError):
    """A tensor of the layer that no description explains."""


@dataclass(frozen=True)
class Operation:
    """An operation found in a layer: what it reads and what it returns."""

    op: Attention | FeedForward | Experts
    reads: Tensor  # (tokens, d), after the norm before it
    output: Tensor  # (tokens, d)
    order: int  # when it ended
    calls: frozenset[str]  # paths of the modules that it explains


def find_attention(log: LayerLog, product: Product, interface: frozenset[str]) -> Operation:
    """The attention whose mixing of tokens was seen. `interface` are the modules that call transformers' interface."""
    weights, values, mixed = product.weights, product.values, product.mixed
    ending = find_ending(log, product.path, mixed)
    if ending is None:
        raise UnexplainedError("no linear module reads the mixed values of its attention")
    source = find_values(log, product.path, _distinct_heads(values))
    if source is None:
        raise UnexplainedError(f"the values of {product.path or 'the layer'} are not the output of a linear module")
    module = _attention_module(product.path, interface)
    out, made = ending.out, source.match.call
    cross = log.encoder is not None and same(made.input, log.encoder)
    first = _latent_projection(log, made)
    op = Attention(
        module,
        made.path,
        out.path,
        packing=_packing(source.match, values.shape[2], rows(made.output).shape[1]),
        probabilities=None if module in interface else _probabilities(log, product),
        cross=cross,
        sinks=ending.sinks is not None or bool((weights.sum(-1) < 1 - 1e-4).any()),
        latent=None if first is None else first[0].path,
        latent_norm=None if first is None else first[1],
        value_shift=source.shift,
        value_scale=source.scale,
        value_norm=source.norm,
        gate=ending.gate,
        inner_norm=ending.norm,
        sink_scores=ending.sinks,
    )
    entry = made if first is None else first[0]
    gates = set() if ending.gate is None else {ending.gate.path}
    used = frozenset({made.path, out.path} | gates)
    return Operation(op, rows(entry.input), rows(out.output), out.order, used)


def _probabilities(log: LayerLog, product: Product) -> str:
    """The dropout module that the probabilities pass through, or "matmul" for the product itself."""
    for call in log.calls:
        if isinstance(call.module, nn.Dropout) and call.input.dim() == 4:
            given = call.input.flatten(0, 1)
            if given.shape == product.weights.shape and same(given, product.weights):
                return call.path
    return MATMUL


def _latent_projection(log: LayerLog, value: Call) -> tuple[Call, Norm] | None:
    """The projection and the norm before the value projection, if it reads a norm of the projection's first outputs."""
    for call in log.calls:
        if is_linear(call) or not same(call.output, value.input):
            continue
        norm = norm_of_call(call)
        width = call.input.shape[-1]
        for first in log.calls if norm is not None else ():
            if is_linear(first) and same(rows(first.output)[:, :width], rows(call.input)):
                return first, norm  # type: ignore[return-value]
    return None


def _attention_module(path: str, interface: frozenset[str]) -> str:
    """The module that mixes tokens: the nearest one above that calls the interface, else the innermost one."""
    parts = path.split(".")
    above = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((one for one in above if one in interface), path)


def _distinct_heads(values: Tensor) -> Tensor:
    """Values without repeated heads: grouped queries share one."""
    kept = [0, *(n for n in range(1, len(values)) if not same(values[n], values[n - 1]))]
    return values[kept]


def _packing(source: ColumnMatch, width: int, size: int) -> Any:
    """How the values lie in the projection's output: one of the usual ways, or the first column of every head."""
    starts, count = source.starts, len(source.starts)
    usual = {
        "alone": (tuple(range(0, size, width)), size == count * width),
        "tail": (tuple(range(size - count * width, size, width)), size > count * width),
        "interleaved": (tuple(range(size // count - width, size, size // count)), size % count == 0),
    }
    return next((name for name, (places, fits) in usual.items() if fits and starts == places), starts)
