"""Expansion rate of each layer's affine map of values (EMNLP 2021, Table 8): of the weights alone, without data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from normscope.engine import probing
from normscope.measures import expansion as rates
from normscope.papers import charts, published
from normscope.papers.emnlp2021.shared import PAPER, PUBLISHED
from normscope.papers.published import said
from normscope.papers.report import Claim, Picture, Section, Table

if TYPE_CHECKING:
    from normscope.analyzer import Analyzer
    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

MATRICES = ("code", "paper")
TEXT = """By how much the map x -> (x W_V + b_V) W_O + b_O stretches a vector, root mean square: ||M||_F / sqrt(d + 1) \
of its matrix M on [x, 1]. Below 1 the attention sends less than it receives, and the residual weighs more.

The paper's matrix has b_V W_O + b_O as its last row. Its code has b_O in the place of a column, \
M = [[W_V W_O, W_V b_O^T], [b_V W_O, b_V . b_O + 1]], and that is what the published numbers are of."""


def expansion(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Per layer, by both matrices."""
    lens = setting.lens
    found = layer_rates(lens)
    reference = published.reference(PAPER)
    depth = lens.depths[0]
    theirs = [value for key, value in reference.items() if key.startswith("expansion.code.L")]
    theirs = theirs if len(theirs) == depth else []  # layer by layer only beside as many layers
    rows = [
        (layer, *(found[matrix][layer - 1] for matrix in MATRICES), *theirs[layer - 1 : layer])
        for layer in range(1, depth + 1)
    ]
    stated = {matrix: _ends(found[matrix]) for matrix in MATRICES}
    columns = ("code's matrix", "paper's matrix", PUBLISHED)
    some = columns if theirs else columns[:2]
    ends = [
        (name, *(stated[matrix].get(name) for matrix in MATRICES), reference.get(f"expansion.code.{name}"))
        for name in ("mean", "min", "max")
    ]
    numbers = {
        f"expansion.{matrix}.L{layer}": value
        for matrix in MATRICES
        for layer, value in enumerate(found[matrix], 1)
        if value is not None
    } | {f"expansion.{matrix}.{name}": value for matrix in MATRICES for name, value in stated[matrix].items()}
    drawn = {
        f"{matrix}'s matrix": [value for value in found[matrix] if value is not None]
        for matrix in MATRICES
        if stated[matrix]
    }
    chosen = setting.readings.expansion
    mean = stated[chosen].get("mean")
    claim = Claim(
        "The affine map of the values shrinks vectors: its mean expansion rate is below 1",
        None if mean is None else mean < 1,
        "b_O does not fit the code's matrix" if mean is None else f"{mean:.2f} by the {chosen}'s matrix",
        said(reference, "{:.2f} by the code's matrix", "expansion.code.mean"),
    )
    return Section(
        "expansion",
        "Expansion rate of the affine maps",
        TEXT + _before(lens),
        (
            Table(
                "table8-expansion",
                "Table 8. Expansion rate",
                ("over layers", *columns),
                tuple(ends),
                dict.fromkeys(columns, ".3f"),
                "Published: BERT-base, by the code's matrix.",
            ),
            Table(
                "expansion-layers",
                "Expansion rate by layer",
                ("layer", *some),
                tuple(rows),
                dict.fromkeys(some, ".3f"),
            ),
            Picture(
                "expansion-chart",
                "Expansion rate by layer",
                charts.line_chart(drawn, x=range(1, depth + 1), ylabel="expansion rate"),
            ),
        ),
        (claim,),
        numbers,
    )


def layer_rates(lens: Analyzer) -> dict[str, list[float | None]]:
    """matrix -> its expansion rate in each layer; None where b_O does not fit the code's."""
    maps = [probing.affine(lens, layer) for layer in range(lens.depths[0])]
    return {"code": [rates.code(*one) for one in maps], "paper": [rates.paper(*one) for one in maps]}


def _ends(values: list[float | None]) -> dict[str, float]:
    """Mean, min and max over layers; none where a layer has no value."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return {}
    return {"mean": sum(known) / len(known), "min": min(known), "max": max(known)}


def _before(lens: Analyzer) -> str:
    branch = lens.stacks[0].blocks[0].branches[0]
    return "\n\nThe x of this model is what its norm before the attention gives." if branch.pre else ""
