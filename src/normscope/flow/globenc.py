"""GlobEnc (Modarressi et al. 2022): norms of whole encoder layers, the feed-forward left out, and their rollout.

``e_ij = gamma_2 * (z_ij - mean z_ij) / s2_i``: z_ij is the contribution behind the first norm (EMNLP 2021), s2_i the
real statistic of the second, so that the feed-forward counts by its scale alone; the second residual connection is kept
and all biases are dropped. The norms are rolled out as they are. For post-LN layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normscope.flow.attending import attending
from normscope.flow.freeze import FrozenStack
from normscope.measures.first_token import normalise_rows
from normscope.measures.mixing import mixing_ratio

SCOPES = {  # the variants that are rollouts of one scope's map
    "w": "ATTN-W",
    "w_fixedres": "ATTNRES-W",
    "n": "ATTN-N",
    "n_res": "ATTNRES-N",
    "n_resln": "ATTNRESLN-N",
}


def encoder_norms(stack: FrozenStack) -> tuple[Tensor, Tensor]:
    """N_ENC, (layers, n, n) ``||e_ij||``, and the mixing ratios of e, (layers, n)."""
    maps, ratios = [], []
    for (block,), layer in zip(attending(stack), stack.layers, strict=True):
        norm = layer.blocks[-1].after
        assert norm is not None
        cells, others, own = [], [], []
        for rows, z in block.brought():
            e = norm.at(rows).forward(z, None)
            diagonal = e.diagonal(rows.start).t()
            cells.append(e.norm(dim=-1))
            own.append(diagonal.norm(dim=-1))
            others.append((e.sum(1) - diagonal).norm(dim=-1))
        maps.append(torch.cat(cells))
        ratios.append(mixing_ratio(torch.cat(others), torch.cat(own)))
    return torch.stack(maps), torch.stack(ratios)


def weighted_residual(weights: Tensor, ratios: Tensor) -> Tensor:
    """W_RES: the attention weights to other tokens scaled to the mixing ratio r_i of N_ENC, 1 - r_i on the diagonal."""
    others = weights.clone()
    others.diagonal(dim1=-2, dim2=-1).zero_()
    return ratios[..., None] * normalise_rows(others) + torch.diag_embed(1 - ratios)
