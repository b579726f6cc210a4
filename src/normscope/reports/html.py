"""A report as a self-contained HTML page: no scripts or network access, embedded figures and styles, escaped text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from urllib.parse import quote

from normscope._version import __version__
from normscope.labels import count_label, visible_label_text
from normscope.reports import report as cells
from normscope.reports.report import (
    Check,
    Claim,
    Picture,
    ReadingValue,
    Report,
    ReportLink,
    Section,
    Table,
    count_failures,
    split_paragraphs,
    tally_claims,
)

STATES = {True: "yes", False: "no", None: "open"}  # classes of the style sheet
ENLARGED = 1.4  # largest magnification of a figure, relative to its printed size
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
FOLDED_CHECKS = 30  # longer lists of checks are collapsed


def html_report_page(report: Report, figures: Mapping[str, str]) -> str:
    """The source of report.html, given its figures as SVG by name."""
    parts = _html_parts(report, figures)
    links = "\n".join(f'<li><a href="#{anchor}">{escape_html(title)}</a></li>' for anchor, title, _ in parts)
    body = "\n".join(
        f'<section id="{anchor}">\n<h2>{escape_html(title)}</h2>\n{content}\n</section>'
        for anchor, title, content in parts
    )
    made = "reproduced" if report.reproduction else "measured"
    style = files("normscope.reports").joinpath("report.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape_html(report.title)}</title>
<style>
{style}</style>
</head>
<body{' class="joint"' if report.members else ""}>
<header>
<p class="kicker">{escape_html(report.paper)}, {made} by normscope</p>
<h1>{escape_html(report.title)}</h1>
<p class="citation">{escape_html(report.citation)}</p>
{_html_setting(report)}</header>
<nav aria-label="Contents">
<h2>Contents</h2>
<ol>
{links}
</ol>
</nav>
<main>
{body}
</main>
<footer>normscope {escape_html(__version__)}</footer>
</body>
</html>
"""


