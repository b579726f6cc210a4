"""Shared by the sections of EMNLP 2021: names, and claims about correlations over layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from normscope.measures.uncertainty import Estimate, permute_spearman
from normscope.papers.published import published_main_numbers
from normscope.papers.study import Setting
from normscope.papers.verdicts import decided_claim
from normscope.reports.report import Claim

NAME = "emnlp2021"
THEIRS = published_main_numbers(NAME)
PUBLISHED = "published"  # a column
REFERENCE = "Published: BERT-base on Wikipedia."
OTHER_AVERAGE = {"micro": "macro", "macro": "micro"}


def layer_correlation_claim(
    setting: Setting,
    text: str,
    margin: Estimate,
    sign: int,
    theirs: str = "",
    *,
    under: Mapping[str, Estimate] | None = None,
    own: bool = False,
) -> Claim:
    """A claim that two quantities of a layer correlate positively (`sign` 1) or negatively (-1).

    `margin` is from `layer_correlation` with the same sign. It decides at the reading `level`, since few layers often
    correlate by chance.
    """
    level = setting.readings.level
    defined = not math.isnan(margin.value)
    ours = f"Spearman {sign * margin.value:.2f} over {setting.depth} layers" if defined else margin.method
    others = {name: other.decide(level) for name, other in (under or {}).items()}
    evidence = None if defined else ""
    return decided_claim(text, margin, ours, theirs, evidence=evidence, under=others, own=own, alpha=level)


def layer_correlation(a: Sequence[float], b: Sequence[float], sign: int) -> Estimate:
    """Spearman's correlation over layers times the sign that a claim asks for, with permutation p-values."""
    return permute_spearman([sign * value for value in a], b)
