"""A report as a page that stands alone: no scripts, no network, figures and styles within it, every text escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

from normscope._version import __version__
from normscope.papers import published
from normscope.papers.report import READINGS, Claim, Picture, Report, Section, Table, numeric, plain, shown, tally
from normscope.papers.verify import Check, failures, verdict
from normscope.view.labels import visible

STATES = {True: ("yes", "holds"), False: ("no", "does not hold"), None: ("open", "cannot be said")}
ENLARGED = 1.4  # how much larger than on paper a figure may become
FOLDED_CHECKS = 30  # more are behind a line to click


def page(report: Report, drawn: Mapping[str, str]) -> str:
    """The source of report.html; `drawn` are the figures by name, as SVG files."""
    parts: list[tuple[str, str, str]] = []  # anchor, title, content
    if report.claims:
        parts.append(("claims", "Claims", _claims_of_all(report)))
    parts.append(("run", "This run", _facts(report)))
    if report.readings:
        parts.append(("readings", "Readings", _readings(report)))
    if report.checks:
        parts.append(("published", "Beside the published numbers", _checks(report.checks)))
    for section in report.sections:
        parts.append((f"section-{section.name}", section.title, _section(section, drawn)))
    if report.skipped:
        parts.append(("skipped", "Not run here", _skipped(report)))
    links = "\n".join(f'<li><a href="#{anchor}">{text(title)}</a></li>' for anchor, title, _ in parts)
    body = "\n".join(
        f'<section id="{anchor}">\n<h2>{text(title)}</h2>\n{content}\n</section>' for anchor, title, content in parts
    )
    made = "reproduced" if published.models(report.paper) else "measured"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(report.title)}</title>
<style>{STYLE}</style>
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
    """Any text as HTML; control characters and halves of surrogate pairs, which no page may hold, are spelled out."""
    return html.escape("".join(char if char in "\n\t " else visible(char) for char in given))


def prose(given: str) -> str:
    """A sentence as HTML, with real minus signs before its numbers."""
    return re.sub(r"(^|(?<=[\s(=,]))-(?=\d)", "\u2212", text(given))


def inline_svg(source: str, name: str, title: str) -> str:
    """An SVG file as part of a page: as wide as there is room, with ids of its own.

    Only tags are changed, so that a text such as `id="x"` in a figure stays what it is.
    """
    root = re.search(r"<svg\b[^>]*>", source)
    assert root is not None
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', root[0])
    assert size is not None
    inner = source[root.end() : source.rindex("</svg>")]
    inner = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>", "", inner, flags=re.DOTALL)
    prefix = f"{name}-"

    def own(tag: re.Match[str]) -> str:
        renamed = re.sub(r'(\bid="|\bhref="#|url\(#)', lambda found: found[1] + prefix, tag[0])
        return renamed.replace("xlink:href", "href")

    inner = re.sub(r"<[a-zA-Z][^>]*>", own, inner)
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
        state, said = STATES[claim.holds]
        link = f'<a href="{anchor}">{text(claim.text)}</a>' if anchor else text(claim.text)
        beside = f"<div><dt>published</dt><dd>{prose(claim.published)}</dd></div>" if claim.published else ""
        entries.append(
            f'<li><span class="state {state}">{said}</span><p>{link}</p>'
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
    failed, counted = failures(tuple(checks)), sum(check.passed is not None for check in checks)
    said = f"{counted - failed} of {counted} numbers are within their tolerance"
    said += f"; {len(checks) - counted} more are shown, but do not count." if counted < len(checks) else "."
    table = Table(
        "checks",
        "Numbers published for this model and data",
        ("number", "published", "ours", "tolerance", "verdict", "why this tolerance"),
        tuple((c.key, c.published, c.ours, c.tolerance, verdict(c), c.why) for c in checks),
        folded=len(checks) > FOLDED_CHECKS,
    )
    return f"<p>{text(said)}</p>\n{_table(table)}"


def _section(section: Section, drawn: Mapping[str, str]) -> str:
    blocks = [
        f"<p>{prose(paragraph)}</p>" for paragraph in re.split(r"\n\s*\n", section.text.strip()) if paragraph.strip()
    ]
    if section.claims:
        blocks.append(_claims((claim, "") for claim in section.claims))
    blocks += [_picture(p, drawn[p.name]) if isinstance(p, Picture) else _table(p) for p in section.parts]
    return "\n".join(blocks)


def _picture(picture: Picture, source: str) -> str:
    note = f"<p>{prose(picture.note)}</p>" if picture.note else ""
    return (
        f'<figure id="{picture.name}">\n<div class="card" tabindex="0">'
        f"{inline_svg(source, picture.name, picture.title)}</div>\n"
        f"<figcaption><strong>{text(picture.title)}</strong>{note}</figcaption>\n</figure>"
    )


def _table(table: Table) -> str:
    right = (False, *numeric(table)[1:])  # the first column names its row
    formats = [table.formats.get(column, "") for column in table.columns]

    def cells(tag: str, row: Iterable[str]) -> str:
        marked = (f"<{tag}{' class=n' if side else ''}>{cell}</{tag}>" for cell, side in zip(row, right, strict=True))
        return f"<tr>{''.join(marked)}</tr>"

    head = cells("th", map(text, table.columns))
    rows = [cells("td", map(_cell, row, formats)) for row in table.rows]
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
    value = plain(cell)
    written = shown(value, spec)
    if isinstance(value, int | float) and written.startswith("-"):
        written = "\u2212" + written[1:]
    state = {"PASS": "yes", "FAIL": "no"}.get(written) if isinstance(value, str) else None
    return f'<span class="state {state}">{written}</span>' if state else text(written)


def _skipped(report: Report) -> str:
    rows = "\n".join(f"<div><dt>{text(title)}</dt><dd>{text(why)}</dd></div>" for title, why in report.skipped)
    return f'<dl class="skipped">\n{rows}\n</dl>'


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
STYLE = """
:root { --paper: #fff; --ink: #1d2024; --quiet: #5f656d; --rule: #dde0e4; --soft: #f5f6f8; --accent: #0b57a4;
  --yes: #0a6b4d; --yes-soft: #e2f3ec; --no: #a33b00; --no-soft: #fbeadf; --open: #5f656d; --open-soft: #eceef1;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif;
  --serif: Charter, "Bitstream Charter", "Sitka Text", Cambria, Georgia, "Liberation Serif", serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15171a; --ink: #e3e5e8; --quiet: #9ea4ac; --rule: #33373d; --soft: #1e2125; --accent: #82b7f2;
    --yes: #6fd3ae; --yes-soft: #16342a; --no: #f2a679; --no-soft: #402315; --open: #a5abb3; --open-soft: #292d32 }
}
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100%; scroll-padding-top: 1rem }
body { margin: 0 auto; padding: 3.2rem 1.5rem 4rem; max-width: 52rem; background: var(--paper); color: var(--ink);
  font: 1.05rem/1.6 var(--serif); overflow-wrap: break-word }
