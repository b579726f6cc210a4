"""EMNLP 2020: "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from normscope.papers.emnlp2020.alignment import alignment
from normscope.papers.emnlp2020.correlation import correlation
from normscope.papers.emnlp2020.dispersion import dispersion
from normscope.papers.emnlp2020.frequency import frequency, refuse_foreign
from normscope.papers.emnlp2020.shared import PAPER as NAME
from normscope.papers.emnlp2020.shared import PARALLEL, PLAIN
from normscope.papers.emnlp2020.shares import shares
from normscope.papers.experiments import Experiment, Paper, RunPlan, Setting
from normscope.papers.readings import reading


@dataclass(frozen=True)
class Readings:
    """Where the paper, or its code, leaves something open."""

    sd: str = reading(
        "population", "SD of Table 1: of the population (divided by n) or of a sample (n - 1)", ("population", "sample")
    )
    punctuation: str = reading(
        "comma-period", "what counts as punctuation: comma and period, or every mark", ("comma-period", "all")
    )
    share_norm: str = reading(
        "heads",
        "norms of Fig. 3: the sum of ||alpha f|| of each head, averaged over heads, or that of the layer's "
        "||sum over heads of alpha f||",
        ("heads", "layer"),
    )
    large_weight: float = reading(
        2.0, "a large alpha in the list of cancelling layers: times what even attention would give"
    )
    small_norm: float = reading(0.5, "a small ||f|| in that list: at most this part of the layer's mean")
    frequency_tokens: str = reading(
        "all", "tokens set against frequency: all, or words only, without special tokens", ("all", "words")
    )
    unseen: str = reading(
        "rank",
        "tokens that the frequency file does not count: ranked one below the last, or left out",
        ("rank", "leave"),
    )
    average_norm: str = reading(
        "cells",
        "mean norm of a head of the cross-attention: over all cells of all sentences, or over the means of sentences",
        ("cells", "sentences"),
    )
    aer_correlation: str = reading(
        "norm", "error rates of heads that are set against their norm: by norms or by weights", ("norm", "weight")
    )


def _always(setting: Setting) -> str | None:
    return None


def _no_tokens(setting: Setting) -> str | None:
    if setting.lens.family.input != "text":
        return "It counts words, but this model reads no text."
    refuse_foreign(setting)
    return None


def _no_alignment(setting: Setting) -> str | None:
    if not setting.lens.two_sided:
        return (
            f"It reads cross-attention, and {setting.lens.family.name} has none: it needs an encoder-decoder for "
            "translation."
        )
    if setting.lens.family.input != "text" or setting.lens.tokenizer is None:
        return "It aligns words, but there is no tokenizer of a text on both sides."
    if not setting.has_target:
        return "It needs sentence pairs, and this corpus has no target sentences (read it as 'alignments')."
    if not setting.has_links:
        return (
            "It needs gold links between words, sure or possible, and this corpus has none (read it as 'alignments')."
        )
    return None


def _plain(*measures: str) -> Callable[[Setting], tuple[RunPlan, ...]]:
    return lambda setting: (RunPlan(PLAIN, measures),)


def _parallel(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan(PARALLEL, ("alignment_hits", "cross_norms")),)


PAPER = Paper(
    name=NAME,
    title="Attention is Not Only a Weight: Analyzing Transformers with Vector Norms",
    citation=(
        "Goro Kobayashi, Tatsuki Kuribayashi, Sho Yokoi and Kentaro Inui. 2020. Attention is Not Only a Weight: "
        "Analyzing Transformers with Vector Norms. In Proceedings of EMNLP 2020, pages 7057-7075."
    ),
    readings=Readings,
    experiments=(
        Experiment("dispersion", "Dispersion of ||f(x)|| (Table 1)", _always, _plain("norm_moments"), dispersion),
        Experiment("shares", "Special tokens and punctuation (Fig. 3)", _always, _plain("category_shares"), shares),
        Experiment(
            "correlation",
            "Weights against ||f(x)|| (Table 2)",
            _always,
            _plain("weight_norm_counts", "category_shares", "norm_moments"),
            correlation,
        ),
        Experiment("frequency", "Word frequency", _no_tokens, _plain("token_means"), frequency),
        Experiment(
            "alignment",
            "Word alignment (Table 3)",
            _no_alignment,
            _parallel,
            alignment,
            needs="an encoder-decoder and sentence pairs with gold links",
        ),
    ),
)
