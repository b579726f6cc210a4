"""Gradients as baselines: gradient x input, and integrated gradients along the straight path from zero.

The input is that of the first layer, on both sides of an encoder-decoder, as for the other methods.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from normscope.flow.interface import MethodRun
from normscope.flow.maps import FrozenModel
from normscope.flow.output_head import change_inputs_before_output_head, find_output_head_logits
from normscope.flow.result import Scores
from normscope.flow.targets import Target, build_target_scores
from normscope.inputs.encode import forward_inputs
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.tracing.model_state import model_lock


def gradient_x_input(run: MethodRun, target: Target) -> Scores:
    """``<d target / d x_k, x_k>``"""
    logits = run.model.logits
    assert logits is not None
    _, gradients = _gradients_of_target(run.loaded, run.item, target.direction(logits), 1.0)
    return build_target_scores(target, run.model, _gradients_times_input(gradients, run.model))


def integrated_gradients(run: MethodRun, target: Target) -> Scores:
    """``<integral_0^1 d target / d x_k (t x) dt, x_k>`` (Sundararajan et al. 2017), with the option as the number of
    steps. The remainder is the target at the baseline; the completeness tells whether the steps are enough.

    With a norm, the integrand changes most at small t: a Gauss-Legendre rule over s, with ``t = s^4``, puts more nodes
    there.
    """
    logits = run.model.logits
    assert logits is not None
    direction = target.direction(logits)
    total: dict[str, Tensor] = {}
    for node, weight in zip(*np.polynomial.legendre.leggauss(int(run.option)), strict=True):
        s = (1 + float(node)) / 2
        _, found = _gradients_of_target(run.loaded, run.item, direction, s**4)
        total = {side: total.get(side, 0) + 2 * s**3 * float(weight) * one for side, one in found.items()}
    baseline, _ = _gradients_of_target(run.loaded, run.item, direction, 0.0)
    return build_target_scores(target, run.model, _gradients_times_input(total, run.model), baseline)


def _gradients_times_input(gradients: dict[str, Tensor], model: FrozenModel) -> Tensor:
    order = (model.stacks[-1], *model.stacks[:-1])
    return torch.cat([(gradients[stack.side] * stack.states[0]).sum(-1)[stack.real] for stack in order])


def _gradients_of_target(
    loaded: LoadedModel, item: Item, direction: Tensor, factor: float
) -> tuple[float, dict[str, Tensor]]:
    """The projection of the logits on a direction, and side -> (n, d) its gradient, with the inputs of the first layers
    multiplied by a factor."""
    leaves: dict[str, Tensor] = {}

    def scale(side: str, x: Tensor) -> Tensor:
        leaves[side] = (factor * x).detach().requires_grad_()
        return leaves[side]

    with model_lock(loaded.base), torch.enable_grad(), change_inputs_before_output_head(loaded, scale):
        made = find_output_head_logits(loaded.model(**forward_inputs(loaded, [item])))
        assert made is not None
        value = (direction * made.reshape(direction.shape)).sum()
        found = torch.autograd.grad(value, list(leaves.values()))
    return float(value.detach()), {side: one[0].to(loaded.dtype) for side, one in zip(leaves, found, strict=True)}
