"""A report as GitHub-flavoured Markdown, with links to its figures and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from normscope.labels import count_label, visible_label_text
from normscope.reports import report as cells
from normscope.reports.report import (
    Claim,
    Picture,
    ReadingValue,
    Report,
    ReportLink,
    Section,
    Table,
    describe_changed,
    format_cell,
    split_paragraphs,
    tally_claims,
)

FOLDED = 20  # rows shown of a long table
STATES = {True: "holds", False: "does **not** hold", None: "cannot be said"}


def markdown_page(report: Report) -> str:
    """The source of report.md."""
    blocks = [f"# {escape_markdown(report.title)}", escape_markdown(report.citation)]
    if report.model:
        on = f" on {escape_markdown(report.data)}" if report.data else ""
        blocks.append(f"**{escape_markdown(report.model)}**{on}")
    for title, own in (("Claims", False), ("Questions of our own", True)):
        claims = [claim for claim in report.claims if claim.own is own]
        if claims:
            blocks += [f"## {title}", tally_claims(claims), markdown_claims(claims)]
    if report.checks:
        blocks += ["## Comparison with published numbers", _markdown_checks(report)]
    for section in report.sections:
        blocks += _markdown_section(section)
    if report.skipped:
        blocks += [
            "## Experiments not run",
            "\n".join(f"- {escape_markdown(title)}: {escape_markdown(why)}" for title, why in report.skipped),
        ]
    blocks += [
        "## This run",
        _markdown_table(("", ""), [(escape_markdown(a), escape_markdown(b)) for a, b in report.facts]),
    ]
    if report.command:
        blocks.append(f"```sh\n{''.join(map(_visible_in_markdown, report.command))}\n```")
    if report.readings:
        blocks += _markdown_readings(report.readings)
    return "\n\n".join(blocks) + "\n"


def _markdown_readings(readings: Sequence[ReadingValue]) -> list[str]:
    """Readings that were changed; those at their default come last, under their own heading."""
    changed, kept = ([one for one in readings if one.changed is state] for state in (True, False))
    said = describe_changed(readings)
    if kept:
        said += f" [{count_label(len(kept), 'reading')} at the default](#default-readings)."
    blocks = ["## Readings", said]
    for title, some in (("", changed), ("## Default readings", kept)):
        rows = [(markdown_code(one.name), markdown_code(one.value), escape_markdown(one.meaning)) for one in some]
        if rows:
            blocks += [*([title] if title else []), _markdown_table(("reading", "used here", "meaning"), rows)]
    return blocks


def markdown_claims(claims: Sequence[Claim]) -> str:
    """A table with one claim per row."""
    rows = [
        (
            escape_markdown(one.text),
            STATES[one.holds],
            escape_markdown(one.ours),
            escape_markdown(one.evidence),
            escape_markdown("; ".join(one.readings)),
            escape_markdown(one.published),
        )
        for one in claims
    ]
    columns = ("claim", "here", "ours", "evidence", "depends on the reading", "published")
    kept = [k for k in range(len(columns)) if k < 3 or any(row[k] for row in rows)]
    return _markdown_table([columns[k] for k in kept], [[row[k] for k in kept] for row in rows])


def escape_markdown(given: str) -> str:
    """The text of one paragraph, escaped so that Markdown shows it literally."""
    line = " ".join("".join(map(_visible_in_markdown, given)).split())
    line = re.sub(r"[\\`*<|$~]", r"\\\g<0>", line).replace("&", "&amp;").replace("](", "\\](")
    line = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", line)  # within a word it has no effect
    return re.sub(r"^([#>+-]|\d+[.)])(?=\s|$)", lambda m: m[1][:-1] + "\\" + m[1][-1], line)


def markdown_code(given: str) -> str:
    """A value as inline code."""
    line = " ".join("".join(map(_visible_in_markdown, given)).split()).replace("|", "\\|")
    fence = "``" if "`" in line else "`"
    return f"{fence}{line}{fence}" if fence == "`" else f"{fence} {line} {fence}"


def _visible_in_markdown(char: str) -> str:
    """Control characters and lone surrogates spelled out."""
    return char if char in "\n\t " else visible_label_text(char)


def _markdown_section(section: Section) -> list[str]:
    blocks = [f"## {escape_markdown(section.title)}"]
    blocks += map(escape_markdown, split_paragraphs(section.text))
    if section.claims:
        blocks.append("\n".join(_markdown_short_claim(claim) for claim in section.claims))
    for part in section.parts:
        blocks.append(f"### {escape_markdown(part.title)}")
        blocks.append(_markdown_picture(part) if isinstance(part, Picture) else _markdown_report_table(part))
        if part.note:
            blocks.append(escape_markdown(part.note))
    return blocks


def _markdown_short_claim(claim: Claim) -> str:
    return f"- {escape_markdown(claim.text)}: {STATES[claim.holds]} ({escape_markdown(claim.ours)})"


def _markdown_picture(picture: Picture) -> str:
    return f"![{escape_markdown(picture.title)}](figures/{picture.name}.svg)"


def _markdown_report_table(table: Table) -> str:
    rows = table.rows[:FOLDED] if table.folded else table.rows
    formats = [table.formats.get(column, "") for column in table.columns]
    written = [[_markdown_cell(cell, spec) for cell, spec in zip(row, formats, strict=True)] for row in rows]
    found = _markdown_table(
        [escape_markdown(column) for column in table.columns], written, cells.numeric_columns(table)
    )
    left = len(table.rows) - len(rows)
    more = f"{left:,} more rows are in " if left else "In full: "
    return f"{found}\n\n{more}[tables/{table.name}.csv](tables/{table.name}.csv)"


def _markdown_cell(cell: object, spec: str) -> str:
    if isinstance(cell, Claim):
        return f"{STATES[cell.holds]}: {escape_markdown(cell.ours)}"
    if isinstance(cell, ReportLink):
        page = "report.md" if cell.page == "report.html" else cell.page
        return f"[{escape_markdown(cell.text)}]({quote(f'{cell.folder}/{page}')})"
    return escape_markdown(format_cell(cell, spec))


def _markdown_checks(report: Report) -> str:
    rows = [
        (
            markdown_code(check.key),
            *map(format_cell, (check.published, check.ours, check.tolerance)),
            check.verdict,
            escape_markdown(check.why),
        )
        for check in report.checks
    ]
    right = (False, True, True, True, False, False)
    return _markdown_table(("number", "published", "ours", "tolerance", "", "reason for the tolerance"), rows, right)


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] | None = None) -> str:
    sides = right or [False] * len(columns)
    lines = [columns, ["---:" if side else ":---" for side in sides], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