h1, h2, h3 { font-family: var(--sans); line-height: 1.25; letter-spacing: -.01em; text-wrap: balance }
h1 { font-size: clamp(1.55rem, 1.2rem + 1.6vw, 2.05rem); font-weight: 700; margin: .2rem 0 .7rem }
h2 { font-size: 1.4rem; font-weight: 650; margin: 0 0 .9rem }
p { margin: 0 0 .9rem }
a { color: var(--accent); text-decoration-thickness: 1px; text-underline-offset: .15em }
code, pre { font-family: var(--mono); font-size: .84em }
header { border-bottom: 1px solid var(--rule); padding-bottom: .9rem }
.kicker { font: 600 .78rem/1.4 var(--sans); letter-spacing: .05em; text-transform: uppercase; color: var(--accent);
  margin: 0 }
.citation { color: var(--quiet); margin: 0 }
nav { font-family: var(--sans); font-size: .92rem; margin: 1.6rem 0 0 }
nav h2 { font-size: .78rem; font-weight: 600; letter-spacing: .05em; text-transform: uppercase; color: var(--quiet);
  margin: 0 0 .4rem }
nav ol { margin: 0; padding: 0 0 0 1.5rem; columns: 20rem 2; column-gap: 2.5rem; line-height: 1.45 }
nav li { break-inside: avoid; padding: .1rem 0 .1rem .2rem }
nav li::marker { color: var(--quiet); font-variant-numeric: tabular-nums }
nav a { text-decoration: none }
nav a:hover { text-decoration: underline }
section { margin-top: 2.6rem; padding-top: 2rem; border-top: 1px solid var(--rule) }
figure { margin: 1.7rem 0 }
figcaption { font: .88rem/1.5 var(--sans); color: var(--quiet); margin-top: .5rem }
figcaption strong { color: var(--ink); font-weight: 600 }
figcaption p { margin: .15rem 0 0 }
.table > figcaption:first-child { margin: 0 0 .45rem }
.card { overflow-x: auto; background: #fff; border-radius: 6px }
svg { display: block; width: 100%; height: auto; margin: 0 auto }
svg * { stroke-linejoin: round; stroke-linecap: butt }
svg text { font-family: Arial, Helvetica, "Liberation Sans", sans-serif !important }
@media (prefers-color-scheme: dark) { .card { padding: 12px } }
.wide { overflow-x: auto; border: solid var(--rule); border-width: 1px 0; width: fit-content; max-width: 100%;
  min-width: min(100%, 22rem);
  /* A shadow on the side where there is more; the paper lies over it where there is not. */
  background: linear-gradient(to right, var(--paper) 30%, transparent) left / 2.5rem 100% no-repeat local,
    linear-gradient(to left, var(--paper) 30%, transparent) right / 2.5rem 100% no-repeat local,
    linear-gradient(to right, rgb(128 128 128 / .4), transparent) left / .7rem 100% no-repeat scroll,
    linear-gradient(to left, rgb(128 128 128 / .4), transparent) right / .7rem 100% no-repeat scroll }
table { border-collapse: collapse; font: .86rem/1.4 var(--sans); font-variant-numeric: tabular-nums; min-width: 100% }
th, td { padding: .32rem 1rem .32rem 0; text-align: left; vertical-align: top }
th:last-child, td:last-child { padding-right: .3rem }
.wide td { white-space: nowrap }
.wide td:last-child:not(.n) { white-space: normal; min-width: 9rem }
thead th { color: var(--quiet); font-weight: 600; border-bottom: 1px solid var(--rule); vertical-align: bottom;
  overflow-wrap: normal }
.wide tr + tr td { border-top: 1px solid color-mix(in srgb, var(--rule) 55%, transparent) }
.n { text-align: right; padding-left: .6rem }
.facts th { color: var(--quiet); font-weight: 500; white-space: nowrap; padding-right: 1.4rem; width: 1% }
.facts td { overflow-wrap: anywhere }
.facts td, .facts th { border-bottom: 1px solid color-mix(in srgb, var(--rule) 55%, transparent) }
pre { background: var(--soft); border: 1px solid var(--rule); border-radius: 6px; padding: .7rem .9rem;
  white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.5; margin: 1.1rem 0 0 }
pre span { white-space: nowrap }
summary { cursor: pointer; font: .88rem/1.5 var(--sans); color: var(--accent) }
details[open] summary { margin-bottom: .4rem }
.state { display: inline-block; font: 600 .74rem/1 var(--sans); padding: .34em .6em; border-radius: 1em;
  white-space: nowrap }
.state::before { margin-right: .35em }
.yes { color: var(--yes); background: var(--yes-soft) }
.yes::before { content: "\\2713" }
.no { color: var(--no); background: var(--no-soft) }
.no::before { content: "\\2717" }
.open { color: var(--open); background: var(--open-soft) }
.open::before { content: "?" }
.claims { list-style: none; margin: 0; padding: 0 }
.claims li { display: grid; grid-template-columns: 8.6rem 1fr; gap: 0 1rem; padding: .75rem 0;
  border-top: 1px solid color-mix(in srgb, var(--rule) 55%, transparent) }
.claims .state { justify-self: start; align-self: start; margin-top: .28rem }
.claims p { margin: 0; line-height: 1.45 }
.claims p a { color: inherit; text-decoration-color: var(--rule) }
.claims p a:hover { color: var(--accent) }
.claims dl { grid-column: 2; margin: .2rem 0 0; font: .86rem/1.45 var(--sans); display: flex; flex-wrap: wrap;
  gap: 0 1.6rem }
.claims dt, .claims dd { display: inline; margin: 0 }
.claims dt { color: var(--quiet); margin-right: .4em }
.readings, .skipped { margin: 0; font: .9rem/1.5 var(--sans) }
.readings > div, .skipped > div { padding: .5rem 0;
  border-top: 1px solid color-mix(in srgb, var(--rule) 55%, transparent) }
.readings dt span { color: var(--quiet) }
.readings .value { font-weight: 700 }
.readings dd, .skipped dd { margin: 0; color: var(--quiet) }
.skipped dt { font-weight: 600 }
footer { margin-top: 3rem; padding-top: .8rem; border-top: 1px solid var(--rule); color: var(--quiet);
  font: .82rem/1.4 var(--sans) }
@media (max-width: 38rem) {
  body { padding: 1.6rem 1rem 3rem; font-size: 1rem }
  .claims li { grid-template-columns: 1fr }
  .claims dl { grid-column: 1 }
  .claims .state { margin: 0 0 .35rem }
  .facts, .facts tbody, .facts tr, .facts th, .facts td { display: block; width: auto; white-space: normal }
  .facts th { border: 0; padding: .4rem 0 0 }
  .facts td { padding: 0 0 .4rem }
}
@media print {
  :root { --paper: #fff; --ink: #000; --quiet: #444; --rule: #bbb; --soft: #fff; --accent: #000; --yes: #000;
    --yes-soft: #fff; --no: #000; --no-soft: #fff; --open: #000; --open-soft: #fff }
  html { font-size: 10pt }
  body { max-width: none; padding: 0 }
  figure, .claims li, tr { break-inside: avoid }
  .table { break-inside: auto }
  h2, .table > figcaption:first-child { break-after: avoid }
  .card { padding: 0; background: none; overflow: visible }
  .wide { overflow: visible; background: none }
  .wide td { white-space: normal }
  .state { border: 1px solid #888 }
  a { text-decoration: none }
}
"""
