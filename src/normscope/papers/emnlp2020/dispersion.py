"""How much ||f(x)|| varies (EMNLP 2020, Table 1)."""

from __future__ import annotations

from statistics import fmean

from normscope.measures.dispersion import Moments
from normscope.papers.common import claim_with_published, finite_numbers, scan_paper_side
from normscope.papers.emnlp2020.shared import NAME, PLAIN, REFERENCE, Head, corpus_norm_moments, head_maps_picture
from normscope.papers.published import published_main_numbers
from normscope.papers.study import Runs, Setting
from normscope.reports.report import Cell, Section, Table, none_if_nan

COLUMNS = {"mean": "mean", "sd": "SD", "cv": "CV", "max": "max", "min": "min"}  # key of a number -> column
FORMATS = dict.fromkeys(COLUMNS.values(), ".2f")
VARIES = 0.1  # CV above which ||f|| counts as varying; the least variable head in the paper has 0.12
TEXT = (
    "||f(x)|| is the norm of a token's value vector after the output matrix, for each head, over all tokens of all "
    "sequences, including special tokens. If it did not vary, attention weights alone would show the contributions."
)


def dispersion_section(setting: Setting, runs: Runs) -> Section:
    """Table 1: mean, SD, CV, max and min of ||f(x)|| by head, and averages over heads."""
    run, published = runs[PLAIN], published_main_numbers(NAME)
    moments = corpus_norm_moments(setting, run, "layer", "head")
    values = {place: _dispersion_values(found, setting.readings.sd == "sample") for place, found in moments.items()}
    average = [fmean(found[n] for found in values.values()) for n in range(3)]
    order = sorted(values, key=lambda place: values[place][2])
    lengths = [
        int(length) for length in scan_paper_side(run, "items", setting.side).select("length").collect()["length"]
    ]
    numbers = dict(zip((f"dispersion.{key}" for key in COLUMNS), average, strict=False))
    for place, found in values.items():
        numbers |= {f"dispersion.{_head_name(place)}.{k}": value for k, value in zip(COLUMNS, found, strict=True)}
    numbers |= {"data.tokens": sum(lengths), "data.pairs": sum(n * n for n in lengths)}
    summary: list[tuple[Cell, ...]] = []
    for label, head, ours, theirs in (
        ("average over heads", "", (*average, None, None), ""),
        ("largest CV: ", _head_name(order[-1]), values[order[-1]], "L2H4"),
        ("smallest CV: ", _head_name(order[0]), values[order[0]], "L2H7"),
    ):
        prefix = f"dispersion.{theirs}" if theirs else "dispersion"
        summary.append((label + head, "here", *ours))
        summary.append((theirs and label + theirs, REFERENCE, *(published.get(f"{prefix}.{key}") for key in COLUMNS)))
    maps = {label: {place: found[n] for place, found in values.items()} for label, n in (("mean", 0), ("CV", 2))}
    heads = [(layer + 1, head + 1, *map(none_if_nan, found)) for (layer, head), found in values.items()]
    claim = claim_with_published(
        f"||f(x)|| varies between tokens (average CV above {VARIES})",
        average[2] > VARIES,
        "average CV {:.2f}, from {:.2f} to {:.2f}",
        (average[2], values[order[0]][2], values[order[-1]][2]),
        published,
        *("dispersion.cv", "dispersion.L2H7.cv", "dispersion.L2H4.cv"),
    )
    return Section(
        "dispersion",
        "Dispersion of ||f(x)||",
        TEXT,
        (
            Table.of("table1-dispersion", "Table 1. Dispersion of ||f(x)||", {"head": "", "": "", **FORMATS}, summary),
            head_maps_picture("table1-heads", "Mean and CV of ||f(x)|| by head", maps),
            Table.of(
                "table1-every-head",
                "Dispersion of ||f(x)|| in every head",
                {"layer": "", "head": "", **FORMATS},
                heads,
                folded=True,
            ),
        ),
        (claim,),
        finite_numbers(numbers),
    )


def _dispersion_values(found: Moments, sample: bool) -> tuple[float, ...]:
    deviation, variation = found.deviation(sample=sample), found.variation(sample=sample)
    return (found.mean, deviation, variation, found.largest, found.smallest)


def _head_name(place: Head) -> str:
    return f"L{place[0] + 1}H{place[1] + 1}"
