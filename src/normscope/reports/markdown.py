"""A report as Markdown (GitHub's), with links to its figures and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from normscope.labels import visible_text
from normscope.reports import report as cells
from normscope.reports.report import READINGS, Claim, Picture, Report, Section, Table, format_cell, paragraphs, tally

FOLDED = 20  # rows of a long table that are shown
STATES = {True: "holds", False: "does **not** hold", None: "cannot be said"}


def page(report: Report) -> str:
    """The source of report.md."""
    blocks = [f"# {text(report.title)}", text(report.citation)]
    if report.claims:
        blocks += ["## Claims", tally(report.claims), claims_table(report.claims)]
    blocks += ["## This run", _table(("", ""), [(text(a), text(b)) for a, b in report.facts])]
    if report.command:
        blocks.append(f"```sh\n{''.join(map(_visible, report.command))}\n```")
    if report.readings:
        rows = [(code(name), code(value), text(meaning)) for name, value, meaning in report.readings]
        blocks += ["## Readings", READINGS, _table(("reading", "used here", "meaning"), rows)]
    if report.checks:
        blocks += ["## Beside the published numbers", _checks(report)]
    for section in report.sections:
        blocks += _section(section)
    if report.skipped:
        blocks += ["## Not run here", "\n".join(f"- {text(title)}: {text(why)}" for title, why in report.skipped)]
    return "\n\n".join(blocks) + "\n"


def claims_table(claims: Sequence[Claim]) -> str:
    """Each claim on a line."""
    rows = [(text(claim.text), STATES[claim.holds], text(claim.ours), text(claim.published)) for claim in claims]
    return _table(("claim", "here", "ours", "published"), rows)


def text(given: str) -> str:
    """The text of one paragraph, escaped so that Markdown shows it as it is."""
    line = " ".join("".join(map(_visible, given)).split())
    line = re.sub(r"[\\`*<|$~]", r"\\\g<0>", line).replace("&", "&amp;").replace("](", "\\](")
    line = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", line)  # within a word it means nothing
    return re.sub(r"^([#>+-]|\d+[.)])(?=\s|$)", lambda m: m[1][:-1] + "\\" + m[1][-1], line)


def code(given: str) -> str:
    """A value as code."""
    line = " ".join("".join(map(_visible, given)).split()).replace("|", "\\|")
    fence = "``" if "`" in line else "`"
    return f"{fence}{line}{fence}" if fence == "`" else f"{fence} {line} {fence}"


def _visible(char: str) -> str:
    """Control characters and lone surrogates spelled out."""
    return char if char in "\n\t " else visible_text(char)


def _section(section: Section) -> list[str]:
    blocks = [f"## {text(section.title)}"]
    blocks += map(text, paragraphs(section.text))
    if section.claims:
        blocks.append(claims_table(section.claims))
    for part in section.parts:
        blocks.append(f"### {text(part.title)}")
        blocks.append(_picture(part) if isinstance(part, Picture) else _cells(part))
        if part.note:
            blocks.append(text(part.note))
    return blocks


def _picture(picture: Picture) -> str:
    return f"![{text(picture.title)}](figures/{picture.name}.svg)"


def _cells(table: Table) -> str:
    rows = table.rows[:FOLDED] if table.folded else table.rows
    formats = [table.formats.get(column, "") for column in table.columns]
    written = [[text(format_cell(cell, spec)) for cell, spec in zip(row, formats, strict=True)] for row in rows]
    found = _table([text(column) for column in table.columns], written, cells.numeric_columns(table))
    left = len(table.rows) - len(rows)
    more = f"{left:,} more rows are in " if left else "In full: "
    return f"{found}\n\n{more}[tables/{table.name}.csv](tables/{table.name}.csv)"


def _checks(report: Report) -> str:
    rows = [
        (code(c.key), format_cell(c.published), format_cell(c.ours), format_cell(c.tolerance), c.verdict, text(c.why))
        for c in report.checks
    ]
    right = (False, True, True, True, False, False)
    return _table(("number", "published", "ours", "tolerance", "", "why this tolerance"), rows, right)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] | None = None) -> str:
    sides = right or [False] * len(columns)
    lines = [columns, ["---:" if side else ":---" for side in sides], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
