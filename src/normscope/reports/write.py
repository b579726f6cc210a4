"""The files of a report.

report.html        self-contained, with embedded styles and figures
report.md          the same content, with links to the figures
tables/NAME.csv    each table, complete and in full precision
figures/NAME.svg   each figure, also as NAME.pdf
numbers.csv        headline numbers by key, with the published numbers if model and data are the paper's
claims.csv         claims, whether they hold, and the evidence
report.json        facts, readings, claims, numbers and checks for programs (see `reports.saved`)

A joint report has the same files; its numbers.csv has a column for each report, and mean and SD over models.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from normscope.errors import NormscopeError
from normscope.files import write_atomically
from normscope.reports import charts, html, markdown, saved
from normscope.reports.joint import joint_claim_rows
from normscope.reports.joint_numbers import joint_number_rows
from normscope.reports.report import Cell, Claim, Picture, Report, ReportLink, Table, cell_to_python, format_cell

NUMBER_COLUMNS = ("section", "key", "ours", "published", "tolerance", "passed")
CLAIM_COLUMNS = ("claim", "holds", "ours", "published", "evidence", "other readings", "own")


def write_report(report: Report, folder: str | Path) -> Path:
    """Write all files of a report, each atomically; returns the path of report.html."""
    check_part_names(report)
    root = Path(folder)
    parts = [part for section in report.sections for part in section.parts]
    pictures = [part for part in parts if isinstance(part, Picture)]
    figures = {picture.name: charts.chart_to_svg(picture.figure, picture.name) for picture in pictures}
    files = {f"tables/{part.name}.csv": csv_text(part.columns, part.rows) for part in parts if isinstance(part, Table)}
    files |= {f"figures/{name}.svg": text for name, text in figures.items()}
    files |= {
        "numbers.csv": csv_text(*_number_rows(report)),
        "claims.csv": csv_text(*_claim_rows(report)),
        saved.NAME: saved.report_to_json(report),
        "report.md": markdown.markdown_page(report),
        "report.html": html.html_report_page(report, figures),
    }
    contents = {name: text.encode("utf-8", "backslashreplace") for name, text in files.items()}
    contents |= {f"figures/{picture.name}.pdf": charts.chart_to_pdf(picture.figure) for picture in pictures}
    for name, content in contents.items():
        _write_report_file(root / name, content)
    return root / "report.html"


def check_part_names(report: Report) -> None:
    """Check that the names of sections, tables and figures, used as anchors and file names, are valid and unique."""
    seen: set[str] = set()
    for section in report.sections:
        for name in (section.name, *(part.name for part in section.parts)):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise NormscopeError(f"{name!r} is not a valid name in a report: use only letters, digits and - . _")
        for part in section.parts:
            if part.name.lower() in seen:
                raise NormscopeError(f"Two parts of the report have the name {part.name!r}.")
            seen.add(part.name.lower())
    if len({section.name for section in report.sections}) < len(report.sections):
        raise NormscopeError("Two sections of the report have the same name.")


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV text with numbers in full precision and empty cells for None."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_csv_cell(cell_to_python(cell)) for cell in row])
    return buffer.getvalue()


def _csv_cell(cell: Cell) -> Any:
    if isinstance(cell, Claim | ReportLink):
        return format_cell(cell)
    return str(cell).lower() if isinstance(cell, bool) else cell


def _claim_rows(report: Report) -> tuple[Sequence[str], list[tuple[Cell, ...]]]:
    """The columns and rows of claims.csv."""
    if report.members:
        joint = joint_claim_rows(report.members, report.labels)
        return ("section", "report", *CLAIM_COLUMNS), [(name, label, *_claim_cells(one)) for name, label, one in joint]
    rows = [(section.name, *_claim_cells(claim)) for section in report.sections for claim in section.claims]
    return ("section", *CLAIM_COLUMNS), rows


def _claim_cells(one: Claim) -> tuple[Cell, ...]:
    return (one.text, one.holds, one.ours, one.published, one.evidence, "; ".join(one.readings), one.own)


def _number_rows(report: Report) -> tuple[Sequence[str], list[tuple[Cell, ...]]]:
    """The columns and rows of numbers.csv."""
    if report.members:
        head, *joint = joint_number_rows(report.members, report.labels)
        return [str(column) for column in head], joint
    checks = {check.key: check for check in report.checks}
    rows: list[tuple[Cell, ...]] = []
    for section in report.sections:
        for key, value in section.numbers.items():
            check = checks.get(key)
            beside = (check.published, check.tolerance, check.passed) if check else (None, None, None)
            rows.append((section.name, key, float(value), *beside))
    return NUMBER_COLUMNS, rows


def _write_report_file(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise NormscopeError(f"Cannot write {path}: {error.strerror or error}.") from error
