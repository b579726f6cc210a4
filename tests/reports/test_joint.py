"""Several reports in one: labels, claims by report, numbers with mean and SD, figures by layer."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean, pstdev

import pytest

pytest.importorskip("matplotlib")

from normscope.reports.joint import (
    count_verdicts,
    group_claims,
    joint_report,
    match_claims,
    report_labels,
    summarise_claims,
)
from normscope.reports.joint_numbers import layer_line, layer_series, short_name
from normscope.reports.report import Claim, Picture, ReadingValue, Report, Section, Table
from normscope.reports.write import write_report

STATES = {"+": True, "-": False, "?": None}


def report(
    model: str, states: str, data: str = "data/a.txt", depth: int = 2, reading: str = "", extra: str = ""
) -> Report:
    """A report with a claim per state; a space leaves a claim out."""
    claims = tuple(
        Claim(f"Claim {n}", STATES[state], f"{model} {n}", "0.5" if n == 0 else "", f"evidence {n}")
        for n, state in enumerate(states)
        if state != " "
    )
    numbers = {"mixing.mean": float(len(model)), **{f"mixing.L{n}": n * 1.0 for n in range(1, depth + 1)}}
    numbers |= {"mixing.L1H1.cv": 1.0} | ({extra: 2.0} if extra else {})
    own = Claim("Is it so?", True, "yes", own=True)
    readings = (ReadingValue("axis", reading or "output", "", bool(reading)),)
    sections = (Section("mixing", "Mixing", claims=claims, numbers=numbers), Section("own", "Own", claims=(own,)))
    return Report("ff", "A title", "Somebody", (("model", model), ("data", data)), readings, sections)


def test_short_names() -> None:
    assert short_name("models/opus-mt-en-fr/") == "opus-mt-en-fr"
    assert short_name("data/a.tsv (read as conll, text=b)") == "a.tsv"
    assert short_name("") == ""


def test_labels_name_what_differs() -> None:
    assert report_labels([report("x/a", "+"), report("b", "+")]) == ("a", "b")
    assert report_labels([report("a", "+"), report("a", "+", "b.txt")]) == ("a, a.txt", "a, b.txt")
    assert report_labels([report("a", "+"), report("a", "+", reading="input")]) == ("a", "a, axis=input")
    assert report_labels([report("x/a", "+"), report("y/a", "+")]) == ("a (1)", "a (2)")


def test_claims_are_matched_by_section_and_text() -> None:
    rows = match_claims([report("a", "+-"), report("b", "? +")])
    assert [[None if claim is None else claim.holds for claim in row.claims] for row in rows] == [
        [True, None],
        [False, None],
        [True, True],
        [None, True],
    ]
    assert [row.own for row in rows] == [False, False, True, False]
    assert rows[0].published == "0.5"
    assert rows[1].claims[1] is None


def test_verdicts_are_counted() -> None:
    rows = match_claims([report("a", "+-+?+-?"), report("b", "+--+ ??")])
    paper = [row for row in rows if not row.own]
    assert [count_verdicts(row.claims) for row in paper] == [
        "holds in 2 of 2",
        "holds in 0 of 2, does not in 2",
        "holds in 1 of 2, does not in 1",
        "holds in 1 of 2, open in 1",
        "holds in 1 of 1",
        "holds in 0 of 2, does not in 1, open in 1",
        "holds in 0 of 2, open in 2",
    ]
    assert group_claims(paper) == {
        "hold in every report": ["Claim 0", "Claim 4"],
        "hold wherever the data decide": ["Claim 3"],
        "do not hold in any report": ["Claim 1"],
        "do not hold wherever the data decide": ["Claim 5"],
        "hold in some reports but not in others": ["Claim 2"],
        "cannot be decided in any report": ["Claim 6"],
    }
    assert summarise_claims(paper) == (
        "Of 7 claims, 2 hold in every report; 1 holds wherever the data decide; 1 does not hold in any report; "
        "1 does not hold wherever the data decide; 1 holds in some reports but not in others; "
        "1 cannot be decided in any report."
    )
    assert summarise_claims(paper[:1]) == "Of 1 claim, 1 holds in every report."


def test_series_of_layers() -> None:
    assert layer_series("mixing.ATTN-N.L3.mask") == "mixing.ATTN-N.mask"
    assert layer_series("norm.L12") == "norm"
    assert layer_series("mixing.mean") is layer_series("dispersion.L1H2.cv") is None
    assert layer_line({"a.L10": 1.0, "a.L2": 2.0, "a.L2.p": 3.0}, "a") == {2: 2.0, 10: 1.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    members = [report("a", "+-"), report("bbb", "??", depth=4), report("a", "+ ", "b.txt", extra="mixing.other")]
    made = joint_report(
        members, ["models/a", "models/b", "../a b"], {"mixing.mean": 9.0, "mixing.L1": 1.0}, "BERT-base", "command"
    )
    write_report(made, tmp_path)
    assert made.labels == ("a, a.txt", "bbb, a.txt", "a, b.txt")
    return tmp_path


def test_files(folder: Path) -> None:
    numbers = list(csv.reader((folder / "numbers.csv").open()))
    assert numbers[0] == ["section", "key", "a, a.txt", "bbb, a.txt", "a, b.txt", "mean (a.txt)", "SD (a.txt)"]
    assert numbers[1] == ["mixing", "mixing.mean", "1.0", "3.0", "1.0", str(fmean([1, 3])), str(pstdev([1, 3]))]
    lines = {row[1]: row for row in numbers}
    assert lines["mixing.L3"][2:] == ["", "3.0", "", "", ""]  # one model has three layers or more: no mean
    assert lines["mixing.other"][2:] == ["", "", "2.0", "", ""]
    claims = list(csv.DictReader((folder / "claims.csv").open()))
    assert [(row["claim"], row["report"], row["holds"]) for row in claims][:3] == [
        ("Claim 0", "a, a.txt", "true"),
        ("Claim 0", "bbb, a.txt", ""),
        ("Claim 0", "a, b.txt", "true"),
    ]


def test_pages(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    for text in (
        '<a href="models/a/report.html">a, a.txt</a>',
        '<a href="../a%20b/report.html">a, b.txt</a>',
        '<span class="state yes" title="evidence 0">holds</span><span>a 0</span>',
        "holds in 2 of 3, open in 1",
        "published (BERT-base)",
        "population SD",
        "relative depth (layer / number of layers)",
        "mixing, mean over layers",
        "Questions of our own",
    ):
        assert text in page, text
    assert "L1H1" not in page
    text = (folder / "report.md").read_text()
    assert "[a, b.txt](../a%20b/report.md)" in text
    assert (
        "| Claim 1 | does **not** hold: a 1 | cannot be said: bbb 1 | \u2013 | holds in 0 of 2, does not in 1, open"
        in text
    )


def test_one_corpus_and_equal_depths() -> None:
    made = joint_report([report("a", "+"), report("bbb", "-")], ["x", "y"], {})
    (section,) = [section for section in made.sections if section.name == "numbers-mixing"]
    table, picture = section.parts
    assert isinstance(table, Table)
    assert table.columns == ("number", "a", "bbb", "mean", "SD")
    assert table.rows == (("mixing.mean", 1.0, 3.0, 2.0, 1.0), ("mixing, mean over layers", 1.5, 1.5, 1.5, 0.0))
    assert isinstance(picture, Picture)
    assert picture.figure.get_supxlabel() == "layer"


def test_published_numbers_with_their_spread() -> None:
    published = {"mixing.mean": 9.0, "mixing.mean.sd": 0.5}
    made = joint_report([report("a", "+"), report("bbb", "-")], ["x", "y"], published, "25 MultiBERTs")
    table = next(part for section in made.sections for part in section.parts if part.name == "numbers-mixing")
    assert isinstance(table, Table)
    assert table.columns[3:] == ("mean", "SD", "published (25 MultiBERTs)", "published SD")
    assert table.rows[0][3:] == (2.0, 1.0, 9.0, 0.5)


def test_a_model_with_two_readings_has_no_mean() -> None:
    made = joint_report([report("a", "+"), report("a", "-", reading="input")], ["x", "y"], {})
    table = next(part for section in made.sections for part in section.parts if part.name == "numbers-mixing")
    assert isinstance(table, Table)
    assert table.columns == ("number", "a", "a, axis=input")
