"""A report as plain data: sections with tables, figures, claims and numbers. `reports.write` makes the files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = str | int | float | bool | None
READINGS = "Where the paper leaves something open, this is how it was read."


@dataclass(frozen=True)
class Table:
    """A table of the report and a CSV file."""

    name: str  # stem of its file, unique in the report: "table1-dispersion"
    title: str  # "Table 1. Dispersion of ||f(x)||"
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    formats: Mapping[str, str] = field(default_factory=dict)  # column -> how people see it (".2f"); CSV is in full
    note: str = ""
    folded: bool = False  # long: collapsed in HTML, the first rows only in Markdown

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise NormscopeError(f"{self.name}: a row of {len(row)} cells under {len(self.columns)} columns: {row}")
        unknown = set(self.formats) - set(self.columns)
        if unknown:
            raise NormscopeError(f"{self.name}: formats of columns it does not have: {', '.join(sorted(unknown))}.")

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
    """A figure of the report, and an SVG and a PDF file."""

    name: str  # stem of its files, unique in the report: "fig3-shares"
    title: str
    figure: Figure  # made by reports.charts
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim, and whether it holds here."""

    text: str  # "Attention-weight mixing is far above norm-based mixing with residual and norm"
    holds: bool | None  # None: cannot be said here
    ours: str  # "96.1 % against 17.8 %", or why it cannot be said
    published: str = ""


@dataclass(frozen=True)
class Check:
    """A published number beside ours; `passed` None: it is shown but does not count."""

    key: str
    published: float
    ours: float
    tolerance: float
    passed: bool | None
    why: str = ""  # this tolerance

    @property
    def verdict(self) -> str:
        """PASS, FAIL, or a dash if the check does not count."""
        return {True: "PASS", False: "FAIL", None: "-"}[self.passed]


@dataclass(frozen=True)
class Section:
    """The results of one experiment."""

    name: str
    title: str
    text: str = ""  # plain paragraphs with blank lines between them, no markup
    parts: tuple[Table | Picture, ...] = ()
    claims: tuple[Claim, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)  # headline numbers by key


@dataclass(frozen=True)
class Report:
    """The results of all experiments that were run."""

    paper: str
    title: str
    citation: str
    facts: tuple[tuple[str, str], ...]  # model, data, entries, completeness, versions, ...
    readings: tuple[tuple[str, str, str], ...]  # name, value used, what it means and the other choices
    sections: tuple[Section, ...]
    skipped: tuple[tuple[str, str], ...] = ()  # title of an experiment, why it was not run
    command: str = ""
    checks: tuple[Check, ...] = ()  # ours beside published, where model and data are the paper's
    reproduction: bool = False  # of something published; otherwise a study of its own

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
    """A cell as people read it: thousands separated, four digits without a format, a dash if there is no value."""
    value = cell_to_python(cell)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "\u2013"  # a dash
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if spec:
        return format(value, spec)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def none_if_nan(value: float) -> float | None:
    """A number for a table; None if it is not defined."""
    return None if math.isnan(value) else value


def numeric_columns(table: Table) -> tuple[bool, ...]:
    """Whether each column holds numbers, and so is aligned to the right."""
    return tuple(_are_numbers([cell_to_python(row[k]) for row in table.rows]) for k in range(len(table.columns)))


def _are_numbers(cells: Sequence[Cell]) -> bool:
    given = [cell for cell in cells if cell is not None]
    return bool(given) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in given)


def tally_claims(claims: Sequence[Claim]) -> str:
    """ "3 of 6 claims hold here, 1 does not, 2 cannot be said." """
    holds, fails, open_ = (sum(claim.holds is state for claim in claims) for state in (True, False, None))
    parts = [f"{holds} of {len(claims)} claims {'holds' if holds == 1 else 'hold'} here"]
    if fails:
        parts.append(f"{fails} {'does' if fails == 1 else 'do'} not")
    if open_:
        parts.append(f"{open_} cannot be said")
    return ", ".join(parts) + "."


def count_failures(checks: Sequence[Check]) -> int:
    """How many checks failed."""
    return sum(check.passed is False for check in checks)


def split_paragraphs(given: str) -> list[str]:
    """The paragraphs of a text, which has blank lines between them."""
    return [paragraph for paragraph in re.split(r"\n\s*\n", given.strip()) if paragraph.strip()]
