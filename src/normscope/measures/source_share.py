"""How much of a translation comes from its source, against the target text so far (as in Voita et al. 2021).

Each row of a decoder's map has columns for the source's tokens and for the target tokens that were written before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normscope.measures.first_token import normalise_rows


def source_share(scores: Tensor, source: Sequence[bool]) -> Tensor:
    """(..., rows): ``sum_{j in source} |s_ij| / sum_j |s_ij|`` of norms or signed scores (..., rows, columns).

    `source` is True for the columns of the source. A row of zeros has share 0.
    """
    return normalise_rows(scores.abs())[..., torch.tensor(source, device=scores.device)].sum(-1)
