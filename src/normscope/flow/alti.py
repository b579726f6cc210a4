"""ALTI and ALTI+ (Ferrando et al. 2022a, 2022b): how near each token's vector is to what attention puts out.

``c_ij = max(0, ||y_i||_1 - ||y_i - T_ij||_1)``, rows scaled to one and rolled out. T_ij is the contribution behind the
residual connection (pre-LN) or the norm (post-LN), y_i the model's own vector there; the feed-forward is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normscope.flow.attending import Attending, attending, real
from normscope.flow.freeze import FrozenStack
from normscope.flow.rollout import rollout
from normscope.measures.first_token import normalise_rows


def layer_maps(stack: FrozenStack) -> Tensor:
    """(layers, n, n) of a side that attends to itself alone; masked tokens are left out."""
    found = [_nearness(block) for (block,) in attending(stack)]
    return torch.stack([normalise_rows(one[stack.real][:, stack.real]) for one in found])


def decoder_maps(stack: FrozenStack, encoder: FrozenStack) -> Tensor:
    """(layers, n, n + m) of a decoder: ``[r_i c_ij, x_ij]``, own columns first.

    In cross-attention the residual connection is one more column, r_i beside the x_ij of the encoder's tokens, and what
    it carries is what self-attention made: ALTI+ (eq. 9-11). Their code divides by the unbiased deviation; here, as in
    the model, it is that of the population.
    """
    found = []
    states = real(encoder.end, encoder.states[-1], None)
    for own, cross in attending(stack, states):
        kept = _closeness(cross.y, cross.kept())[:, None]
        both = torch.cat([kept, _nearness(cross)[:, encoder.real]], dim=1)[stack.real]
        r, x = normalise_rows(both).tensor_split([1], dim=1)
        found.append(torch.cat([r * normalise_rows(_nearness(own)[stack.real][:, stack.real]), x], dim=1))
    return torch.stack(found)


def maps(stack: FrozenStack, encoder: FrozenStack | None = None) -> Tensor:
    """ALTI, or of a decoder that reads an encoder ALTI+: the rollout."""
    if encoder is None:
        return rollout(layer_maps(stack))
    return rollout(decoder_maps(stack, encoder), rollout(layer_maps(encoder))[-1])


def _nearness(block: Attending) -> Tensor:
    """(n, columns) c_ij"""
    return torch.cat([_closeness(block.y[rows, None], T) for rows, T in block.brought()])


def _closeness(y: Tensor, T: Tensor) -> Tensor:
    return (y.abs().sum(-1) - (y - T).abs().sum(-1)).clamp_min(0)
