"""Shared by the sections of EMNLP 2021: names, and claims about correlations over layers."""

from __future__ import annotations

from collections.abc import Sequence

from normscope.measures.correlation import spearman_p_value
from normscope.papers.common import rank_correlation
from normscope.papers.published import published_main_numbers
from normscope.papers.study import Setting
from normscope.reports.report import Claim

NAME = "emnlp2021"
THEIRS = published_main_numbers(NAME)
PUBLISHED = "published"  # a column
REFERENCE = "Published: BERT-base on Wikipedia."


def layer_correlation_claim(
    setting: Setting, text: str, a: Sequence[float], b: Sequence[float], sign: int, theirs: str = ""
) -> Claim:
    """A claim that two quantities of a layer correlate positively (`sign` 1) or negatively (-1). It is left open unless
    the correlation is significant at the reading `level`, since few layers often correlate by chance."""
    rho, p = rank_correlation(a, b), spearman_p_value(a, b)
    if rho is None:
        why = "too few layers" if len(a) < 3 else "no variation over layers"
        return Claim(text, None, why, theirs)
    ours = f"Spearman {rho:.2f} over {len(a)} layers (p = {p:.2f})"
    return Claim(text, rho * sign > 0 if p <= setting.readings.level else None, ours, theirs)
