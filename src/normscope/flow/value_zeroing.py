"""Value Zeroing (Mohebbi et al. 2023): how far a layer's output turns if one token's value vector is set to zero.

Every layer is run again on its own input, once for each token j, with ``v_j = 0`` in all heads and the original
attention weights; ``z_ij = 1 - cos(y_i, y_i without v_j)``, with rows normalized to sum to one. This covers the whole
layer: the feed-forward, and the norms with new statistics. The maps are rolled out without a residual connection.

Most layers are not run again for each token: `zeroed_values` computes all z_ij at once. The token with the largest
effect is run to prove it; where that does not agree, and in layers that it does not know, every token is run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.flow.interface import FlowMaps, MethodRun
from normscope.flow.maps import FrozenAttention, FrozenLayer, FrozenModel
from normscope.flow.rollout import roll_out_sides
from normscope.flow.zeroed_values import takes_zeroed_values, zeroed_distance, zeroed_value_distances
from normscope.inputs.encode import forward_inputs
from normscope.inputs.item import Item
from normscope.measures.first_token import normalise_rows
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_blocks, layer_modules, layer_submodule, packing_at, value_columns
from normscope.models.registry import is_built_in
from normscope.models.spec import Attention
from normscope.tracing.call_values import value_shift_and_scale
from normscope.tracing.hooks import only_in_this_thread
from normscope.tracing.model_state import model_lock
from normscope.tracing.products import ProductWatch

SAME_DISTANCE = 1e-3  # of the largest in a column: what rounding may add in float32
LayerRun = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]  # a layer, its arguments and its output


def run_value_zeroing(run: MethodRun) -> FlowMaps:
    """The rollout of `value_zeroing_maps`."""
    return roll_out_sides([value_zeroing_maps(run.loaded, run.item, run.model)])


def value_zeroing_maps(loaded: LoadedModel, item: Item, model: FrozenModel) -> Tensor:
    """(layers, n, n); masked tokens are left out."""
    (stack,) = loaded.stacks
    blocks = {layer: layer_blocks(layer, stack) for layer in layer_modules(loaded.base, stack)}
    parts = {
        layer: next(b.op for block in some for b in block.branches if isinstance(b.op, Attention))
        for layer, some in blocks.items()
    }
    real = item.sides[stack.side].real.nonzero().flatten().to(loaded.base.device)
    found = []
    with model_lock(loaded.base), torch.no_grad():
        runs = _record_value_zeroing_runs(loaded, item)
        frozen = model.stacks[0]
        for run, one, x in zip(runs, frozen.layers, frozen.states, strict=False):
            layer, args, kwargs, y = run
            part, sizes = parts[layer], _value_zeroing_head_sizes(one)
            if part.probabilities is None and is_built_in(loaded.family):
                zeroed_run = partial(_run_with_value_zeroing, layer, part, sizes, args, kwargs)
            else:  # the projection may make keys or queries of the same columns
                zeroed_run = partial(_run_with_zeroed_product, layer, part, len(y[0]), args, kwargs)

            def run_without(j: int) -> Tensor:
                return zeroed_distance(y[0].double(), zeroed_run(j)[0].double())[real]  # noqa: B023

            found.append(_value_zeroing_layer_map(one, x, real, run_without))
    return normalise_rows(torch.stack(found).to(loaded.dtype).cpu())


def _value_zeroing_layer_map(
    layer: FrozenLayer, x: Tensor, real: Tensor, run_without: Callable[[int], Tensor]
) -> Tensor:
    """(n, n) z of one layer that reads x; `run_without` gives one column of it by running the layer."""
    if takes_zeroed_values(layer):
        made = zeroed_value_distances(layer, x, real)[real].double()
        largest = int(made.sum(0).argmax())
        proof = run_without(int(real[largest]))
        if float((made[:, largest] - proof).abs().max()) <= SAME_DISTANCE * float(proof.max()):
            return made
    return torch.stack([run_without(j) for j in real.tolist()], dim=-1)


def _record_value_zeroing_runs(loaded: LoadedModel, item: Item) -> list[LayerRun]:
    """Every layer call of a forward pass; a shared layer occurs several times."""
    runs: list[LayerRun] = []
    handles = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        runs.append((module, args, kwargs, _value_zeroing_layer_output(made)))

    try:
        for layer in layer_modules(loaded.base, loaded.stacks[0]):
            handles.append(layer.register_forward_hook(only_in_this_thread(hook), with_kwargs=True))
        loaded.base(**forward_inputs(loaded, [item]))
    finally:
        for handle in handles:
            handle.remove()
    return runs


def _run_with_value_zeroing(
    layer: nn.Module, part: Attention, sizes: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any], j: int
) -> Tensor:
    """The layer's output with the values of token j, their bias included, set to zero."""

    heads, width = sizes
    packing = packing_at(layer, part, heads, width)
    projected: list[Tensor] = []  # (b, n, heads * d_h)

    def columns(made: Tensor) -> Tensor:
        return value_columns(packing, heads, width, made.shape[-1]).to(made.device)

    def zero(module: nn.Module, given: Any, made: Tensor) -> Tensor:
        added, _ = value_shift_and_scale(layer, part, made.new_empty(heads, 1, width))
        changed = made.clone()
        changed[:, j, columns(made)] = 0 if added is None else -added.flatten()
        return changed

    def keep(module: nn.Module, given: Any, made: Tensor) -> None:
        projected.append(made[..., columns(made)])

    def zero_normed(module: nn.Module, given: Any, made: Tensor) -> Tensor:
        changed, (flat,) = made.clone(memory_format=torch.contiguous_format), projected
        if torch.equal(given[0].reshape(flat.shape), flat):  # heads after tokens
            changed.view(flat.shape)[:, j] = 0
        else:
            changed.view(len(flat), heads, -1, width)[:, :, j] = 0
        return changed

    value = layer.get_submodule(part.value)
    if part.value_norm is None:
        handles = [value.register_forward_hook(only_in_this_thread(zero))]
    else:
        norm = layer.get_submodule(part.value_norm.path)
        hooks = [(value, keep), (norm, zero_normed)]
        handles = [module.register_forward_hook(only_in_this_thread(hook)) for module, hook in hooks]
    try:
        return _value_zeroing_layer_output(layer(*args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()


def _run_with_zeroed_product(
    layer: nn.Module, part: Attention, length: int, args: tuple[Any, ...], kwargs: dict[str, Any], j: int
) -> Tensor:
    """The same, with the values set to zero where they are multiplied with the probabilities."""
    attending: list[bool] = []
    products: list[int] = []

    def zero(weights: Tensor, values: Tensor, mixed: Tensor) -> Tensor:
        products.append(j)
        changed = values.clone()
        changed[:, j] = 0
        return weights @ changed

    module = layer_submodule(layer, part.module)
    handles = [
        module.register_forward_pre_hook(only_in_this_thread(lambda *given: attending.append(True))),
        module.register_forward_hook(only_in_this_thread(lambda *given: attending.clear())),
    ]
    try:
        with ProductWatch(lambda: {length} if attending else set(), zero):
            found = _value_zeroing_layer_output(layer(*args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    if len(products) != 1:
        raise NormscopeError(
            f"Value zeroing is not supported here: {type(module).__name__} multiplies probabilities of {length} tokens "
            f"with values {len(products)} times, not once."
        )
    return found


def _value_zeroing_head_sizes(layer: FrozenLayer) -> tuple[int, int]:
    """The number of value heads of a layer, and their width."""
    found = (
        one for block in layer.blocks for chain in block.branches for one in chain if isinstance(one, FrozenAttention)
    )
    attention = next(found)
    return attention.shared, attention.value.shape[2]


def _value_zeroing_layer_output(made: Any) -> Tensor:
    return made[0] if isinstance(made, tuple | list) else made  # type: ignore[no-any-return]
