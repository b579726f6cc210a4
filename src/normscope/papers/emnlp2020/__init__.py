"""EMNLP 2020: "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms"."""

from __future__ import annotations

from dataclasses import dataclass

from normscope.papers.common import plan_run
from normscope.papers.emnlp2020.alignment import LINKED, alignment_section
from normscope.papers.emnlp2020.correlation import correlation_section
from normscope.papers.emnlp2020.dispersion import dispersion_section
from normscope.papers.emnlp2020.frequency import norm_frequency_section
from normscope.papers.emnlp2020.pair_ranks import EXACT_PAIRS, correlation_runs
from normscope.papers.emnlp2020.shared import NAME, PARALLEL, PLAIN
from normscope.papers.emnlp2020.shares import shares_section
from normscope.papers.frequencies import missing_frequencies
from normscope.papers.readings import reading, reading_choice
from normscope.papers.study import Experiment, Paper, Setting


@dataclass(frozen=True)
class NormReadings:
    """Choices that the paper and its code leave open."""

    sd: str = reading_choice(
        "SD of Table 1: of the population (divided by n) or of a sample (n - 1)", "population", "sample"
    )
    punctuation: str = reading_choice(
        "what counts as punctuation: comma and period, or every mark", "comma-period", "all"
    )
    share_norm: str = reading_choice(
        "norms of Fig. 3: the sum of ||alpha f|| per head, averaged over heads, or the sum of the layer's ||sum over "
        "heads of alpha f||",
        *("heads", "layer"),
    )
    large_weight: float = reading(
        2.0, "what counts as a large alpha in the list of cancelling layers: this multiple of uniform attention"
    )
    small_norm: float = reading(
        0.5, "what counts as a small ||f|| in that list: at most this fraction of the layer's mean"
    )
    frequency_tokens: str = reading_choice(
        "tokens to correlate with frequency: all, or words only (no special tokens)", "all", "words"
    )
    unseen: str = reading_choice(
        "tokens missing from the frequency file: ranked one below the last, or left out", "rank", "leave"
    )
    ranks: str = reading_choice(
        f"ranks of Table 2: of the values themselves if there are at most {EXACT_PAIRS:,} pairs, or always of narrow "
        "logarithmic bins, which needs less disk space",
        *("exact", "binned"),
    )
    aer: str = reading_choice(
        "words over which the alignment error rate decides: all target words, those with a gold link (linked), or "
        f"linked if fewer than {LINKED:.0%} of them have one (auto)",
        *("auto", "all", "linked"),
    )
    average_norm: str = reading_choice(
        "mean norm of a cross-attention head: over all cells of all sentences, or over the sentence means",
        *("cells", "sentences"),
    )
    aer_correlation: str = reading_choice(
        "which error rates of heads are correlated with their norm: those by norms or by weights", "norm", "weight"
    )


def _missing_sentence_pairs(setting: Setting) -> str | None:
    lens, hint = setting.lens, "(use --format alignments)."
    if not lens.two_sided:
        return f"{lens.family.name} has no cross-attention; this experiment needs an encoder-decoder for translation."
    if lens.family.input != "text" or lens.tokenizer is None:
        return "Aligning words needs text on both sides, and a tokenizer."
    if not setting.has_target:
        return f"The corpus has no target sentences; this experiment needs sentence pairs {hint}"
    if not setting.has_links:
        return f"The corpus has no gold links between words, sure or possible {hint}"
    return None


PAPER = Paper(
    name=NAME,
    title="Attention is Not Only a Weight: Analyzing Transformers with Vector Norms",
    citation=(
        "Goro Kobayashi, Tatsuki Kuribayashi, Sho Yokoi and Kentaro Inui. 2020. Attention is Not Only a Weight: "
        "Analyzing Transformers with Vector Norms. In Proceedings of EMNLP 2020, pages 7057-7075."
    ),
    readings=NormReadings,
    experiments=(
        Experiment(
            "dispersion",
            "Dispersion of ||f(x)|| (Table 1)",
            dispersion_section,
            plan_run(PLAIN, "norm_moments", "input_norm_moments"),
        ),
        Experiment(
            "shares",
            "Special tokens and punctuation (Fig. 3)",
            shares_section,
            plan_run(PLAIN, "category_shares", "head_shares"),
        ),
        Experiment(
            "correlation",
            "Weights against ||f(x)|| (Table 2)",
            correlation_section,
            correlation_runs,
        ),
        Experiment(
            "frequency", "Word frequency", norm_frequency_section, plan_run(PLAIN, "token_means"), missing_frequencies
        ),
        Experiment(
            "alignment",
            "Word alignment (Table 3)",
            alignment_section,
            plan_run(PARALLEL, "alignment_hits", "cross_norms"),
            _missing_sentence_pairs,
            needs="an encoder-decoder and sentence pairs with gold links",
        ),
    ),
)
