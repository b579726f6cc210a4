"""A report: what a paper's experiments came to. Plain data here; `write` makes the files.

report.html        stands alone: styles and figures are in it, nothing is loaded
report.md          the same, with links to the figures
tables/NAME.csv    every table, in full and in full precision
figures/NAME.svg   every figure, and as NAME.pdf
numbers.csv        the headline numbers by key, beside the published ones where model and data are the paper's
claims.csv         the claims of the paper, and whether they hold here
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from normscope.engine.files import atomic
from normscope.errors import NormscopeError
from normscope.papers.verify import Check

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
    folded: bool = False  # long: behind a line to click in HTML, the first rows only in Markdown

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise NormscopeError(f"{self.name}: a row of {len(row)} cells under {len(self.columns)} columns: {row}")
        unknown = set(self.formats) - set(self.columns)
        if unknown:
            raise NormscopeError(f"{self.name}: formats of columns it does not have: {', '.join(sorted(unknown))}.")


@dataclass(frozen=True)
class Picture:
    """A figure of the report, and an SVG and a PDF file."""

    name: str  # stem of its files, unique in the report: "fig3-shares"
    title: str
    figure: Figure  # made by papers.charts
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, and whether it holds here."""

    text: str  # "Attention-weight mixing is far above norm-based mixing with residual and norm"
    holds: bool | None  # None: cannot be said here
    ours: str  # "96.1 % against 17.8 %", or why it cannot be said
    published: str = ""


@dataclass(frozen=True)
class Section:
    """What one experiment came to."""

    name: str
    title: str
    text: str = ""  # plain paragraphs with blank lines between them, no markup
    parts: tuple[Table | Picture, ...] = ()
    claims: tuple[Claim, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)  # headline numbers by key


@dataclass(frozen=True)
class Report:
    """All experiments of a paper that were run."""

    paper: str
    title: str
    citation: str
    facts: tuple[tuple[str, str], ...]  # model, data, entries, completeness, versions, ...
    readings: tuple[tuple[str, str, str], ...]  # name, value used, what it means and the other choices
    sections: tuple[Section, ...]
    skipped: tuple[tuple[str, str], ...] = ()  # title of an experiment, why it was not run
    command: str = ""
    checks: tuple[Check, ...] = ()  # ours beside published, where model and data are the paper's

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The claims of all sections."""
        return tuple(claim for section in self.sections for claim in section.claims)

    @property
    def numbers(self) -> dict[str, float]:
        """The headline numbers of all sections."""
        return {key: value for section in self.sections for key, value in section.numbers.items()}


def write(report: Report, folder: str | Path) -> Path:
    """All files of a report, each whole or not at all; the path of report.html."""
    from normscope.papers import charts, report_html, report_markdown  # these read the classes above

    check_names(report)
    root = Path(folder)
    tables = [part for section in report.sections for part in section.parts if isinstance(part, Table)]
    pictures = [part for section in report.sections for part in section.parts if isinstance(part, Picture)]
    drawn = {picture.name: charts.svg(picture.figure, picture.name) for picture in pictures}
    files = {f"tables/{table.name}.csv": csv_text(table.columns, table.rows) for table in tables}
    files |= {f"figures/{name}.svg": text for name, text in drawn.items()}
    files |= {
        "numbers.csv": csv_text(*_numbers(report)),
        "claims.csv": csv_text(*_claims(report)),
        "report.md": report_markdown.page(report),
        "report.html": report_html.page(report, drawn),
    }
    contents = {name: text.encode("utf-8", "backslashreplace") for name, text in files.items()}
    contents |= {f"figures/{picture.name}.pdf": charts.pdf(picture.figure) for picture in pictures}
    for name, content in contents.items():
        _put(root / name, content)
    return root / "report.html"


def check_names(report: Report) -> None:
    """Sections, tables and figures become anchors and files: their names must be usable, and differ."""
    seen: set[str] = set()
    for section in report.sections:
        for name in (section.name, *(part.name for part in section.parts)):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise NormscopeError(f"{name!r} cannot name a part of a report: letters, digits and - . _ only.")
        for part in section.parts:
            if part.name.lower() in seen:
                raise NormscopeError(f"Two parts of the report are called {part.name!r}.")
            seen.add(part.name.lower())
    if len({section.name for section in report.sections}) < len(report.sections):
        raise NormscopeError("Two sections of the report have the same name.")


def plain(cell: Any) -> Cell:
    """A cell as Python's own kind of value: numpy's numbers are unwrapped."""
    value: Cell = cell.item() if isinstance(cell, np.generic) else cell
    return value


def shown(cell: Any, spec: str = "") -> str:
    """A cell as people read it: thousands apart, four digits where no format is given, a dash for nothing."""
    value = plain(cell)
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


def known(value: float) -> float | None:
    """A number for a table; None for what is not defined."""
    return None if math.isnan(value) else value


def numeric(table: Table) -> tuple[bool, ...]:
    """Which columns of a table hold numbers, and so are set to the right."""
    return tuple(_are_numbers([plain(row[k]) for row in table.rows]) for k in range(len(table.columns)))


def _are_numbers(cells: Sequence[Cell]) -> bool:
    given = [cell for cell in cells if cell is not None]
    return bool(given) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in given)


def tally(claims: Sequence[Claim]) -> str:
    """ "3 of 6 claims hold here, 1 does not, 2 cannot be said." """
    holds, fails, open_ = (sum(claim.holds is state for claim in claims) for state in (True, False, None))
    said = [f"{holds} of {len(claims)} claims {'holds' if holds == 1 else 'hold'} here"]
    if fails:
        said.append(f"{fails} {'does' if fails == 1 else 'do'} not")
    if open_:
        said.append(f"{open_} cannot be said")
    return ", ".join(said) + "."


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A CSV file: numbers in full precision, nothing as an empty cell."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = (plain(cell) for cell in row)
        writer.writerow([str(cell).lower() if isinstance(cell, bool) else cell for cell in cells])
    return buffer.getvalue()


def _claims(report: Report) -> tuple[tuple[str, ...], list[tuple[Cell, ...]]]:
    rows: list[tuple[Cell, ...]] = [
        (section.name, claim.text, claim.holds, claim.ours, claim.published)
        for section in report.sections
        for claim in section.claims
    ]
    return ("section", "claim", "holds", "ours", "published"), rows


def _numbers(report: Report) -> tuple[tuple[str, ...], list[tuple[Cell, ...]]]:
    checks = {check.key: check for check in report.checks}
    rows: list[tuple[Cell, ...]] = []
    for section in report.sections:
        for key, value in section.numbers.items():
            check = checks.get(key)
            beside = (check.published, check.tolerance, check.passed) if check else (None, None, None)
            rows.append((section.name, key, float(value), *beside))
    return ("section", "key", "ours", "published", "tolerance", "passed"), rows


def _put(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise NormscopeError(f"Cannot write {path}: {error.strerror or error}.") from error
