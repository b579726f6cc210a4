"""Several reports of one paper in one: what was compared, every claim in every report, and the headline numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from normscope._version import __version__
from normscope.labels import count_label
from normscope.reports.joint_numbers import (
    MEANS,
    Compared,
    fullest_first,
    joint_number_sections,
    models_by_corpus,
    short_name,
)
from normscope.reports.report import Cell, Claim, Report, ReportLink, Section, Table, count_claims

# Groups of claims by their verdicts.
HOLD = "hold in every report"
HOLD_OR_OPEN = "hold wherever the data decide"
FAIL = "do not hold in any report"
FAIL_OR_OPEN = "do not hold wherever the data decide"
MIXED = "hold in some reports but not in others"
OPEN = "cannot be decided in any report"
SINGULAR = {kind: kind.replace("hold", "holds", 1) for kind in (HOLD, HOLD_OR_OPEN, MIXED)} | {
    kind: kind.replace("do ", "does ", 1) for kind in (FAIL, FAIL_OR_OPEN)
}


class ClaimRow(NamedTuple):
    """One claim in all reports."""

    section: str  # name of its section
    text: str
    claims: tuple[Claim | None, ...]  # None: the experiment was not run
    published: str
    own: bool


def joint_report(
    reports: Sequence[Report],
    folders: Sequence[str],
    published: Mapping[str, float],
    published_for: str = "",
    command: str = "",
) -> Report:
    """The report that compares several reports of one paper.

    Args:
        reports: At least one, all of the same paper.
        folders: The folder of each, relative to that of the joint report.
        published: Published numbers by key, shown beside ours.
        published_for: The model that these numbers were published for.
        command: The command that makes the joint report.
    """
    compared = Compared(tuple(reports), report_labels(reports), published, published_for)
    rows = match_claims(reports)
    sections = [_compared_section(compared, folders)]
    for name, title, own in (("claims", "Claims", False), ("own", "Questions of our own", True)):
        chosen = [row for row in rows if row.own is own]
        if chosen:
            sections.append(_claims_section(name, title, chosen, compared))
    first = reports[0]
    return Report(
        first.paper,
        first.title,
        first.citation,
        (("reports", str(len(reports))), ("versions", f"normscope {__version__}")),
        (),
        (*sections, *joint_number_sections(compared)),
        command=command,
        reproduction=first.reproduction,
        members=compared.reports,
        labels=compared.labels,
        folders=tuple(folders),
    )


def report_labels(reports: Sequence[Report]) -> tuple[str, ...]:
    """A short, unique name for each report: its model, with the corpus, the readings or a number if these differ."""
    parts = [[short_name(report.model) for report in reports]]
    for beside in ([short_name(report.data) for report in reports], list(map(changed_readings, reports))):
        if len(set(beside)) > 1:
            parts.append(beside)
    labels = [", ".join(part for part in some if part) for some in zip(*parts, strict=True)]
    return tuple(
        label if labels.count(label) == 1 else f"{label} ({labels[:n].count(label) + 1})"
        for n, label in enumerate(labels)
    )


def changed_readings(report: Report) -> str:
    """The readings that are not the default, as "axis=input, distance=signed"."""
    return ", ".join(f"{one.name}={one.value}" for one in report.readings if one.changed)


def match_claims(reports: Sequence[Report]) -> list[ClaimRow]:
    """The claims of all reports; claims with the same section and text are one."""
    found: dict[tuple[str, str], dict[int, Claim]] = {}
    for n in fullest_first(reports):
        for section in reports[n].sections:
            for claim in section.claims:
                found.setdefault((section.name, claim.text), {}).setdefault(n, claim)
    return [
        ClaimRow(
            section,
            text,
            tuple(claims.get(n) for n in range(len(reports))),
            next((claims[n].published for n in sorted(claims) if claims[n].published), ""),
            next(iter(claims.values())).own,
        )
        for (section, text), claims in found.items()
    ]


def count_verdicts(claims: Iterable[Claim | None]) -> str:
    """ "holds in 5 of 7, does not in 1, open in 1" """
    given = [claim for claim in claims if claim is not None]
    holds, fails, open_ = count_claims(given)
    parts = [f"holds in {holds} of {len(given)}"]
    if fails:
        parts.append(f"does not in {fails}")
    if open_:
        parts.append(f"open in {open_}")
    return ", ".join(parts)


def group_claims(rows: Sequence[ClaimRow]) -> dict[str, list[str]]:
    """The texts of the claims in each group: those that hold in every report, do not hold in any, hold in some reports
    but not in others, and those that some or all reports cannot decide."""
    kinds = {
        frozenset({True}): HOLD,
        frozenset({True, None}): HOLD_OR_OPEN,
        frozenset({False}): FAIL,
        frozenset({False, None}): FAIL_OR_OPEN,
        frozenset({None}): OPEN,
    }
    groups: dict[str, list[str]] = {kind: [] for kind in (HOLD, HOLD_OR_OPEN, FAIL, FAIL_OR_OPEN, MIXED, OPEN)}
    for row in rows:
        states = frozenset(claim.holds for claim in row.claims if claim is not None)
        groups[kinds.get(states, MIXED)].append(row.text)
    return groups


def summarise_claims(rows: Sequence[ClaimRow]) -> str:
    """How many claims are in each group, in words."""
    counts = {kind: len(texts) for kind, texts in group_claims(rows).items()}
    said = (f"{count} {kind if count != 1 else SINGULAR.get(kind, kind)}" for kind, count in counts.items() if count)
    return f"Of {count_label(len(rows), 'claim')}, {'; '.join(said)}."


def joint_claim_rows(reports: Sequence[Report], labels: Sequence[str]) -> list[tuple[str, str, Claim]]:
    """Section, label of the report and claim, for all claims of all reports, grouped by claim."""
    return [
        (row.section, label, claim)
        for row in match_claims(reports)
        for label, claim in zip(labels, row.claims, strict=True)
        if claim is not None
    ]


def _compared_section(compared: Compared, folders: Sequence[str]) -> Section:
    columns = ["report", "claims that hold", "do not", "open", "layers", "data", "sequences", "changed readings"]
    rows: list[tuple[Cell, ...]] = []
    for report, label, folder in zip(compared.reports, compared.labels, folders, strict=True):
        known = dict(report.facts)
        counts = count_claims([claim for claim in report.claims if not claim.own])
        facts = (known.get("layers"), short_name(report.data), known.get("sequences"), changed_readings(report))
        rows.append((ReportLink(label, folder), *counts, *(fact or None for fact in facts)))
    kept = [k for k in range(len(columns)) if any(row[k] is not None for row in rows)]
    table = Table(
        "compared",
        "Reports",
        tuple(columns[k] for k in kept),
        tuple(tuple(row[k] for k in kept) for row in rows),
        note="Each report has a page of its own, with all tables and figures, its facts and its command.",
    )
    text = MEANS if models_by_corpus(compared.reports) else ""
    return Section("compared", "What was compared", text, (table,))


def _claims_section(name: str, title: str, rows: Sequence[ClaimRow], compared: Compared) -> Section:
    shown = any(row.published for row in rows)
    matrix = Table(
        f"all-{name}",
        "Verdict and number in each report",
        ("claim", *compared.labels, "in all", *([compared.published_column] if shown else [])),
        tuple(
            (row.text, *row.claims, count_verdicts(row.claims), *([row.published or None] if shown else []))
            for row in rows
        ),
        note="A dash: the experiment was not run in that report."
        if any(claim is None for row in rows for claim in row.claims)
        else "",
    )
    evidence = Table(
        f"evidence-{name}",
        "Evidence for each verdict",
        ("claim", "report", "verdict", "ours", "evidence", "depends on the reading"),
        tuple(
            (claim.text, label, claim.verdict, claim.ours, claim.evidence or None, "; ".join(claim.readings) or None)
            for row in rows
            for label, claim in zip(compared.labels, row.claims, strict=True)
            if claim is not None
        ),
        folded=True,
    )
    text = summarise_claims(rows) if name == "claims" and len(compared.labels) > 1 else ""
    return Section(name, title, text, (matrix, evidence))
