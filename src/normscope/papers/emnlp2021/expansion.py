"""Expansion rate of each layer's affine value map (EMNLP 2021, Table 8), computed from the weights alone."""

from __future__ import annotations

from normscope.analyzer import Analyzer
from normscope.engine import probing
from normscope.measures import expansion as rates
from normscope.papers.common import finite_numbers, layer_picture
from normscope.papers.emnlp2021.shared import NAME, PUBLISHED
from normscope.papers.published import published_main_numbers, quote_published
from normscope.papers.study import Runs, Setting
from normscope.reports.report import Claim, Section, Table

MATRICES = ("code", "paper")
ENDS = ("mean", "min", "max")
TEXT = """How much the map x -> (x W_V + b_V) W_O + b_O stretches a vector in the root mean square: \
||M||_F / sqrt(d + 1), where M is its matrix on [x, 1]. A rate below 1 means that attention shrinks vectors, which \
gives the residual more weight.

In the paper the last row of M is b_V W_O + b_O. The paper's code uses b_O as a column instead, \
M = [[W_V W_O, W_V b_O^T], [b_V W_O, b_V . b_O + 1]]; the published numbers come from the code."""
PRE_NORM = "\n\nIn this model x is the output of the norm before attention."


def expansion_section(setting: Setting, runs: Runs) -> Section:
    """Table 8: expansion rate by layer, with the paper's matrix and that of its code."""
    lens, published = setting.lens, published_main_numbers(NAME)
    found = expansion_rates_by_layer(lens)
    layers = range(1, setting.depth + 1)
    theirs = [value for key, value in published.items() if key.startswith("expansion.code.L")]
    theirs = theirs if len(theirs) == len(layers) else []  # comparable only for the same number of layers
    ends = {matrix: _mean_min_max(found[matrix]) for matrix in MATRICES}
    columns = {"code's matrix": ".3f", "paper's matrix": ".3f"}
    numbers: dict[str, float | None] = {f"expansion.{m}.L{n}": found[m][n - 1] for m in MATRICES for n in layers}
    numbers |= {f"expansion.{m}.{name}": value for m in MATRICES for name, value in ends[m].items()}
    series = {f"{m}'s matrix": [value for value in found[m] if value is not None] for m in MATRICES if ends[m]}
    chosen = setting.readings.expansion
    mean = ends[chosen].get("mean")
    claim = Claim(
        "The affine value map shrinks vectors: its mean expansion rate is below 1",
        None if mean is None else mean < 1,
        "b_O does not fit the matrix of the code" if mean is None else f"{mean:.2f} with the {chosen}'s matrix",
        quote_published(published, "{:.2f} with the code's matrix", "expansion.code.mean"),
    )
    tables = (
        Table.of(
            "table8-expansion",
            "Table 8. Expansion rate",
            {"over layers": "", **columns, PUBLISHED: ".3f"},
            ((end, *(ends[m].get(end) for m in MATRICES), published.get(f"expansion.code.{end}")) for end in ENDS),
            "Published: BERT-base, with the code's matrix.",
        ),
        Table.of(
            "expansion-layers",
            "Expansion rate by layer",
            {"layer": "", **columns, **({PUBLISHED: ".3f"} if theirs else {})},
            ((layer, *(found[m][layer - 1] for m in MATRICES), *theirs[layer - 1 : layer]) for layer in layers),
        ),
    )
    picture = layer_picture("expansion-chart", "Expansion rate by layer", series, layers, "expansion rate")
    return Section(
        "expansion",
        "Expansion rate of the affine maps",
        TEXT + (PRE_NORM if lens.loaded.stacks[0].blocks[0].branches[0].pre else ""),
        (*tables, picture),
        (claim,),
        finite_numbers(numbers),
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
