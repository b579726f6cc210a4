"""GlobEnc (Modarressi et al. 2022): norms of whole encoder layers without the feed-forward, and their rollout.

``e_ij = gamma_2 * (z_ij - mean z_ij) / s2_i``: z_ij is the contribution after the first norm (EMNLP 2021), s2_i the
actual statistic of the second, so the feed-forward counts only through its scale; the second residual connection is
kept and all biases are dropped. The norms are rolled out without normalization. For post-LN layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normscope.decompose.gram import mixing_ratio
from normscope.flow.attention_blocks import attention_blocks
from normscope.flow.interface import FlowMaps, MethodRun
from normscope.flow.maps import FrozenStack
from normscope.flow.rollout import roll_out_sides, rollout_half_residual, scope_maps_for_rollout
from normscope.measures.first_token import normalise_rows

SCOPES = {  # the variants that are rollouts of one scope's map
    "w": "ATTN-W",
    "w_fixedres": "ATTNRES-W",
    "n": "ATTN-N",
    "n_res": "ATTNRES-N",
    "n_resln": "ATTNRESLN-N",
}


def run_globenc(run: MethodRun) -> FlowMaps:
    """The rollout of N_ENC, or of the variant that the option names."""
    if run.option in SCOPES:
        return roll_out_sides(scope_maps_for_rollout(run, SCOPES[run.option]))
    if run.option == "n_fixedres":
        return roll_out_sides(
            [rollout_half_residual(normalise_rows(one)) for one in scope_maps_for_rollout(run, "ATTN-N")]
        )
    (stack,) = run.model.stacks
    norms, ratios = globenc_encoder_norms(stack)
    if run.option == "w_res":
        return roll_out_sides(
            [globenc_weighted_residual(scope_maps_for_rollout(run, "ATTN-W")[0], ratios[:, stack.real].cpu())]
        )
    return roll_out_sides([norms[:, stack.real][:, :, stack.real]])


def globenc_encoder_norms(stack: FrozenStack) -> tuple[Tensor, Tensor]:
    """N_ENC, (layers, n, n) ``||e_ij||``, and the mixing ratios of e, (layers, n)."""
    maps, ratios = [], []
    for (block,), layer in zip(attention_blocks(stack), stack.layers, strict=True):
        norm = layer.blocks[-1].after
        assert norm is not None
        cells, others, own = [], [], []
        for rows, z in block.contributions():
            e = norm.for_rows(rows).forward(z, None)
            diagonal = e.diagonal(rows.start).t()
            cells.append(e.norm(dim=-1))
            own.append(diagonal.norm(dim=-1))
            others.append((e.sum(1) - diagonal).norm(dim=-1))
        maps.append(torch.cat(cells))
        ratios.append(mixing_ratio(torch.cat(others), torch.cat(own)))
    return torch.stack(maps), torch.stack(ratios)


def globenc_weighted_residual(weights: Tensor, ratios: Tensor) -> Tensor:
    """W_RES: attention weights to other tokens scaled to the mixing ratio r_i of N_ENC, with 1 - r_i on the
    diagonal."""
    others = weights.clone()
    others.diagonal(dim1=-2, dim2=-1).zero_()
    return ratios[..., None] * normalise_rows(others) + torch.diag_embed(1 - ratios)
