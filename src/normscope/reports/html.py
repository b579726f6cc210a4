"""A report as a self-contained page: no scripts, no network, figures and styles embedded, every text escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

from normscope._version import __version__
from normscope.labels import visible_text
from normscope.reports import report as cells
from normscope.reports.report import (
    READINGS,
    Check,
    Claim,
    Picture,
    Report,
    Section,
    Table,
    failures,
    paragraphs,
    tally,
)

STATES = {True: ("yes", "holds"), False: ("no", "does not hold"), None: ("open", "cannot be said")}
ENLARGED = 1.4  # how much larger than on paper a figure may become
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
FOLDED_CHECKS = 30  # more are collapsed


def page(report: Report, figures: Mapping[str, str]) -> str:
    """The source of report.html, given its figures by name as SVG."""
    parts: list[tuple[str, str, str]] = []  # anchor, title, content
    if report.claims:
        parts.append(("claims", "Claims", _claims_of_all(report)))
    parts.append(("run", "This run", _facts(report)))
    if report.readings:
        parts.append(("readings", "Readings", _readings(report)))
    if report.checks:
        parts.append(("published", "Beside the published numbers", _checks(report.checks)))
    for section in report.sections:
        parts.append((f"section-{section.name}", section.title, _section(section, figures)))
    if report.skipped:
        parts.append(("skipped", "Not run here", _skipped_list(report)))
    links = "\n".join(f'<li><a href="#{anchor}">{text(title)}</a></li>' for anchor, title, _ in parts)
    body = "\n".join(
        f'<section id="{anchor}">\n<h2>{text(title)}</h2>\n{content}\n</section>' for anchor, title, content in parts
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
<title>{text(report.title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<p class="kicker">{text(report.paper)}, {made} by normscope</p>
<h1>{text(report.title)}</h1>
<p class="citation">{text(report.citation)}</p>
</header>
<nav aria-label="Contents">
<h2>Contents</h2>
<ol>
{links}
</ol>
</nav>
<main>
{body}
</main>
<footer>normscope {text(__version__)}</footer>
</body>
</html>
"""


def text(given: str) -> str:
    """Any text as HTML; control characters and lone surrogates, which no page may hold, are spelled out."""
    return html.escape("".join(char if char in "\n\t " else visible_text(char) for char in given))


def prose(given: str) -> str:
    """A sentence as HTML, with real minus signs before its numbers."""
    return re.sub(r"(^|(?<=[\s(=,]))-(?=\d)", "\u2212", text(given))


