"""report.json: what a report says, without its tables and figures, for programs to read.

{"format": "normscope-report-1",
 "paper": "emnlp2021", "title": ..., "citation": ..., "model": ..., "data": ..., "command": ..., "reproduction": true,
 "facts": [["model", "all-MiniLM-L6-v2"], ...],
 "readings": [{"name": ..., "value": ..., "meaning": ..., "changed": false}, ...],
 "sections": [{"name": "mixing", "title": ...,
               "claims": [{"text": ..., "holds": true, "ours": ..., "published": ..., "evidence": ...,
                           "readings": [...], "own": false}, ...],
               "numbers": {"mixing.ATTN-N.mean": 84.0, ...}}, ...],
 "skipped": [["Named entities", "The corpus has no named entities."], ...],
 "checks": [{"key": ..., "published": ..., "ours": ..., "tolerance": ..., "passed": true, "why": ...}, ...]}

Numbers that are not finite are null. The file of a joint report has "reports", a list of such objects, and "folders",
the folder of each relative to its own, instead of the fields of one report.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from normscope.errors import NormscopeError
from normscope.reports.report import Check, Claim, ReadingValue, Report, Section

FORMAT = "normscope-report-1"
NAME = "report.json"


def report_to_json(report: Report) -> str:
    """The text of report.json."""
    if report.members:
        members = [_report_fields(member) for member in report.members]
        found: dict[str, Any] = {"folders": report.folders, "reports": members}
    else:
        found = _report_fields(report)
    return json.dumps({"format": FORMAT, **found}, indent=1, allow_nan=False) + "\n"


def load_reports(path: str | Path) -> list[tuple[Report, Path]]:
    """The report in a folder, or the reports that a joint report compares, each with the folder of its page.

    Texts, tables and figures are not restored.

    Raises:
        NormscopeError: If the folder has no report.json, or the file is damaged or of another program.
    """
    root = Path(path)
    file = root / NAME
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NormscopeError(
            f"Cannot read {file}: {error.strerror or error}. Pass the folder of a finished report."
        ) from error
    except ValueError as error:  # neither UTF-8 nor JSON
        raise NormscopeError(f"{file} is damaged: {error}. Run the command of the report again.") from error
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        raise NormscopeError(f"{file} is not a report of this version of normscope (its format is not {FORMAT!r}).")
    try:
        if "reports" not in given:
            return [(_parse_report(given), root)]
        folders = [root / _typed(one, str, "folders") for one in given["folders"]]
        return list(zip(map(_parse_report, given["reports"]), folders, strict=True))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise NormscopeError(f"{file} is damaged: {what}. Run the command of the report again.") from error


def _report_fields(report: Report) -> dict[str, Any]:
    return {
        "paper": report.paper,
        "title": report.title,
        "citation": report.citation,
        "model": report.model,
        "data": report.data,
        "command": report.command,
        "reproduction": report.reproduction,
        "facts": report.facts,
        "readings": [one._asdict() for one in report.readings],
        "sections": [
            {
                "name": section.name,
                "title": section.title,
                "claims": [asdict(claim) for claim in section.claims],
                "numbers": {key: _finite_or_none(value) for key, value in section.numbers.items()},
            }
            for section in report.sections
        ],
        "skipped": report.skipped,
        "checks": [{**asdict(check), "ours": _finite_or_none(check.ours)} for check in report.checks],
    }


def _finite_or_none(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _parse_report(given: dict[str, Any]) -> Report:
    return Report(
        paper=_typed(given["paper"], str, "paper"),
        title=_typed(given["title"], str, "title"),
        citation=_typed(given["citation"], str, "citation"),
        facts=_pairs(given["facts"], "facts"),
        readings=tuple(ReadingValue(**_strings(one, bool)) for one in given["readings"]),
        sections=tuple(_parse_section(one) for one in given["sections"]),
        skipped=_pairs(given["skipped"], "skipped"),
        command=_typed(given["command"], str, "command"),
        checks=tuple(Check(**{**one, "ours": _number(one["ours"], one["key"])}) for one in given["checks"]),
        reproduction=_typed(given["reproduction"], bool, "reproduction"),
    )


def _parse_section(given: dict[str, Any]) -> Section:
    name, title = (_typed(given[key], str, key) for key in ("name", "title"))
    numbers = {key: _number(value, key) for key, value in given["numbers"].items()}
    return Section(name, title, claims=tuple(_parse_claim(one) for one in given["claims"]), numbers=numbers)


def _parse_claim(given: dict[str, Any]) -> Claim:
    holds = _typed(given["holds"], bool | None, "holds")
    readings = tuple(_typed(one, str, "readings") for one in given["readings"])
    rest = _strings({key: value for key, value in given.items() if key not in ("holds", "readings")}, bool)
    return Claim(holds=holds, readings=readings, **rest)


def _typed(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, kind):
        kinds = " or ".join(one.__name__ for one in get_args(kind) or (kind,))
        raise ValueError(f"{name} is {value!r:.40} instead of a {kinds}")
    return value


def _strings(given: dict[str, Any], other: type) -> dict[str, Any]:
    return {key: _typed(value, str | other, key) for key, value in given.items()}


def _pairs(given: Any, name: str) -> tuple[tuple[str, str], ...]:
    return tuple((_typed(a, str, name), _typed(b, str, name)) for a, b in given)


def _number(value: Any, name: str) -> float:
    return math.nan if value is None else float(_typed(value, int | float, name))
