"""Value Zeroing (Mohebbi et al. 2023): how far a layer's output turns when one token's value vector is taken away.

Every layer is run again on its own input, once for each token j, with ``v_j = 0`` in all heads and attention weights as
they were; ``z_ij = 1 - cos(y_i, y_i without v_j)``, rows scaled to one. The whole layer counts, its feed-forward, and
its norms with new statistics. The maps are rolled out without a residual connection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normscope.flow.freeze import FrozenModel
from normscope.flow.frozen import FrozenAttention
from normscope.inputs.item import Item, forward_inputs
from normscope.measures.first_token import normalise_rows
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_modules, value_rows
from normscope.models.spec import Attention
from normscope.tracing.attention_interface import lock_of
from normscope.tracing.hooks import mine

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Tensor]  # a layer, what it was called with and put out


def layer_maps(loaded: LoadedModel, item: Item, model: FrozenModel) -> Tensor:
    """(layers, n, n), masked tokens left out. The frozen model says how many heads the values have."""
    (stack,) = loaded.stacks
    (part,) = (b.op for block in stack.blocks for b in block.branches if isinstance(b.op, Attention))
    real = item.sides[stack.side].real.nonzero().flatten().tolist()
    found = []
    sizes = _sizes(model)
    with lock_of(loaded.base), torch.no_grad():
        for layer, args, kwargs, y in _calls(loaded, item):
            found.append([_turned(y, _without(j, layer, part, sizes, args, kwargs))[real] for j in real])
    return normalise_rows(torch.stack([torch.stack(columns, dim=-1) for columns in found]).to(loaded.dtype).cpu())


def _calls(loaded: LoadedModel, item: Item) -> list[Call]:
    """Every layer call of a forward pass; a shared layer stands there several times."""
    calls: list[Call] = []
    handles = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        calls.append((module, args, kwargs, _output(made)))

    try:
        for layer in layer_modules(loaded.base, loaded.stacks[0]):
            handles.append(layer.register_forward_hook(mine(hook), with_kwargs=True))
        loaded.base(**forward_inputs(loaded, [item]))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _without(
    j: int, layer: nn.Module, part: Attention, sizes: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The layer's output with the values of token j, their bias included, set to zero."""

    def hook(module: nn.Module, given: Any, made: Tensor) -> Tensor:
        changed = made.clone()
        value_rows(changed, part.packing, *sizes)[:, j] = 0
        return changed

    handle = layer.get_submodule(part.value).register_forward_hook(mine(hook))
    try:
        return _output(layer(*args, **kwargs))
    finally:
        handle.remove()


def _sizes(model: FrozenModel) -> tuple[int, int]:
    """How many heads the values have, and how wide they are."""
    blocks = model.stacks[0].layers[0].blocks
    found = (one for block in blocks for chain in block.branches for one in chain if isinstance(one, FrozenAttention))
    attention = next(found)
    return attention.shared, attention.value.shape[2]


def _output(made: Any) -> Tensor:
    return made[0] if isinstance(made, tuple) else made  # type: ignore[no-any-return]


def _turned(y: Tensor, other: Tensor) -> Tensor:
    """(n,): 1 - cos, which rounding does not leave below zero."""
    return (1 - torch.cosine_similarity(y[0].double(), other[0].double(), dim=-1)).clamp_min(0)
