"""The attention sink: how much of each output is the first token, by weight or by norm.

Causal models put much attention on their first token whatever it is, and shrink its value vectors: by weight (ATTN-W)
its share is large, by norm (an -N scope) often small (EMNLP 2020 found the same of BERT's special tokens).
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_token_share(maps: Tensor) -> Tensor:
    """(..., rows): ``s_i = m_i0 / sum_j m_ij``, column 0 of the row-normalised map m (..., rows, columns).

    The first output of a causal model has s_0 = 1. A row without any contribution has none of the first token: 0.
    """
    return normalised(maps)[..., 0]


def without_first(maps: Tensor, renormalise: bool = False) -> Tensor:
    """(..., rows, columns - 1): the map without column 0; with `renormalise` its rows sum to 1 again.

    The first row of a causal model has nothing else: it is zero in either case.
    """
    rest = maps[..., 1:]
    return normalised(rest) if renormalise else rest


def normalised(maps: Tensor) -> Tensor:
    """The map with rows that sum to 1; rows of zeros stay zero."""
    return maps / maps.sum(-1, keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
