"""report.json: what it keeps, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from normscope import NormscopeError
from normscope.reports.joint import joint_report
from normscope.reports.report import Check, Claim, ReadingValue, Report, Section, Table
from normscope.reports.saved import load_reports
from normscope.reports.write import write_report

SECTION = Section(
    "mixing",
    "Mixing \ud800 | <b>",
    "A text.",
    (Table("t", "T", ("a",), ((1,),)),),
    (
        Claim("It is so", True, "1.0", "2.0", "95 % interval 1 to 2", ("with axis=input: cannot be said",)),
        Claim("Who knows", None, "no data", own=True),
    ),
    {"mixing.mean": 0.1 + 0.2, "mixing.L1": math.nan, "count": 3},
)
REPORT = Report(
    "emnlp2021",
    "A title",
    "Somebody 2021",
    (("model", "models/tiny"), ("data", "lines.txt (read as lines)")),
    (ReadingValue("axis", "input", "the axis (default output)", True),),
    (SECTION,),
    (("Entities", "None in the corpus."),),
    "normscope paper emnlp2021 --out x",
    (Check("mixing.mean", 0.3, 0.1 + 0.2, 0.01, True, "two digits are printed"),),
    True,
)


def test_round_trip(tmp_path: Path) -> None:
    write_report(REPORT, tmp_path)
    ((found, folder),) = load_reports(tmp_path)
    assert folder == tmp_path
    numbers = {"mixing.mean": 0.1 + 0.2, "count": 3.0}
    (section,) = found.sections
    assert math.isnan(section.numbers["mixing.L1"])
    kept = {key: value for key, value in section.numbers.items() if key != "mixing.L1"}
    assert kept == numbers
    bare = replace(SECTION, text="", parts=(), numbers={})  # texts, tables and figures are not in the file
    assert replace(found, sections=(replace(section, numbers={}),)) == replace(REPORT, sections=(bare,))
    given = json.loads((tmp_path / "report.json").read_text())
    assert (given["model"], given["data"]) == ("models/tiny", "lines.txt (read as lines)")
    assert not list(tmp_path.glob(".report*"))  # no temporary file is left


def test_a_joint_report_is_the_reports_that_it_compares(tmp_path: Path) -> None:
    other = replace(REPORT, facts=(("model", "models/other"),))
    write_report(joint_report([REPORT, other], ["models/tiny", "../other"], {}), tmp_path)
    found = load_reports(tmp_path)
    assert [report.model for report, _ in found] == ["models/tiny", "models/other"]
    assert [folder for _, folder in found] == [tmp_path / "models/tiny", tmp_path / "../other"]


def edited(**changes: Any) -> str:
    from normscope.reports.saved import report_to_json

    return json.dumps({**json.loads(report_to_json(REPORT)), **changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is damaged: Expecting value"),
        (edited()[:200], "is damaged"),
        ("\xff", "is damaged"),
        ("[]", "is not a report of this version of normscope"),
        ('{"format": "normscope-report-9"}', "is not a report of this version"),
        ('{"format": "normscope-report-1"}', "is damaged: 'paper' is missing"),
        (edited(paper=3), "paper is 3 instead of a str"),
        (edited(facts=[["model"]]), "is damaged: not enough values"),
        (edited(readings=[{"name": "x"}]), "is damaged: .*missing"),
        (edited(sections=[1]), "is damaged"),
        (edited(sections=[{"name": "a", "title": "b", "claims": [], "numbers": {"k": "1"}}]), "k is '1' instead of"),
        (
            edited(sections=[{"name": "a", "title": "b", "claims": [{"holds": 1, "readings": []}], "numbers": {}}]),
            "holds is 1 instead of a bool or NoneType",
        ),
        (edited(sections=None), "is damaged"),
        (edited(checks=[{"key": "x"}]), "is damaged: 'ours' is missing"),
        (edited(reports=[1]), "is damaged"),
        (edited(reports=[], folders=["x"]), "is damaged"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(NormscopeError, match=said) as error:
        load_reports(tmp_path)
    assert str(tmp_path / "report.json") in str(error.value)


def test_a_folder_without_a_report(tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match=r"No such file or directory. Pass the folder of a finished report"):
        load_reports(tmp_path / "nowhere")
