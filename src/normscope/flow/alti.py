"""ALTI and ALTI+ (Ferrando et al. 2022a, 2022b): how close each token's vector is to the output of attention.

``c_ij = max(0, ||y_i||_1 - ||y_i - T_ij||_1)``, with rows normalized to sum to one, and rolled out. T_ij is the
contribution after the residual connection (pre-LN) or the norm (post-LN), y_i the model's own vector there; the
feed-forward is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normscope.flow.attention_blocks import AttentionBlock, attention_block_output, attention_blocks
from normscope.flow.interface import FlowMaps, MethodRun
from normscope.flow.maps import FrozenStack
from normscope.flow.rollout import rollout
from normscope.measures.first_token import normalise_rows


def run_alti(run: MethodRun) -> FlowMaps:
    """ALTI, or ALTI+ for an encoder-decoder."""
    *encoders, stack = run.model.stacks
    if not encoders:
        return rollout(alti_layer_maps(stack)), None
    (encoder,) = encoders
    return rollout(alti_decoder_maps(stack, encoder), rollout(alti_layer_maps(encoder))[-1]), None


def alti_layer_maps(stack: FrozenStack) -> Tensor:
    """(layers, n, n) of a side that attends to itself only; masked tokens are left out."""
    found = [_alti_block_closeness(block) for (block,) in attention_blocks(stack)]
    return torch.stack([normalise_rows(one[stack.real][:, stack.real]) for one in found])


def alti_decoder_maps(stack: FrozenStack, encoder: FrozenStack) -> Tensor:
    """(layers, n, n + m) of a decoder: ``[r_i c_ij, x_ij]``, its own columns first.

    In cross-attention the residual connection is one more column, r_i beside the x_ij of the encoder's tokens, and it
    carries the output of self-attention: ALTI+ (eq. 9-11). The authors' code divides by the unbiased standard
    deviation; here, as in the model, it is the population's.
    """
    found = []
    states = attention_block_output(encoder.end, encoder.states[-1], None)
    for own, cross in attention_blocks(stack, states):
        residual = _alti_l1_closeness(cross.y, cross.residual())[:, None]
        both = torch.cat([residual, _alti_block_closeness(cross)[:, encoder.real]], dim=1)[stack.real]
        r, x = normalise_rows(both).tensor_split([1], dim=1)
        found.append(torch.cat([r * normalise_rows(_alti_block_closeness(own)[stack.real][:, stack.real]), x], dim=1))
    return torch.stack(found)


def _alti_block_closeness(block: AttentionBlock) -> Tensor:
    """(n, columns) c_ij"""
    return torch.cat([_alti_l1_closeness(block.y[rows, None], T) for rows, T in block.contributions()])


def _alti_l1_closeness(y: Tensor, T: Tensor) -> Tensor:
    return (y.abs().sum(-1) - (y - T).abs().sum(-1)).clamp_min(0)
