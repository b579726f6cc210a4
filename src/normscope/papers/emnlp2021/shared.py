"""What the sections of EMNLP 2021 have in common: what was published, and claims about layers."""

from __future__ import annotations

from collections.abc import Sequence

from normscope.measures.permutation import spearman_p
from normscope.papers.common import rank_correlation
from normscope.papers.study import Setting
from normscope.reports.report import Claim

NAME = "emnlp2021"
PUBLISHED = "published"  # a column
REFERENCE = "Published: BERT-base on Wikipedia."


def claim_over_layers(
    setting: Setting, text: str, a: Sequence[float], b: Sequence[float], sign: int, theirs: str = ""
) -> Claim:
    """A claim that two quantities of a layer rise together (`sign` 1) or not (-1). It is decided only if at most the
    share `level` (a reading) of random orders has so strong a correlation: few layers often correlate by chance."""
    rho, p = rank_correlation(a, b), spearman_p(a, b)
    if rho is None:
        why = "there are too few layers" if len(a) < 3 else "it does not vary over the layers"
        return Claim(text, None, why, theirs)
    ours = f"Spearman {rho:.2f} over {len(a)} layers (p = {p:.2f})"
    return Claim(text, rho * sign > 0 if p <= setting.readings.level else None, ours, theirs)
