"""How much ||f(x)|| varies (EMNLP 2020, Table 1)."""

from __future__ import annotations

from statistics import fmean

from normscope.measures.dispersion import Moments
from normscope.papers.common import claim_with_published, finite_numbers, scan_paper_side
from normscope.papers.emnlp2020.shared import PLAIN, REFERENCE, THEIRS, Head, corpus_norm_moments, head_maps_picture
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
    run, sample = runs[PLAIN], setting.readings.sd == "sample"
    moments = corpus_norm_moments(setting, run, "layer", "head")
    values = {place: _dispersion_values(found, sample) for place, found in moments.items()}
    average = {key: fmean(found[key] for found in values.values()) for key in ("mean", "sd", "cv")}
    by_variation = sorted(values, key=lambda place: values[place]["cv"])
    least, most = by_variation[0], by_variation[-1]
    lengths = scan_paper_side(run, "items", setting.side).select("length").collect()["length"].to_list()
    numbers = {f"dispersion.{key}": value for key, value in average.items()}
    for place, found in values.items():
        numbers |= {f"dispersion.{_head_name(place)}.{key}": value for key, value in found.items()}
    numbers |= {"data.tokens": sum(lengths), "data.pairs": sum(n * n for n in lengths)}
    summary: list[tuple[Cell, ...]] = []
    for label, head, ours, theirs in (
        ("average over heads", "", average, ""),
        ("largest CV: ", _head_name(most), values[most], "L2H4"),
        ("smallest CV: ", _head_name(least), values[least], "L2H7"),
    ):
        prefix = f"dispersion.{theirs}" if theirs else "dispersion"
        summary.append((label + head, "here", *map(ours.get, COLUMNS)))
        summary.append((theirs and label + theirs, REFERENCE, *(THEIRS.get(f"{prefix}.{key}") for key in COLUMNS)))
    maps = {COLUMNS[key]: {place: found[key] for place, found in values.items()} for key in ("mean", "cv")}
    heads = ((layer + 1, head + 1, *map(none_if_nan, found.values())) for (layer, head), found in values.items())
    columns, title = {"layer": "", "head": "", **FORMATS}, "Dispersion of ||f(x)||"
    claim = claim_with_published(
        f"||f(x)|| varies between tokens (average CV above {VARIES})",
        average["cv"] > VARIES,
        "average CV {:.2f}, from {:.2f} to {:.2f}",
        (average["cv"], values[least]["cv"], values[most]["cv"]),
        THEIRS,
        *("dispersion.cv", "dispersion.L2H7.cv", "dispersion.L2H4.cv"),
    )
    parts = (
        Table.of("table1-dispersion", f"Table 1. {title}", {"head": "", "": "", **FORMATS}, summary),
        head_maps_picture("table1-heads", "Mean and CV of ||f(x)|| by head", maps),
        Table.of("table1-every-head", f"{title} in every head", columns, heads, folded=True),
    )
    return Section("dispersion", title, TEXT, parts, (claim,), finite_numbers(numbers))


def _dispersion_values(found: Moments, sample: bool) -> dict[str, float]:
    deviation, variation = found.deviation(sample=sample), found.variation(sample=sample)
    return dict(zip(COLUMNS, (found.mean, deviation, variation, found.largest, found.smallest), strict=True))


def _head_name(place: Head) -> str:
    return f"L{place[0] + 1}H{place[1] + 1}"
