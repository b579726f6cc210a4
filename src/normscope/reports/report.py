"""A report as plain data: sections with tables, figures, claims and numbers. `reports.write` writes the files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERDICTS = {True: "holds", False: "does not hold", None: "cannot be said"}


@dataclass(frozen=True)
class Claim:
    """A claim, and whether it holds in this report."""

    text: str  # "Attention-weight mixing is far above norm-based mixing with residual and norm"
    holds: bool | None  # None: the data do not decide
    ours: str  # "96.1 % against 17.8 %", or why the claim is undecided
    published: str = ""
    evidence: str = ""  # the interval or test that decides: "95 % interval 3.1 to 8.2, bootstrap over 872 sequences"
    readings: tuple[str, ...] = ()  # the verdict under other readings: "axis=input: does not hold"
    own: bool = False  # a question of our own, not a claim of the paper

    @property
    def verdict(self) -> str:
        """ "holds", "does not hold" or "cannot be said"."""
        return VERDICTS[self.holds]


class ReportLink(NamedTuple):
    """A cell that links to a page, such as that of another report."""

    text: str
    folder: str  # of the page, relative to this report
    page: str = "report.html"


Cell = str | int | float | bool | Claim | ReportLink | None


@dataclass(frozen=True)
class Table:
    """A table of the report, also written as a CSV file."""

    name: str  # stem of its file, unique in the report: "table1-dispersion"
    title: str  # "Table 1. Dispersion of ||f(x)||"
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    formats: Mapping[str, str] = field(default_factory=dict)  # column -> display format (".2f"); CSV has full precision
    note: str = ""
    folded: bool = False  # collapsed in HTML, only the first rows in Markdown

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise NormscopeError(f"{self.name}: a row has {len(row)} cells for {len(self.columns)} columns: {row}")
        unknown = set(self.formats) - set(self.columns)
        if unknown:
            raise NormscopeError(f"{self.name}: formats for unknown columns: {', '.join(sorted(unknown))}.")

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        columns: Mapping[str, str],
        rows: Iterable[Iterable[Any]],
        note: str = "",
        folded: bool = False,
    ) -> Table:
        """A table whose columns are given with their formats: {"layer": "", "share": ".3f"}."""
        formats = {column: spec for column, spec in columns.items() if spec}
        return cls(name, title, tuple(columns), tuple(tuple(row) for row in rows), formats, note, folded)


@dataclass(frozen=True)
class Picture:
    """A figure of the report, also written as an SVG and a PDF file."""

    name: str  # stem of its files, unique in the report: "fig3-shares"
    title: str
    figure: Figure  # made by reports.charts
    note: str = ""


@dataclass(frozen=True)
class Check:
    """A published number and ours; `passed` is None if the check is shown but not counted."""

    key: str
    published: float
    ours: float
    tolerance: float
    passed: bool | None
    why: str = ""  # reason for the tolerance

    @property
    def verdict(self) -> str:
        """PASS, FAIL, or a dash if the check is not counted."""
        return {True: "PASS", False: "FAIL", None: "-"}[self.passed]


class ReadingValue(NamedTuple):
    """A choice that the paper leaves open, as it was made here."""

    name: str
    value: str
    meaning: str  # with the other choices and the default
    changed: bool = False  # from the default


@dataclass(frozen=True)
class Section:
    """The results of one experiment."""

    name: str
    title: str
    text: str = ""  # plain paragraphs separated by blank lines, without markup
    parts: tuple[Table | Picture, ...] = ()
    claims: tuple[Claim, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)  # headline numbers by key


@dataclass(frozen=True)
class Report:
    """The results of all experiments of a run."""

    paper: str
    title: str
    citation: str
    facts: tuple[tuple[str, str], ...]  # model, data, entries, completeness, versions, ...
    readings: tuple[ReadingValue, ...]
    sections: tuple[Section, ...]
    skipped: tuple[tuple[str, str], ...] = ()  # title of an experiment, reason why it was not run
    command: str = ""
    checks: tuple[Check, ...] = ()  # comparison with published numbers, if model and data are the paper's
    reproduction: bool = False  # reproduces a publication; otherwise one of our own studies
    members: tuple[Report, ...] = ()  # the reports that a joint report compares
    labels: tuple[str, ...] = ()  # short names of the members
    folders: tuple[str, ...] = ()  # their folders, relative to this report's

    @property
    def model(self) -> str:
        """The name or path of the model; empty if it is not stated."""
        return dict(self.facts).get("model", "")

    @property
    def data(self) -> str:
        """The corpus; empty without one."""
        return dict(self.facts).get("data", "")

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The claims of all sections."""
        return tuple(claim for section in self.sections for claim in section.claims)

    @property
    def numbers(self) -> dict[str, float]:
        """The headline numbers of all sections."""
        return {key: value for section in self.sections for key, value in section.numbers.items()}


