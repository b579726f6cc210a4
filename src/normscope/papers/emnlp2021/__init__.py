"""EMNLP 2021: "Incorporating Residual and Normalization Layers into Analysis of Masked Language Models"."""

from __future__ import annotations

from dataclasses import dataclass

from normscope.papers.emnlp2020.frequency import refuse_foreign
from normscope.papers.emnlp2021.comparison import comparison
from normscope.papers.emnlp2021.expansion import expansion
from normscope.papers.emnlp2021.frequency import frequency
from normscope.papers.emnlp2021.mixing import depth, layers, mixing
from normscope.papers.emnlp2021.ratios import methods
from normscope.papers.emnlp2021.shared import masked_run
from normscope.papers.emnlp2021.uniform import RUN, uniform
from normscope.papers.experiments import Experiment, Paper, RunPlan, Setting
from normscope.papers.readings import reading


@dataclass(frozen=True)
class Readings:
    """Where the paper, or its code, leaves something open."""

    masking: bool = reading(
        True, "mask 12 % of the tokens that are not special, as the paper's code does (its text says 15 % x 80 %)"
    )
    mask_seed: int = reading(
        0, "seed of the masked tokens; each sequence has a draw of its own, the paper's code one for all in their order"
    )
    table_average: str = reading(
        "micro", "mean of Table 2: over all tokens, or over the means of the sequences", ("micro", "macro")
    )
    layer_average: str = reading(
        "macro", "means by layer: over the means of the sequences, or over all tokens", ("macro", "micro")
    )
    special: str = reading(
        "markers",
        "what 'without special tokens' leaves out: [CLS] and [SEP] or what starts and ends a text, or every token that "
        "the tokenizer calls special, [UNK] too",
        ("markers", "tokenizer"),
    )
    expansion: str = reading(
        "code",
        "matrix of the claim about expansion: the code's, which the table is of, or the paper's",
        ("code", "paper"),
    )
    level: float = reading(
        0.05,
        "a correlation over layers decides a claim where at most this share of random orders is as strong (a two-sided "
        "permutation test; the paper has none); 1: its sign decides",
    )
    change: str = reading(
        "relative", "change of the output that is set against mixing: relative or cosine", ("relative", "cosine")
    )
    example_layer: int = reading(0, "layer of the drawn maps, from 1; 0 for the middle one")


def _always(setting: Setting) -> str | None:
    return None


def _foreign_frequencies(setting: Setting) -> str | None:
    if setting.lens.family.input != "text":
        return "It counts words, but this model reads no text."
    refuse_foreign(setting)
    return None


def _no_example(setting: Setting) -> str | None:
    if setting.lens.family.input != "text":
        return "It draws maps of a text, but this model reads no text."
    if setting.lens.tokenizer is None:
        return "It draws maps of a text, but there is no tokenizer to read one with."
    return (
        None if setting.example is not None or setting.entries else "It draws maps of a text: give DATA or --example."
    )


def _nothing(setting: Setting) -> tuple[RunPlan, ...]:
    return ()


def _mixing(setting: Setting) -> tuple[RunPlan, ...]:
    name = masked_run(setting)
    return (RunPlan(name, ("mixing",), methods(setting.lens), masked=name == "masked"),)


def _plain(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan("plain", ("mixing",), methods(setting.lens)),)


def _uniform(setting: Setting) -> tuple[RunPlan, ...]:
    masked = masked_run(setting) == "masked"
    return (*_mixing(setting), RunPlan(RUN, ("uniform_attention",), ("weights",), masked=masked))


PAPER = Paper(
    name="emnlp2021",
    title="Incorporating Residual and Normalization Layers into Analysis of Masked Language Models",
    citation=(
        "Goro Kobayashi, Tatsuki Kuribayashi, Sho Yokoi, Kentaro Inui. Incorporating Residual and Normalization Layers "
        "into Analysis of Masked Language Models. EMNLP 2021. arXiv 2109.07152"
    ),
    readings=Readings,
    experiments=(
        Experiment(
            "comparison", "Attention, residual and normalization in an example", _no_example, _nothing, comparison
        ),
        Experiment("mixing", "Mixing ratio", _always, _mixing, mixing),
        Experiment("layers", "Mixing ratio by layer and kind of token", _always, _mixing, layers),
        Experiment("depth", "Mixing ratio against depth", _always, _mixing, depth),
        Experiment("frequency", "Mixing ratio against word frequency", _foreign_frequencies, _plain, frequency),
        Experiment("expansion", "Expansion rate of the affine maps", _always, _nothing, expansion, "the model alone"),
        Experiment("uniform", "Uniform attention in the place of the learned one", _always, _uniform, uniform),
    ),
)