def _html_parts(report: Report, figures: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Anchor, title and content of each part of the page: what a reader came for, then how it was made."""
    parts: list[tuple[str, str, str]] = []
    for anchor, title, own in (("claims", "Claims", False), ("own", "Questions of our own", True)):
        if any(claim.own is own for claim in report.claims):
            parts.append((anchor, title, _html_all_claims(report, own)))
    if report.checks:
        parts.append(("published", "Comparison with published numbers", _html_checks(report.checks)))
    for section in report.sections:
        parts.append((f"section-{section.name}", section.title, _html_section(section, figures)))
    if report.skipped:
        parts.append(("skipped", "Experiments not run", _html_skipped(report)))
    parts.append(("run", "This run", _html_facts(report)))
    if report.readings:
        parts.append(("readings", "Readings", _html_readings(report)))
    return parts


def _html_setting(report: Report) -> str:
    """One line about the model and the data."""
    if not report.model:
        return ""
    data = f" on {escape_html(report.data)}" if report.data else ""
    return f'<p class="setting"><strong>{escape_html(report.model)}</strong>{data}</p>\n'


def escape_html(given: str) -> str:
    """Text escaped for HTML; control characters and lone surrogates, which HTML does not allow, are spelled out."""
    return html.escape("".join(char if char in "\n\t " else visible_label_text(char) for char in given))


def html_sentence(given: str) -> str:
    """A sentence as HTML, with typographic minus signs before numbers."""
    return re.sub(r"(^|(?<=[\s(=,]))-(?=\d)", "\u2212", escape_html(given))


def embedded_svg(source: str, name: str, title: str) -> str:
    """An SVG file for embedding in a page, scaled to the available width and with unique ids.

    Only tags are edited, so text such as `id="x"` inside a figure is left unchanged.
    """
    root = re.search(r"<svg\b[^>]*>", source)
    assert root is not None
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', root[0])
    assert size is not None
    inner = source[root.end() : source.rindex("</svg>")]
    inner = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>", "", inner, flags=re.DOTALL)
    prefix = f"{name}-"

    def rename(tag: re.Match[str]) -> str:
        renamed = re.sub(r'(\bid="|\bhref="#|url\(#)', lambda found: found[1] + prefix, tag[0])
        return renamed.replace("xlink:href", "href")

    inner = re.sub(r"<[a-zA-Z][^>]*>", rename, inner)
    width = float(size[1]) * ENLARGED
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[1]} {size[2]}" role="img" '
        f'aria-label="{escape_html(title)}" style="max-width:{width:.0f}pt">{inner.strip()}</svg>'
    )


def _html_all_claims(report: Report, own: bool) -> str:
    """The claims of the paper, or our own questions, with everything that is known about them."""
    found = [
        (claim, f"#section-{section.name}")
        for section in report.sections
        for claim in section.claims
        if claim.own is own
    ]
    entries = []
    for claim, anchor in found:
        rows = {
            "ours": claim.ours,
            "evidence": claim.evidence,
            "depends on the reading": "; ".join(claim.readings),
            "published": claim.published,
        }
        facts = "".join(f"<div><dt>{k}</dt><dd>{html_sentence(v)}</dd></div>" for k, v in rows.items() if v)
        link = f'<p><a href="{anchor}">{escape_html(claim.text)}</a></p>'
        entries.append(f"<li>{_html_verdict(claim)}{link}<dl>{facts}</dl></li>")
    tally = escape_html(tally_claims([claim for claim, _ in found]))
    return f'<p>{tally}</p>\n<ul class="claims">\n' + "\n".join(entries) + "\n</ul>"


def _html_section_claims(claims: Iterable[Claim]) -> str:
    """Claims in short, next to the tables and figures that they are about."""
    entries = (
        f"<li>{_html_verdict(claim)}<p>{escape_html(claim.text)}</p><dl><div><dd>{html_sentence(claim.ours)}</dd></div>"
        "</dl></li>"
        for claim in claims
    )
    return '<ul class="claims short">\n' + "\n".join(entries) + "\n</ul>"


def _html_verdict(claim: Claim, hint: str = "") -> str:
    title = f' title="{escape_html(hint)}"' if hint else ""
    return f'<span class="state {STATES[claim.holds]}"{title}>{claim.verdict}</span>'


def _html_facts(report: Report) -> str:
    lines = (f'<tr><th scope="row">{escape_html(a)}</th><td>{escape_html(b)}</td></tr>' for a, b in report.facts)
    rows = "\n".join(lines)
    whole = re.sub(r"(?<= )--[a-z-]+", r"<span>\g<0></span>", escape_html(report.command))  # keeps options on one line
    command = f"\n<pre><code>{whole}</code></pre>" if whole else ""
    return f'<table class="facts"><tbody>\n{rows}\n</tbody></table>{command}'


def _html_readings(report: Report) -> str:
    """Readings that were changed; those at their default are folded away."""
    changed, kept = ([one for one in report.readings if one.changed is state] for state in (True, False))
    shown = f"<p>{cells.describe_changed(report.readings)}</p>"
    if changed:
        shown += f"\n{_html_reading_list(changed)}"
    if kept:
        title = f"{count_label(len(kept), 'reading')} at the default"
        shown += f'\n<details class="defaults"><summary>{title}</summary>{_html_reading_list(kept)}</details>'
    return shown


def _html_reading_list(readings: Iterable[ReadingValue]) -> str:
    rows = "\n".join(
        f"<div><dt><code>{escape_html(one.name)}</code> <span>=</span> "
        f'<code class="value">{escape_html(one.value)}</code></dt><dd>{escape_html(one.meaning)}</dd></div>'
        for one in readings
    )
    return f'<dl class="readings">\n{rows}\n</dl>'


def _html_checks(checks: Sequence[Check]) -> str:
    failed, counted = count_failures(checks), sum(check.passed is not None for check in checks)
    summary = f"{counted - failed} of {counted} numbers are within tolerance"
    summary += f"; {len(checks) - counted} more are shown but not counted." if counted < len(checks) else "."
    table = Table(
        "checks",
        "Numbers published for this model and data",
        ("number", "published", "ours", "tolerance", "verdict", "reason for the tolerance"),
        tuple((c.key, c.published, c.ours, c.tolerance, c.verdict, c.why) for c in checks),
        folded=len(checks) > FOLDED_CHECKS,
    )
    return f"<p>{escape_html(summary)}</p>\n{_html_table(table)}"


def _html_section(section: Section, figures: Mapping[str, str]) -> str:
    blocks = [f"<p>{html_sentence(paragraph)}</p>" for paragraph in split_paragraphs(section.text)]
    if section.claims:
        blocks.append(_html_section_claims(section.claims))
    blocks += [_html_picture(p, figures[p.name]) if isinstance(p, Picture) else _html_table(p) for p in section.parts]
    return "\n".join(blocks)


def _html_picture(picture: Picture, source: str) -> str:
    note = f"<p>{html_sentence(picture.note)}</p>" if picture.note else ""
    return (
        f'<figure id="{picture.name}">\n<div class="card" tabindex="0">'
        f"{embedded_svg(source, picture.name, picture.title)}</div>\n"
        f"<figcaption><strong>{escape_html(picture.title)}</strong>{note}</figcaption>\n</figure>"
    )


def _html_table(table: Table) -> str:
    right = (False, *cells.numeric_columns(table)[1:])  # the first column labels the row
    formats = [table.formats.get(column, "") for column in table.columns]

    def line(tag: str, row: Iterable[str]) -> str:
        marked = (f"<{tag}{' class=n' if side else ''}>{cell}</{tag}>" for cell, side in zip(row, right, strict=True))
        return f"<tr>{''.join(marked)}</tr>"

    head = line("th", map(escape_html, table.columns))
    rows = [line("td", map(_html_cell, row, formats)) for row in table.rows]
    body = "\n".join(rows)
    matrix = " matrix" if any(isinstance(cell, Claim) for row in table.rows for cell in row) else ""
    grid = f"<table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody></table>"
    grid = f'<div class="wide{matrix}" tabindex="0">{grid}</div>'
    if table.folded:
        grid = f"<details><summary>{len(rows):,} rows</summary>{grid}</details>"
    note = f"<p>{html_sentence(table.note)}</p>" if table.note else ""
    return (
        f'<figure class="table" id="{table.name}">\n'
        f"<figcaption><strong>{escape_html(table.title)}</strong></figcaption>\n"
        f"{grid}\n{f'<figcaption>{note}</figcaption>' if note else ''}</figure>"
    )


def _html_cell(cell: object, spec: str) -> str:
    value = cells.cell_to_python(cell)
    if isinstance(value, Claim):
        hint = "; ".join(part for part in (value.evidence, *value.readings) if part)
        return f"{_html_verdict(value, hint)}<span>{html_sentence(value.ours)}</span>"
    if isinstance(value, ReportLink):
        return f'<a href="{escape_html(quote(f"{value.folder}/{value.page}"))}">{escape_html(value.text)}</a>'
    written = cells.format_cell(value, spec)
    if isinstance(value, int | float) and written.startswith("-"):
        written = "\u2212" + written[1:]
    state = {"PASS": "yes", "FAIL": "no"}.get(written) if isinstance(value, str) else None
    return f'<span class="state {state}">{written}</span>' if state else escape_html(written)


def _html_skipped(report: Report) -> str:
    rows = (f"<div><dt>{escape_html(title)}</dt><dd>{escape_html(why)}</dd></div>" for title, why in report.skipped)
    return '<dl class="skipped">\n' + "\n".join(rows) + "\n</dl>"
