"""Value Zeroing (Mohebbi et al. 2023): how far a layer's output turns if one token's value vector is set to zero.

Every layer is run again on its own input, once for each token j, with ``v_j = 0`` in all heads and the original
attention weights; ``z_ij = 1 - cos(y_i, y_i without v_j)``, with rows normalized to sum to one. This covers the whole
layer: the feed-forward, and the norms with new statistics. The maps are rolled out without a residual connection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normscope.flow.interface import FlowMaps, MethodRun
from normscope.flow.maps import FrozenAttention, FrozenLayer, FrozenModel
from normscope.flow.rollout import roll_out_sides
from normscope.inputs.encode import forward_inputs
from normscope.inputs.item import Item
from normscope.measures.first_token import normalise_rows
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_blocks, layer_modules, packing_at, value_columns
from normscope.models.spec import Attention
from normscope.tracing.call_values import value_shift_and_scale
from normscope.tracing.hooks import only_in_this_thread
from normscope.tracing.model_state import model_lock

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
    real = item.sides[stack.side].real.nonzero().flatten().tolist()
    found = []
    sizes = [_value_zeroing_head_sizes(layer) for layer in model.stacks[0].layers]
    with model_lock(loaded.base), torch.no_grad():
        for (layer, args, kwargs, y), size in zip(_record_value_zeroing_runs(loaded, item), sizes, strict=True):
            changed = [_run_with_value_zeroing(j, layer, parts[layer], size, args, kwargs) for j in real]
            found.append([_value_zeroing_cosine_distance(y, one)[real] for one in changed])
    return normalise_rows(torch.stack([torch.stack(columns, dim=-1) for columns in found]).to(loaded.dtype).cpu())


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
    j: int, layer: nn.Module, part: Attention, sizes: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any]
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


def _value_zeroing_head_sizes(layer: FrozenLayer) -> tuple[int, int]:
    """The number of value heads of a layer, and their width."""
    found = (
        one for block in layer.blocks for chain in block.branches for one in chain if isinstance(one, FrozenAttention)
    )
    attention = next(found)
    return attention.shared, attention.value.shape[2]


def _value_zeroing_layer_output(made: Any) -> Tensor:
    return made[0] if isinstance(made, tuple | list) else made  # type: ignore[no-any-return]


def _value_zeroing_cosine_distance(y: Tensor, other: Tensor) -> Tensor:
    """(n,): 1 - cos, clamped at zero against rounding."""
    return (1 - torch.cosine_similarity(y[0].double(), other[0].double(), dim=-1)).clamp_min(0)
