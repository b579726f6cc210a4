"""EMNLP 2021: "Incorporating Residual and Normalization Layers into Analysis of Masked Language Models"."""

from __future__ import annotations

from dataclasses import dataclass

from normscope.papers.common import masked_plan
from normscope.papers.emnlp2021.example_maps import example_maps, missing_example
from normscope.papers.emnlp2021.expansion import expansion
from normscope.papers.emnlp2021.frequency import frequency
from normscope.papers.emnlp2021.mixing import depth, layers, mixing
from normscope.papers.emnlp2021.ratios import methods
from normscope.papers.emnlp2021.shared import NAME
from normscope.papers.emnlp2021.uniform import RUN, uniform
from normscope.papers.frequencies import missing_words
from normscope.papers.readings import choice, reading
from normscope.papers.runs import RunPlan
from normscope.papers.study import Experiment, Paper, Setting


@dataclass(frozen=True)
class Readings:
    """Where the paper, or its code, leaves something open."""

    masking: bool = reading(
        True, "mask 12 % of the tokens that are not special, as the paper's code does (its text says 15 % x 80 %)"
    )
    mask_seed: int = reading(
        0, "seed of the masked tokens; each sequence has a draw of its own, the paper's code one for all in their order"
    )
    table_average: str = choice(
        "mean of Table 2: over all tokens, or over the means of the sequences", "micro", "macro"
    )
    layer_average: str = choice("means by layer: over the means of the sequences, or over all tokens", "macro", "micro")
    special: str = choice(
        "what 'without special tokens' leaves out: [CLS] and [SEP] or what starts and ends a text, or every token "
        "that the tokenizer calls special, including [UNK]",
        *("markers", "tokenizer"),
    )
    expansion: str = choice(
        "matrix of the claim about expansion: the code's, which the table is of, or the paper's", "code", "paper"
    )
    level: float = reading(
        0.05,
        "a correlation over layers decides a claim if at most this share of random orders is as strong (a two-sided "
        "permutation test; the paper has none); 1: its sign decides",
    )
    change: str = choice("change of the output that is compared with mixing: relative or cosine", "relative", "cosine")
    example_layer: int = reading(0, "layer of the example's maps, from 1; 0 for the middle one")


def _mixing(setting: Setting) -> tuple[RunPlan, ...]:
    return (masked_plan(setting, ("mixing",), methods(setting.lens)),)


def _plain(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan("plain", ("mixing",), methods(setting.lens)),)


def _uniform(setting: Setting) -> tuple[RunPlan, ...]:
    return (*_mixing(setting), masked_plan(setting, ("uniform_attention",), ("weights",), RUN))


PAPER = Paper(
    name=NAME,
    title="Incorporating Residual and Normalization Layers into Analysis of Masked Language Models",
    citation=(
        "Goro Kobayashi, Tatsuki Kuribayashi, Sho Yokoi, Kentaro Inui. Incorporating Residual and Normalization Layers "
        "into Analysis of Masked Language Models. EMNLP 2021. arXiv 2109.07152"
    ),
    readings=Readings,
    experiments=(
        Experiment(
            "comparison",
            "Attention, residual and normalization in an example",
            example_maps,
            missing=missing_example,
        ),
        Experiment("mixing", "Mixing ratio", mixing, _mixing),
        Experiment("layers", "Mixing ratio by layer and kind of token", layers, _mixing),
        Experiment("depth", "Mixing ratio against depth", depth, _mixing),
        Experiment("frequency", "Mixing ratio against word frequency", frequency, _plain, missing_words),
        Experiment("expansion", "Expansion rate of the affine maps", expansion, needs="the model alone"),
        Experiment("uniform", "Uniform attention instead of the learned one", uniform, _uniform),
    ),
)
