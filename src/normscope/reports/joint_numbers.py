"""Headline numbers of several reports: tables with mean and SD over models, and by-layer numbers as figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import fmean, pstdev

from normscope.reports import charts
from normscope.reports.report import Cell, Picture, Report, Section, Table, none_if_nan

BY_LAYER = re.compile(r"(?P<stem>.+)\.L(?P<layer>\d+)(\.(?P<kind>.+))?")
BY_HEAD = re.compile(r".*\.L\d+H\d+(\..*)?")
P_VALUE = "p"  # kind of a by-layer number whose mean says nothing
MEANS = (
    "Means and SDs in the tables below are over the models of one corpus, and left out if a model does not have the "
    "number. SD is the population SD (divided by the number of models), as the papers' SD over training runs."
)
FOLDED = 40  # longer tables are collapsed

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Compared:
    """The reports that are compared, their short names, and the published numbers shown beside them."""

    reports: tuple[Report, ...]
    labels: tuple[str, ...]
    published: Numbers  # with KEY.sd if the SD over training runs was published
    published_for: str  # the model of the published numbers

    @property
    def published_column(self) -> str:
        """The heading of published numbers."""
        return f"published ({self.published_for})" if self.published_for else "published"


def short_name(fact: str) -> str:
    """The last part of a model's name or a file's path, without what follows in parentheses: "sst2.dev.tsv"."""
    return PurePath(fact.partition(" (")[0].rstrip("/")).name or fact


def fullest_first(reports: Sequence[Report]) -> list[int]:
    """The places of the reports in the order of their numbers of sections: the first one has the paper's order."""
    return sorted(range(len(reports)), key=lambda n: -len(reports[n].sections))


def joint_number_sections(compared: Compared) -> list[Section]:
    """A section of tables and figures for each section of the reports that has headline numbers."""
    reports = [compared.reports[n] for n in fullest_first(compared.reports)]
    titles = {section.name: section.title for report in reports for section in report.sections}
    made = []
    for name, title in titles.items():
        numbers = [_numbers_of_section(report, name) for report in compared.reports]
        table = _number_table(name, numbers, compared)
        parts: list[Table | Picture] = [table] if table.rows else []
        parts += _layer_pictures(name, numbers, compared)
        if parts:
            made.append(Section(f"numbers-{name}", title, parts=tuple(parts)))
    return made


def joint_number_rows(reports: Sequence[Report], labels: Sequence[str]) -> list[tuple[Cell, ...]]:
    """The rows of numbers.csv, headings first: every number of every report, with mean and SD."""
    keys = dict.fromkeys((s.name, key) for report in reports for s in report.sections for key in s.numbers)
    numbers = [report.numbers for report in reports]
    rows: list[tuple[Cell, ...]] = [("section", "key", *_number_columns(reports, labels))]
    for name, key in keys:
        rows.append((name, key, *_with_means([_number_or_none(some, key) for some in numbers], reports)))
    return rows


def layer_series(key: str) -> str | None:
    """The series that a by-layer number belongs to: "mixing.ATTN-N.mask" for "mixing.ATTN-N.L3.mask"; else None."""
    match = BY_LAYER.fullmatch(key)
    if match is None:
        return None
    return match["stem"] + (f".{match['kind']}" if match["kind"] else "")


def layer_line(numbers: Numbers, series: str) -> dict[int, float]:
    """The values of a series by layer, counted from 1."""
    found = {}
    for key, value in numbers.items():
        match = BY_LAYER.fullmatch(key)
        if match and layer_series(key) == series:
            found[int(match["layer"])] = value
    return dict(sorted(found.items()))


def _numbers_of_section(report: Report, name: str) -> Numbers:
    return next((section.numbers for section in report.sections if section.name == name), {})


