"""ALTI-Logit (Ferrando et al. 2023): what the attention of each layer adds to a logit, traced to the input by ALTI.

In a pre-LN model the last state is the first plus the outputs of all blocks. With the final norm frozen, a logit is a
direction g in it, and the attention of layer l adds ``a^l_j = sum_i <g_i, sum_h alpha^h_ij f^h_j>`` through its input
token j, which ALTI's rollout R of the layers before traces to the input: ``score_k = sum_l sum_j a^l_j R^(l-1)_jk``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normscope.flow.alti import alti_layer_maps
from normscope.flow.attention_blocks import AttentionBlock, attention_blocks
from normscope.flow.interface import MethodRun
from normscope.flow.result import Scores
from normscope.flow.rollout import rollout
from normscope.flow.targets import Target, build_target_scores, start_at_target


def run_alti_logit(run: MethodRun, target: Target) -> Scores:
    """The target by input token. The first state and the outputs of feed-forward blocks count for the token at their
    position; with the option "attention" they go to the remainder, as in the paper's own scores."""
    model = run.model
    (stack,) = model.stacks
    state = start_at_target(model, target, 0, 1)
    g, real = state.direction[0], stack.real
    rolled_out = [torch.eye(int(real.sum()), dtype=g.dtype, device=g.device), *rollout(alti_layer_maps(stack))]
    found = torch.zeros_like(g[real, 0])
    in_place = (g * stack.states[0]).sum(-1)
    remainder = float(state.constants)
    for layer, (block,) in enumerate(attention_blocks(stack)):
        by_token = _alti_logit_by_attended_token(block, g)
        found += by_token[real] @ rolled_out[layer]
        attended = block.y - block.x
        in_place += (g * (stack.states[layer + 1] - stack.states[layer] - attended)).sum(-1)
        remainder += float((g * attended).sum() - by_token.sum())  # b_O belongs to no token
    if run.option == "attention":
        remainder += float(in_place.sum())
    else:
        found += in_place[real]
    return build_target_scores(target, model, found, remainder)


def _alti_logit_by_attended_token(block: AttentionBlock, g: Tensor) -> Tensor:
    """(j,): what the attention of a block adds along g, by its input token."""
    for one in reversed(block.branch_tail):
        g, _ = one.adjoint(g)
    return block.along(g)
