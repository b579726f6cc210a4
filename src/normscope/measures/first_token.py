"""The attention sink: how much the first token contributes to each output, by weight or by norm.

Causal models put much attention on their first token, regardless of which it is, and shrink its value vectors: its
share is large by weight (ATTN-W) but often small by norm (an -N scope). EMNLP 2020 found the same for BERT's special
tokens. The weights of recurrences (MIX-W) may be negative: their shares are those of their sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_token_share(maps: Tensor) -> Tensor:
    """(..., rows): ``s_i = |m_i0| / sum_j |m_ij|``, column 0 of the row-normalised map m (..., rows, columns).

    The first output of a causal model has s_0 = 1. A row of zeros has share 0.
    """
    return normalise_rows(maps)[..., 0].abs()


def without_first(maps: Tensor, renormalise: bool = False) -> Tensor:
    """(..., rows, columns - 1): the map without column 0; with `renormalise` the sizes in its rows sum to 1 again.

    The first row of a causal model becomes zero in either case.
    """
    rest = maps[..., 1:]
    return normalise_rows(rest) if renormalise else rest


def normalise_rows(maps: Tensor) -> Tensor:
    """The map with rows whose sizes sum to 1; rows of zeros stay zero."""
    return maps / maps.abs().sum(-1, keepdim=True).clamp_min(torch.finfo(maps.dtype).tiny)