def inline_svg(source: str, name: str, title: str) -> str:
    """An SVG file as part of a page: as wide as there is room, with unique ids.

    Only tags are changed, so a text such as `id="x"` in a figure stays as it is.
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
        f'aria-label="{text(title)}" style="max-width:{width:.0f}pt">{inner.strip()}</svg>'
    )


def _claims_of_all(report: Report) -> str:
    anchors = [(claim, f"#section-{section.name}") for section in report.sections for claim in section.claims]
    return f"<p>{text(tally(report.claims))}</p>\n{_claims(anchors)}"


def _claims(claims: Iterable[tuple[Claim, str]]) -> str:
    """Each claim with its verdict; a link to its section where one is given."""
    entries = []
    for claim, anchor in claims:
        state, verdict = STATES[claim.holds]
        link = f'<a href="{anchor}">{text(claim.text)}</a>' if anchor else text(claim.text)
        beside = f"<div><dt>published</dt><dd>{prose(claim.published)}</dd></div>" if claim.published else ""
        entries.append(
            f'<li><span class="state {state}">{verdict}</span><p>{link}</p>'
            f"<dl><div><dt>ours</dt><dd>{prose(claim.ours)}</dd></div>{beside}</dl></li>"
        )
    return '<ul class="claims">\n' + "\n".join(entries) + "\n</ul>"


def _facts(report: Report) -> str:
    rows = "\n".join(f'<tr><th scope="row">{text(a)}</th><td>{text(b)}</td></tr>' for a, b in report.facts)
    whole = re.sub(r"(?<= )--[a-z-]+", r"<span>\g<0></span>", text(report.command))  # a line may not end within
    command = f"\n<pre><code>{whole}</code></pre>" if whole else ""
    return f'<table class="facts"><tbody>\n{rows}\n</tbody></table>{command}'


def _readings(report: Report) -> str:
    rows = "\n".join(
        f'<div><dt><code>{text(name)}</code> <span>=</span> <code class="value">{text(value)}</code></dt>'
        f"<dd>{text(meaning)}</dd></div>"
        for name, value, meaning in report.readings
    )
    return f'<p>{READINGS}</p>\n<dl class="readings">\n{rows}\n</dl>'


def _checks(checks: Sequence[Check]) -> str:
    failed, counted = failures(checks), sum(check.passed is not None for check in checks)
    summary = f"{counted - failed} of {counted} numbers are within their tolerance"
    summary += f"; {len(checks) - counted} more are shown, but do not count." if counted < len(checks) else "."
    table = Table(
        "checks",
        "Numbers published for this model and data",
        ("number", "published", "ours", "tolerance", "verdict", "why this tolerance"),
        tuple((c.key, c.published, c.ours, c.tolerance, c.verdict, c.why) for c in checks),
        folded=len(checks) > FOLDED_CHECKS,
    )
    return f"<p>{text(summary)}</p>\n{_table(table)}"


def _section(section: Section, figures: Mapping[str, str]) -> str:
    blocks = [f"<p>{prose(paragraph)}</p>" for paragraph in paragraphs(section.text)]
    if section.claims:
        blocks.append(_claims((claim, "") for claim in section.claims))
    blocks += [_picture(p, figures[p.name]) if isinstance(p, Picture) else _table(p) for p in section.parts]
    return "\n".join(blocks)


def _picture(picture: Picture, source: str) -> str:
    note = f"<p>{prose(picture.note)}</p>" if picture.note else ""
    return (
        f'<figure id="{picture.name}">\n<div class="card" tabindex="0">'
        f"{inline_svg(source, picture.name, picture.title)}</div>\n"
        f"<figcaption><strong>{text(picture.title)}</strong>{note}</figcaption>\n</figure>"
    )


def _table(table: Table) -> str:
    right = (False, *cells.numeric_columns(table)[1:])  # the first column names its row
    formats = [table.formats.get(column, "") for column in table.columns]

    def line(tag: str, row: Iterable[str]) -> str:
        marked = (f"<{tag}{' class=n' if side else ''}>{cell}</{tag}>" for cell, side in zip(row, right, strict=True))
        return f"<tr>{''.join(marked)}</tr>"

    head = line("th", map(text, table.columns))
    rows = [line("td", map(_cell, row, formats)) for row in table.rows]
    body = "\n".join(rows)
    grid = f'<div class="wide" tabindex="0"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody></table></div>'
    if table.folded:
        grid = f"<details><summary>{len(rows):,} rows</summary>{grid}</details>"
    note = f"<p>{prose(table.note)}</p>" if table.note else ""
    return (
        f'<figure class="table" id="{table.name}">\n<figcaption><strong>{text(table.title)}</strong></figcaption>\n'
        f"{grid}\n{f'<figcaption>{note}</figcaption>' if note else ''}</figure>"
    )


def _cell(cell: object, spec: str) -> str:
    value = cells.to_python(cell)
    written = cells.format_cell(value, spec)
    if isinstance(value, int | float) and written.startswith("-"):
        written = "\u2212" + written[1:]
    state = {"PASS": "yes", "FAIL": "no"}.get(written) if isinstance(value, str) else None
    return f'<span class="state {state}">{written}</span>' if state else text(written)


def _skipped_list(report: Report) -> str:
    rows = "\n".join(f"<div><dt>{text(title)}</dt><dd>{text(why)}</dd></div>" for title, why in report.skipped)
    return f'<dl class="skipped">\n{rows}\n</dl>'
