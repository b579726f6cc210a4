"""Gradients as baselines: gradient x input, and integrated gradients along the straight path from zero.

The input is what enters the first layer, of both sides of an encoder-decoder, as for the other methods.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope.flow.freeze import FrozenModel
from normscope.flow.passes import logits_of
from normscope.flow.result import Scores
from normscope.flow.targets import Aim, scored
from normscope.inputs.encode import forward_inputs
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_modules
from normscope.tracing.hooks import mine
from normscope.tracing.trace import model_lock


def gradient_x_input(loaded: LoadedModel, item: Item, model: FrozenModel, aim: Aim) -> Scores:
    """``<d target / d x_k, x_k>``"""
    assert model.logits is not None
    _, found = _slopes(loaded, item, aim, model.logits.shape, 1.0)
    return scored(aim, model.logits, _along(found, model))


def integrated_gradients(loaded: LoadedModel, item: Item, model: FrozenModel, aim: Aim, steps: int) -> Scores:
    """``<integral_0^1 d target / d x_k (t x) dt, x_k>`` (Sundararajan et al. 2017). The remainder is the target at the
    baseline, and the completeness tells whether the steps were enough.

    Before a norm most happens where t is small: a Gauss-Legendre rule over s, ``t = s^4``, looks there more closely.
    """
    assert model.logits is not None
    total: dict[str, Tensor] = {}
    for node, weight in zip(*np.polynomial.legendre.leggauss(steps), strict=True):
        s = (1 + float(node)) / 2
        _, found = _slopes(loaded, item, aim, model.logits.shape, s**4)
        total = {side: total.get(side, 0) + 2 * s**3 * float(weight) * one for side, one in found.items()}
    baseline, _ = _slopes(loaded, item, aim, model.logits.shape, 0.0)
    return scored(aim, model.logits, _along(total, model), baseline)


def _along(slopes: dict[str, Tensor], model: FrozenModel) -> Tensor:
    order = (model.stacks[-1], *model.stacks[:-1])
    return torch.cat([(slopes[stack.side] * stack.states[0]).sum(-1)[stack.real] for stack in order])


def _slopes(
    loaded: LoadedModel, item: Item, aim: Aim, shape: torch.Size, factor: float
) -> tuple[float, dict[str, Tensor]]:
    """The target in logits of this shape, and side -> (n, d) its gradient, where what enters the first layers is
    multiplied by a factor."""
    leaves: dict[str, Tensor] = {}
    handles = []

    def enter(side: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if side in leaves:  # a layer that is called again
                return None
            x = args[0] if args else kwargs["hidden_states"]
            leaves[side] = (factor * x).detach().requires_grad_()
            return ((leaves[side], *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": leaves[side]})

        return hook

    try:
        with model_lock(loaded.base), torch.enable_grad():
            for stack in loaded.stacks:
                first = layer_modules(loaded.base, stack)[0]
                handles.append(first.register_forward_pre_hook(mine(enter(stack.side)), with_kwargs=True))
            made = logits_of(loaded.model(**forward_inputs(loaded, [item])))
            assert made is not None
            logits = made.reshape(shape)
            target = (aim.direction(logits) * logits).sum()
            found = torch.autograd.grad(target, list(leaves.values()))
    finally:
        for handle in handles:
            handle.remove()
    return float(target.detach()), {side: one[0].to(loaded.dtype) for side, one in zip(leaves, found, strict=True)}