def _number_table(name: str, numbers: Sequence[Numbers], compared: Compared) -> Table:
    """The numbers of a section that are not by layer, and the means over layers of those that are."""
    rows: dict[str, tuple[list[float | None], float | None]] = {}
    for key in dict.fromkeys(key for some in numbers for key in some):
        series = layer_series(key)
        if series is None and not BY_HEAD.fullmatch(key):
            rows[key] = ([_number_or_none(some, key) for some in numbers], compared.published.get(key))
        elif series is not None and not key.endswith(f".{P_VALUE}"):
            ours = [_mean_over_layers(some, series) for some in numbers]
            rows.setdefault(f"{series}, mean over layers", (ours, _mean_over_layers(compared.published, series)))
    columns = {compared.published_column: {key: published for key, (_, published) in rows.items()}}
    columns["published SD"] = {key: compared.published.get(f"{key}.sd") for key in rows}
    shown = {name: values for name, values in columns.items() if any(value is not None for value in values.values())}
    reports = compared.reports
    return Table(
        f"numbers-{name}",
        "Numbers",
        ("number", *_number_columns(reports, compared.labels), *shown),
        tuple(
            (key, *_with_means(ours, reports), *(values[key] for values in shown.values()))
            for key, (ours, _) in rows.items()
        ),
        note="Mean and population SD over models." if models_by_corpus(reports) else "",
        folded=len(rows) > FOLDED,
    )


def _number_or_none(numbers: Numbers, key: str) -> float | None:
    return none_if_nan(numbers[key]) if key in numbers else None


def _mean_over_layers(numbers: Numbers, series: str) -> float | None:
    values = list(layer_line(numbers, series).values())
    return none_if_nan(fmean(values)) if len(values) > 1 else None


def models_by_corpus(reports: Sequence[Report]) -> dict[str, list[int]]:
    """Each corpus of several models -> the places of their reports; not if a model has several reports of it."""
    found: dict[str, list[int]] = {}
    for n, report in enumerate(reports):
        found.setdefault(report.data, []).append(n)
    return {data: some for data, some in found.items() if len({reports[n].model for n in some}) == len(some) > 1}


def _number_columns(reports: Sequence[Report], labels: Sequence[str]) -> tuple[str, ...]:
    several = len({report.data for report in reports}) > 1
    suffixes = [f" ({short_name(data)})" if several else "" for data in models_by_corpus(reports)]
    return (*labels, *(f"{what}{suffix}" for suffix in suffixes for what in ("mean", "SD")))


def _with_means(values: Sequence[float | None], reports: Sequence[Report]) -> tuple[float | None, ...]:
    found: list[float | None] = list(values)
    for places in models_by_corpus(reports).values():
        given = [value for n in places if (value := values[n]) is not None]
        found += [fmean(given), pstdev(given)] if len(given) == len(places) else [None, None]
    return tuple(found)


def _layer_pictures(name: str, numbers: Sequence[Numbers], compared: Compared) -> list[Picture]:
    """Figures of by-layer numbers, with a panel per series and a line per report."""
    figures: dict[str, list[str]] = {}
    for some in numbers:
        for key in some:
            match, series = BY_LAYER.fullmatch(key), layer_series(key)
            if match is not None and series is not None:
                group = figures.setdefault(match["stem"] if match["kind"] else series.partition(".")[0], [])
                if series not in group:
                    group.append(series)
    return [_layer_picture(name, group, series, numbers, compared) for group, series in figures.items()]


def _layer_picture(
    name: str, group: str, several: Sequence[str], numbers: Sequence[Numbers], compared: Compared
) -> Picture:
    """One figure; on relative depth if the models, or the published one, have different numbers of layers."""
    depths = [_depth(report.numbers) for report in compared.reports]
    theirs = {series: line for series in several if len(line := layer_line(compared.published, series)) > 1}
    relative = len({*depths, *(max(line) for line in theirs.values())} - {0}) > 1
    panels = {
        series.removeprefix(f"{group}."): {
            label: _chart_line(line, depth if relative else 1)
            for label, some, depth in zip(compared.labels, numbers, depths, strict=True)
            if (line := layer_line(some, series))
        }
        for series in several
    }
    reference = {s.removeprefix(f"{group}."): _chart_line(t, max(t) if relative else 1) for s, t in theirs.items()}
    xlabel = "relative depth (layer / number of layers)" if relative else "layer"
    return Picture(
        re.sub(r"[^A-Za-z0-9._-]", "_", f"layers-{name}-{group}"),
        f"{group} by layer",
        charts.panel_chart(panels, xlabel=xlabel, reference=reference),
        f"Published: {compared.published_for}." if reference and compared.published_for else "",
    )


def _depth(numbers: Numbers) -> int:
    return max((int(match["layer"]) for key in numbers if (match := BY_LAYER.fullmatch(key))), default=0)


def _chart_line(values: Mapping[int, float], depth: int) -> charts.Line:
    return [layer / depth for layer in values], list(values.values())