def cell_to_python(cell: Any) -> Cell:
    """A cell as a Python value: numpy scalars are converted."""
    value: Cell = cell.item() if isinstance(cell, np.generic) else cell
    return value


def format_cell(cell: Any, spec: str = "") -> str:
    """A cell for display: thousands separators, four digits without a format, a dash for missing values."""
    value = cell_to_python(cell)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "\u2013"  # a dash
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if isinstance(value, Claim):
        return f"{value.verdict}: {value.ours}"
    if isinstance(value, ReportLink):
        return value.text
    if spec:
        return format(value, spec)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def none_if_nan(value: float) -> float | None:
    """The number, or None if it is NaN."""
    return None if math.isnan(value) else value


def numeric_columns(table: Table) -> tuple[bool, ...]:
    """Whether each column contains numbers, which are right-aligned."""
    return tuple(_are_numbers([cell_to_python(row[k]) for row in table.rows]) for k in range(len(table.columns)))


def _are_numbers(cells: Sequence[Cell]) -> bool:
    given = [cell for cell in cells if cell is not None]
    return bool(given) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in given)


def count_claims(claims: Iterable[Claim]) -> tuple[int, int, int]:
    """How many claims hold, do not hold, and are undecided."""
    verdicts = [claim.holds for claim in claims]
    return verdicts.count(True), verdicts.count(False), verdicts.count(None)


def tally_claims(claims: Sequence[Claim]) -> str:
    """ "3 of 6 claims hold, 1 does not, 2 cannot be decided. Of 2 questions of our own, 1 is answered yes." """
    paper, own = ([claim for claim in claims if claim.own is mine] for mine in (False, True))
    sentences = []
    if paper:
        holds, fails, open_ = count_claims(paper)
        parts = [f"{holds} of {len(paper)} claims {'holds' if holds == 1 else 'hold'}"]
        if fails:
            parts.append(f"{fails} {'does' if fails == 1 else 'do'} not")
        if open_:
            parts.append(f"{open_} cannot be decided")
        sentences.append(", ".join(parts) + ".")
    if own:
        yes, no, open_ = count_claims(own)
        count = f"{len(own)} question{'' if len(own) == 1 else 's'} of our own"
        sentences.append(f"{count}: {yes} answered yes, {no} no, {open_} open.")
    return " ".join(sentences)


def describe_changed(readings: Sequence[ReadingValue]) -> str:
    """How many choices that the paper leaves open differ from the default, in words."""
    changed = sum(one.changed for one in readings)
    found = f"{changed or 'none'} of {len(readings)} {'differ' if changed > 1 else 'differs'}"
    return f"How choices that the paper leaves open were made; {found} from the default."


def count_failures(checks: Sequence[Check]) -> int:
    """The number of failed checks."""
    return sum(check.passed is False for check in checks)


def split_paragraphs(given: str) -> list[str]:
    """Split a text into paragraphs at blank lines."""
    return [paragraph for paragraph in re.split(r"\n\s*\n", given.strip()) if paragraph.strip()]
