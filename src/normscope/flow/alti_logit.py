"""ALTI-Logit (Ferrando et al. 2023): what each layer's attention adds to a logit, followed down to the input by ALTI.

In a pre-LN model the last state is the first plus what every block adds. With the final norm frozen, a logit is a
direction g in it, and the attention of layer l adds ``a^l_j = sum_i <g_i, sum_h alpha^h_ij f^h_j>`` by way of its input
token j, which ALTI's rollout R of the layers before traces to the input: ``score_k = sum_l sum_j a^l_j R^(l-1)_jk``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normscope.flow.alti import layer_maps
from normscope.flow.attending import Attending, attending
from normscope.flow.freeze import FrozenModel
from normscope.flow.propagation import Backwards, adjoint_block, back
from normscope.flow.result import Scores
from normscope.flow.rollout import rollout
from normscope.flow.targets import Aim, scored


def scores(model: FrozenModel, aim: Aim, attention_only: bool = False) -> Scores:
    """The target by input token. The first state and what feed-forward blocks add stay with the token they stand at;
    `attention_only` leaves them to the remainder, as the paper's own scores do."""
    assert model.logits is not None
    (stack,) = model.stacks
    at = Backwards(aim.direction(model.logits))
    back(model.head, at)
    adjoint_block(stack.end, at)
    g, real = at.direction, stack.real
    rolled = [torch.eye(int(real.sum()), dtype=g.dtype, device=g.device), *rollout(layer_maps(stack))]
    found = torch.zeros_like(g[real, 0])
    stays = (g * stack.states[0]).sum(-1)
    remainder = at.constants
    for layer, (block,) in enumerate(attending(stack)):
        by_token = _by_token(block, g)
        found += by_token[real] @ rolled[layer]
        attended = block.y - block.x
        stays += (g * (stack.states[layer + 1] - stack.states[layer] - attended)).sum(-1)
        remainder += float((g * attended).sum() - by_token.sum())  # b_O is no token's
    if attention_only:
        remainder += float(stays.sum())
    else:
        found += stays[real]
    return scored(aim, model.logits, found, remainder)


def _by_token(block: Attending, g: Tensor) -> Tensor:
    """(j,): what the attention of a block adds along g, by the token of its input."""
    for one in reversed(block.behind):
        g, _ = one.adjoint(g)
    return torch.einsum("hij,id,jhd->j", block.attention.weights, g, block.vectors)
