"""The sink inside a picture: the patch that receives most of what its outputs take from the picture.

Vision-language models put much of their attention on a few patches, often in a corner, whatever the question. By weight
their share is large, by norm often small, as for the first token of a text (`measures.first_token`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.measures.first_token import normalise_rows


@dataclass(frozen=True, eq=False)
class PictureSink:
    """The patch with the largest share of a picture in each layer, over the outputs that read the picture."""

    tokens: tuple[str, ...]  # (layers,): the patch
    shares: Tensor  # (layers, rows): its share of what each output takes from the picture; 0 if it takes nothing
    maps: Tensor  # (layers, rows, patches): shares of the picture without it; rows sum to 1 again


def picture_sinks(maps: Tensor, tokens: Sequence[str]) -> PictureSink:
    """With ``s_ij = m_ij / sum_k m_ik`` over the picture's own columns k of the map m (layers, rows, patches), the sink
    is the patch j with the largest mean of s_ij over the outputs i that take something from the picture."""
    shares = normalise_rows(maps)
    reading = maps.sum(-1).gt(0).to(maps)  # (layers, rows)
    mean = (shares * reading[..., None]).sum(-2) / reading.sum(-1).clamp_min(1)[..., None]
    sinks = mean.argmax(-1)
    where = sinks[:, None, None].expand(-1, maps.shape[1], 1)
    rest = maps.scatter(-1, where, 0.0)
    return PictureSink(
        tuple(tokens[n] for n in sinks.tolist()), torch.gather(shares, -1, where)[..., 0], normalise_rows(rest)
    )
