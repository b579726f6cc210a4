"""What the sections of EMNLP 2021 have in common: which run they read, how it is described, what was published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from normscope.measures.permutation import spearman_p
from normscope.papers.emnlp2021.ratios import rank_correlation
from normscope.papers.report import Claim

if TYPE_CHECKING:
    from normscope.papers.experiments import Setting

PAPER = "emnlp2021"
PUBLISHED = "published"  # a column
REFERENCE = "Published: BERT-base on Wikipedia."


def masked_run(setting: Setting) -> str:
    """The name of the run that the paper masks; what is no masked language model reads the text as it is."""
    return "masked" if setting.readings.masking and setting.masks else "plain"


def described_input(setting: Setting) -> str:
    if masked_run(setting) == "masked":
        return "12 % of the tokens of each sequence are masked, as in the paper."
    why = "as asked for" if setting.masks else "since this model knows no masked tokens"
    return f"The text is read as it is, {why}; the paper masks 12 % of the tokens."


def over_layers(setting: Setting, text: str, a: Sequence[float], b: Sequence[float], sign: int, said: str) -> Claim:
    """A claim that two quantities of a layer rise together (`sign` 1) or not (-1). A correlation of a few layers that
    chance makes as often as not decides nothing: it counts from the reading `level` on."""
    rho, p = rank_correlation(a, b), spearman_p(a, b)
    if rho is None:
        why = "there are too few layers" if len(a) < 3 else "it does not vary over the layers"
        return Claim(text, None, why, said)
    ours = f"Spearman {rho:.2f} over {len(a)} layers (p = {p:.2f})"
    return Claim(text, rho * sign > 0 if p <= setting.readings.level else None, ours, said)
