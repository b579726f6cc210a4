"""The evidence for a claim in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from normscope.measures.uncertainty import Estimate
from normscope.papers.common import paper_layers_text
from normscope.papers.verdicts import split_layers


def describe_directions(
    margins: Sequence[Estimate], above: str, below: str, alpha: float, *, with_method: bool = False
) -> str:
    """ "it increases in layer 6; it decreases in layers 1-4; open in layer 5", each layer tested by itself."""
    split = zip((above, below, "open in"), split_layers(margins, alpha=alpha), strict=True)
    found = "; ".join(f"{words} {paper_layers_text(layers)}" for words, layers in split if layers)
    return f"{found} ({margins[0].method})" if with_method else found


def shift_estimate(one: Estimate, by: float) -> Estimate:
    """The estimate of a number whose margin to a threshold was estimated, for display."""
    return replace(one, value=one.value + by, low=one.low + by, high=one.high + by)
