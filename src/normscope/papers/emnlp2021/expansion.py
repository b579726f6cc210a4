"""Expansion rate of each layer's affine value map (EMNLP 2021, Table 8), computed from the weights alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from normscope.analyzer import Analyzer
from normscope.engine import probing
from normscope.measures import expansion as rates
from normscope.measures.uncertainty import flip_signs
from normscope.papers.common import finite_numbers, layer_picture, layer_table, paper_layers_text, published_curves
from normscope.papers.emnlp2021.shared import PUBLISHED, THEIRS
from normscope.papers.published import quote_published
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim, describe_estimate
from normscope.reports.report import Claim, Section, Table

ENDS = ("mean", "min", "max")
TEXT = """How much the map x -> (x W_V + b_V) W_O + b_O stretches a vector in the root mean square: \
||M||_F / sqrt(d + 1), where M is its matrix on [x, 1]. A rate below 1 means that attention shrinks vectors, which \
gives the residual more weight.

In the paper the last row of M is b_V W_O + b_O. The paper's code uses b_O as a column instead, \
M = [[W_V W_O, W_V b_O^T], [b_V W_O, b_V . b_O + 1]]; the published numbers come from the code."""
PRE_NORM = "\n\nIn this model x is the output of the norm before attention."


def expansion_section(setting: Setting, runs: Runs) -> Section:
    """Table 8: expansion rate by layer, with the paper's matrix and that of its code."""
    lens, chosen = setting.lens, setting.readings.expansion
    found = expansion_rates_by_layer(lens)
    layers = range(1, setting.depth + 1)
    theirs = published_curves(THEIRS, {PUBLISHED: "expansion.code.L{}"}, setting.depth)
    ends = {matrix: _mean_min_max(rates) for matrix, rates in found.items()}
    numbers = {f"expansion.{m}.L{n}": found[m][n - 1] for m in found for n in layers}
    numbers |= {f"expansion.{m}.{name}": value for m in found for name, value in ends[m].items()}
    series = {f"{matrix}'s matrix": rates for matrix, rates in found.items()}
    drawn = {f"{m}'s matrix": [value for value in found[m] if value is not None] for m in found if ends[m]}
    over_layers = Table.of(
        "table8-expansion",
        "Table 8. Expansion rate",
        {"over layers": "", **dict.fromkeys((*series, PUBLISHED), ".3f")},
        ((end, *(some.get(end) for some in ends.values()), THEIRS.get(f"expansion.code.{end}")) for end in ENDS),
        "Published: BERT-base, with the code's matrix.",
    )
    by_layer = "Expansion rate by layer"
    return Section(
        "expansion",
        "Expansion rate of the affine maps",
        TEXT + (PRE_NORM if lens.loaded.stacks[0].blocks[0].branches[0].pre else ""),
        (
            over_layers,
            layer_table("expansion-layers", by_layer, {**series, **theirs}, layers, ".3f"),
            layer_picture("expansion-chart", by_layer, drawn, layers, "expansion rate"),
        ),
        (_expansion_claim(found, chosen),),
        finite_numbers(numbers),
    )


def _expansion_claim(found: Mapping[str, Sequence[float | None]], chosen: str) -> Claim:
    """Whether the mean rate over layers is below 1, by sign flips of 1 - rate over layers.

    There is no sample of texts: the rates are exact for this model. The test asks whether its layers agree, taking
    layers as exchangeable.
    """
    text = "The affine value map shrinks vectors: its mean expansion rate is below 1"
    theirs = quote_published(THEIRS, "{:.2f} with the code's matrix", "expansion.code.mean")
    margins = {
        matrix: flip_signs([1 - rate for rate in rates if rate is not None])
        for matrix, rates in found.items()
        if None not in rates
    }
    if chosen not in margins:
        return Claim(text, None, "b_O does not fit the matrix of the code", theirs)
    margin = margins[chosen]
    rates = [rate for rate in found[chosen] if rate is not None]
    above = [n for n, rate in enumerate(rates, 1) if rate > 1]
    evidence = f"{describe_estimate(margin)}; about the weights alone, not a sample of texts"
    return decided_claim(
        text,
        margin,
        f"{fmean(rates):.2f} with the {chosen}'s matrix",
        theirs,
        evidence=f"{evidence}; above 1 in {paper_layers_text(above)}" if above else evidence,
        under={f"expansion={other}": one.decide() for other, one in margins.items() if other != chosen},
    )


def expansion_rates_by_layer(lens: Analyzer) -> dict[str, list[float | None]]:
    """matrix -> expansion rate of each layer; None where b_O does not fit the code's matrix."""
    maps = [probing.probe_attention_maps(lens.loaded, layer) for layer in range(lens.loaded.depths[0])]
    return {
        "code": [rates.released_code_expansion_rate(*one) for one in maps],
        "paper": [rates.expansion_rate(*one) for one in maps],
    }


def _mean_min_max(values: list[float | None]) -> dict[str, float]:
    """Mean, min and max over layers; empty if a layer has no value."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return {}
    return {"mean": sum(known) / len(known), "min": min(known), "max": max(known)}
