"""Gradients as baselines: gradient x input, and integrated gradients along the straight path from zero.

The input is that of the first layer, on both sides of an encoder-decoder, as for the other methods.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from normscope.engine.request import default_budget
from normscope.flow.interface import MethodRun
from normscope.flow.logit_rows import computes_chosen_logit_rows
from normscope.flow.maps import FrozenModel
from normscope.flow.output_head import change_inputs_before_output_head, find_output_head_logits
from normscope.flow.result import Scores
from normscope.flow.targets import Target, build_target_scores
from normscope.inputs.encode import forward_inputs
from normscope.models.modules import is_modified
from normscope.tracing.model_state import model_lock

PASS_TOKENS = 512  # in several steps that run as one batch; larger batches are not faster
SAME_LOGITS = 1e-3  # rounding in a batch, relative to the largest logit; a step of another item changes more
# What a pass keeps for its gradients, at most: vectors of the model's width for each token and layer, and numbers for
# each attention weight and logit.
VECTORS_KEPT = 64
NUMBERS_KEPT = 4


def gradient_x_input(run: MethodRun, target: Target) -> Scores:
    """``<d target / d x_k, x_k>``"""
    _, gradients = _gradients_of_target(run, target, torch.ones(1))
    return build_target_scores(
        target, run.model, _gradients_times_input({side: one[0] for side, one in gradients.items()}, run.model)
    )


def integrated_gradients(run: MethodRun, target: Target) -> Scores:
    """``<integral_0^1 d target / d x_k (t x) dt, x_k>`` (Sundararajan et al. 2017), with the option as the number of
    steps. The remainder is the target at the baseline; the completeness tells whether the steps are enough.

    With a norm, the integrand changes most at small t: a Gauss-Legendre rule over s, with ``t = s^4``, puts more nodes
    there.
    """
    nodes, weights = (torch.from_numpy(one) for one in np.polynomial.legendre.leggauss(int(run.option)))
    s = (1 + nodes) / 2
    baseline, together = _target_at_baseline(run, target)
    size = min(len(s), _steps_in_pass(run)) if together else 1
    total: dict[str, Tensor] = {}
    for steps in (slice(start, start + size) for start in range(0, len(s), size)):
        _, gradients = _gradients_of_target(run, target, s[steps] ** 4)
        scale = 2 * s[steps] ** 3 * weights[steps]
        for side, one in gradients.items():
            total[side] = total.get(side, 0) + torch.einsum("k,knd->nd", scale.to(one), one)
    return build_target_scores(target, run.model, _gradients_times_input(total, run.model), baseline)


def _gradients_times_input(gradients: dict[str, Tensor], model: FrozenModel) -> Tensor:
    order = (model.stacks[-1], *model.stacks[:-1])
    return torch.cat([(gradients[stack.side] * stack.states[0]).sum(-1)[stack.real] for stack in order])


def _steps_in_pass(run: MethodRun) -> int:
    """The number of steps that run as one batch: PASS_TOKENS tokens, fewer if the memory budget holds fewer."""
    states, logits = [stack.states[0] for stack in run.model.stacks], run.model.logits
    assert logits is not None
    tokens = max(len(x) for x in states)
    layer = VECTORS_KEPT * max(x.shape[1] for x in states) + NUMBERS_KEPT * max(run.loaded.head_counts) * tokens
    memory = tokens * (layer * sum(run.loaded.depths) + NUMBERS_KEPT * logits.shape[1]) * logits.element_size()
    budget = run.workspace.budget or default_budget(run.loaded.base.device)
    return max(1, min(PASS_TOKENS // tokens, budget // memory))


def _target_at_baseline(run: MethodRun, target: Target) -> tuple[float, bool]:
    """The target with the input at zero, and whether several steps may run as one batch.

    The zero and the input itself run as one batch, which must give the model's own logits for the second. A classifier
    without a padding token refuses batches, and what others have hooked or written may mix the items of one.
    """
    assert run.model.logits is not None
    with torch.no_grad():
        if not is_modified(run.loaded.model):
            try:
                values, logits, _ = _run_with_scaled_input(run, target, torch.tensor([0.0, 1.0]))
                own = run.model.logits[target.rows.unique()]
                if float((logits[1] - own).abs().max()) <= SAME_LOGITS * float(own.abs().max()):
                    return float(values[0]), True
            except (ValueError, RuntimeError, IndexError):  # it is the batch, or the same error comes again below
                pass
        values, _, _ = _run_with_scaled_input(run, target, torch.zeros(1))
    return float(values[0]), False


def _gradients_of_target(run: MethodRun, target: Target, factors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(k,) the target with the inputs of the first layers multiplied by each of k factors, and side -> (k, n, d) its
    gradients there."""
    with torch.enable_grad():
        values, _, leaves = _run_with_scaled_input(run, target, factors)
        gradients = torch.autograd.grad(values.sum(), list(leaves.values()))
    found = (one.to(run.loaded.dtype) for one in gradients)
    return values.detach(), dict(zip(leaves, found, strict=True))


def _run_with_scaled_input(
    run: MethodRun, target: Target, factors: Tensor, choose_rows: bool = True
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A pass over a batch of k copies of the item, with the inputs of the first layers multiplied by k factors: (k,)
    the target, (k, rows, classes) the logits that it reads, and these inputs (k, n, d) by side."""
    loaded, item, own = run.loaded, run.item, run.model.logits
    assert own is not None
    rows = target.rows.unique()
    choose_rows &= len(rows) < len(own) and computes_chosen_logit_rows(loaded, item)
    leaves: dict[str, Tensor] = {}

    def scale(side: str, x: Tensor) -> Tensor:
        leaves[side] = (factors.to(x)[:, None, None] * x).detach().requires_grad_()
        return leaves[side]

    with model_lock(loaded.base), change_inputs_before_output_head(loaded, scale):
        kept = {"logits_to_keep": rows} if choose_rows else {}
        made = find_output_head_logits(loaded.model(**forward_inputs(loaded, [item] * len(factors)), **kept))
    assert made is not None
    if choose_rows and made.shape[:2] != (len(factors), len(rows)):  # the model reads `logits_to_keep` in another way
        return _run_with_scaled_input(run, target, factors, choose_rows=False)
    logits = made if choose_rows else made.reshape(len(factors), *own.shape)[:, rows]
    return (target.direction(own)[rows] * logits).sum((1, 2)), logits, leaves
