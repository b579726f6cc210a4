"""EMNLP 2020: "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from normscope.papers.emnlp2020.alignment import alignment
from normscope.papers.emnlp2020.correlation import correlation
from normscope.papers.emnlp2020.dispersion import dispersion
from normscope.papers.emnlp2020.frequency import frequency
from normscope.papers.emnlp2020.shared import NAME, PARALLEL, PLAIN
from normscope.papers.emnlp2020.shares import shares
from normscope.papers.frequencies import missing_words
from normscope.papers.readings import choice, reading
from normscope.papers.runs import RunPlan
from normscope.papers.study import Experiment, Paper, Setting


@dataclass(frozen=True)
class Readings:
    """Where the paper, or its code, leaves something open."""

    sd: str = choice("SD of Table 1: of the population (divided by n) or of a sample (n - 1)", "population", "sample")
    punctuation: str = choice("what counts as punctuation: comma and period, or every mark", "comma-period", "all")
    share_norm: str = choice(
        "norms of Fig. 3: the sum of ||alpha f|| of each head, averaged over heads, or that of the layer's ||sum "
        "over heads of alpha f||",
        *("heads", "layer"),
    )
    large_weight: float = reading(
        2.0, "a large alpha in the list of cancelling layers: this many times that of uniform attention"
    )
    small_norm: float = reading(0.5, "a small ||f|| in that list: at most this part of the layer's mean")
    frequency_tokens: str = choice(
        "tokens whose frequency counts: all, or words only, without special tokens", "all", "words"
    )
    unseen: str = choice(
        "tokens that the frequency file does not count: ranked one below the last, or left out", "rank", "leave"
    )
    average_norm: str = choice(
        "mean norm of a head of the cross-attention: over all cells of all sentences, or over the means of sentences",
        *("cells", "sentences"),
    )
    aer_correlation: str = choice(
        "error rates of heads that are correlated with their norm: by norms or by weights", "norm", "weight"
    )


def _missing_alignment(setting: Setting) -> str | None:
    lens, hint = setting.lens, "(read it as 'alignments')."
    if not lens.two_sided:
        return (
            f"It reads cross-attention, and {lens.family.name} has none: it needs an encoder-decoder for translation."
        )
    if lens.family.input != "text" or lens.tokenizer is None:
        return "It aligns words, but there is no tokenizer of a text on both sides."
    if not setting.has_target:
        return f"It needs sentence pairs, and this corpus has no target sentences {hint}"
    if not setting.has_links:
        return f"It needs gold links between words, sure or possible, and this corpus has none {hint}"
    return None


def _runs(name: str, *measures: str) -> Callable[[Setting], tuple[RunPlan, ...]]:
    return lambda setting: (RunPlan(name, measures),)


PAPER = Paper(
    name=NAME,
    title="Attention is Not Only a Weight: Analyzing Transformers with Vector Norms",
    citation=(
        "Goro Kobayashi, Tatsuki Kuribayashi, Sho Yokoi and Kentaro Inui. 2020. Attention is Not Only a Weight: "
        "Analyzing Transformers with Vector Norms. In Proceedings of EMNLP 2020, pages 7057-7075."
    ),
    readings=Readings,
    experiments=(
        Experiment("dispersion", "Dispersion of ||f(x)|| (Table 1)", dispersion, _runs(PLAIN, "norm_moments")),
        Experiment("shares", "Special tokens and punctuation (Fig. 3)", shares, _runs(PLAIN, "category_shares")),
        Experiment(
            "correlation",
            "Weights against ||f(x)|| (Table 2)",
            correlation,
            _runs(PLAIN, "weight_norm_counts", "category_shares", "norm_moments"),
        ),
        Experiment("frequency", "Word frequency", frequency, _runs(PLAIN, "token_means"), missing_words),
        Experiment(
            "alignment",
            "Word alignment (Table 3)",
            alignment,
            _runs(PARALLEL, "alignment_hits", "cross_norms"),
            _missing_alignment,
            needs="an encoder-decoder and sentence pairs with gold links",
        ),
    ),
)
