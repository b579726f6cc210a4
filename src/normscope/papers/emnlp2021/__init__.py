"""EMNLP 2021: "Incorporating Residual and Normalization Layers into Analysis of Masked Language Models"."""

from __future__ import annotations

from dataclasses import dataclass

from normscope.papers.common import masked_plan
from normscope.papers.emnlp2021.example_maps import OWN, example_maps_section, missing_example_maps
from normscope.papers.emnlp2021.expansion import expansion_section
from normscope.papers.emnlp2021.frequency import mixing_frequency_section
from normscope.papers.emnlp2021.mixing import mixing_depth_section, mixing_layers_section, mixing_section
from normscope.papers.emnlp2021.ratios import attention_block_scopes
from normscope.papers.emnlp2021.shared import NAME
from normscope.papers.emnlp2021.uniform import RUN, uniform_attention_section
from normscope.papers.frequencies import missing_frequencies
from normscope.papers.readings import reading, reading_choice
from normscope.papers.runs import RunPlan
from normscope.papers.study import Experiment, Paper, Setting


@dataclass(frozen=True)
class MixingReadings:
    """Choices that the paper and its code leave open."""

    masking: bool = reading(
        True, "mask 12 % of the ordinary tokens, as the paper's code does (15 % x 80 % in its text)"
    )
    mask_seed: int = reading(0, "seed for masking")
    mask_draw: str = reading_choice(
        "how masked tokens are drawn: for each sequence separately, by its id, or for all in corpus order from one "
        "generator, as in the paper's code; --verify uses the latter",
        *("sequence", "authors"),
    )
    table_average: str = reading_choice(
        "mean of Table 2: over all tokens, or over the sequence means", "micro", "macro"
    )
    layer_average: str = reading_choice("means by layer: over the sequence means, or over all tokens", "macro", "micro")
    special: str = reading_choice(
        "what 'without special tokens' leaves out: [CLS] and [SEP] (or the tokens that start and end a text), or every "
        "special token of the tokenizer, including [UNK]",
        *("markers", "tokenizer"),
    )
    expansion: str = reading_choice(
        "matrix for the claim about expansion: that of the code, used for the published table, or that of the paper",
        "code",
        "paper",
    )
    level: float = reading(
        0.05,
        "significance level at which a correlation over layers decides a claim (two-sided permutation test; the paper "
        "has no test); 1: the sign alone decides",
    )
    change: str = reading_choice(
        "change of the output to compare with mixing: relative or cosine", "relative", "cosine"
    )
    example_layer: int = reading(0, "layer of the example maps, from 1; 0: the middle layer")


def _mixing_plans(setting: Setting) -> tuple[RunPlan, ...]:
    return (masked_plan(setting, ("mixing",), attention_block_scopes(setting.lens)),)


def _example_plans(setting: Setting) -> tuple[RunPlan, ...]:
    """An example given on the command line is drawn without a corpus, too."""
    return (masked_plan(setting, (OWN,), attention_block_scopes(setting.lens)),) if setting.data else ()


def _unmasked_mixing_plans(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan("plain", ("mixing",), attention_block_scopes(setting.lens)),)


def _uniform_attention_plans(setting: Setting) -> tuple[RunPlan, ...]:
    return (*_mixing_plans(setting), masked_plan(setting, ("uniform_attention",), ("weights",), RUN))


PAPER = Paper(
    name=NAME,
    title="Incorporating Residual and Normalization Layers into Analysis of Masked Language Models",
    citation=(
        "Goro Kobayashi, Tatsuki Kuribayashi, Sho Yokoi, Kentaro Inui. Incorporating Residual and Normalization Layers "
        "into Analysis of Masked Language Models. EMNLP 2021. arXiv 2109.07152"
    ),
    readings=MixingReadings,
    experiments=(
        Experiment(
            "comparison",
            "Maps of an example with attention, residual and normalization",
            example_maps_section,
            _example_plans,
            missing=missing_example_maps,
        ),
        Experiment("mixing", "Mixing ratio", mixing_section, _mixing_plans),
        Experiment("layers", "Mixing ratio by layer and kind of token", mixing_layers_section, _mixing_plans),
        Experiment("depth", "Mixing ratio and depth", mixing_depth_section, _mixing_plans),
        Experiment(
            "frequency",
            "Mixing ratio and word frequency",
            mixing_frequency_section,
            _unmasked_mixing_plans,
            missing_frequencies,
        ),
        Experiment("expansion", "Expansion rate of the affine maps", expansion_section, needs="the model alone"),
        Experiment(
            "uniform", "Uniform instead of learned attention", uniform_attention_section, _uniform_attention_plans
        ),
    ),
)
