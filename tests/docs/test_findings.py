"""docs/findings: which claims hold, from two made-up reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from docs import make_findings
from normscope.reports.joint import joint_report
from normscope.reports.report import Claim, Report, Section, Table
from normscope.reports.write import write_report

STATES = {"+": True, "-": False, "?": None}


def report(paper: str, model: str, data: str, states: str) -> Report:
    claims = tuple(
        Claim(f"Claim {n} | x", STATES[state], f"{n}.0", "9.0", f"interval {n}", ("with axis=input: holds",))
        for n, state in enumerate(states)
    )
    own = Claim("Is it so?", False, "no", own=True)
    rows = (("exact", 0.5, 0.4, 0.6, 0.1, 0.2),)
    table = Table("aopc-mask", "", ("method", "comp.", "comp. from", "comp. to", "suff.", "above random"), rows)
    section = Section("one", "One", parts=(table,), claims=(*claims, own), numbers={"a": 1.0})
    found = (("model", model), ("data", data), ("sequences", "436 with 7 tokens on average (only the first)"))
    return Report(paper, "A title", "Somebody", found, (), (section,), command="normscope paper x --limit 3")


@pytest.fixture
def page(tmp_path: Path) -> str:
    reports = {
        "ff-sst2": report("ff", "models/mpnet", "data/sst2.dev.tsv (read as tsv)", "+-+?+"),
        "ff-other": report("ff", "models/unknown", "data/own.txt", "+--+-"),
        "ff-third": report("ff", "models/unknown", "data/sst2.dev.tsv", "+--++"),
        "layers-sst2": report("layers", "all-MiniLM-L6-v2", "data/sst2.dev.tsv", ""),
        "faithfulness-x": report("faithfulness", "models/stories15M (LlamaForCausalLM, 6 layers)", "stories.txt", ""),
    }
    for name, one in reports.items():
        write_report(one, tmp_path / "reports" / name)
    make_findings.main(tmp_path / "reports", tmp_path / "findings")
    assert sorted(path.name for path in (tmp_path / "findings").iterdir()) == ["README.md", *sorted(reports)]
    assert (tmp_path / "findings/ff-sst2/numbers.csv").is_file()
    assert "In full" not in (tmp_path / "findings/ff-sst2/report.md").read_text()
    return (tmp_path / "findings/README.md").read_text()


def test_coverage(page: str) -> None:
    assert "| [ff-sst2](ff-sst2/report.md) | all-mpnet-base-v2, SST-2 | 436 | 872 | 50 % |" in page
    assert "| [ff-other](ff-other/report.md) | unknown, own.txt | 436 |  |  |" in page
    alone = Report("ff", "A title", "Somebody", (), (), (), command="normscope paper ff a.txt --limit 30 --out x")
    assert make_findings.covered_entries(alone) == 30
    assert make_findings.covered_entries(replace(alone, command="normscope paper ff a.txt --out x")) is None


def test_findings_are_added_to_those_there(tmp_path: Path) -> None:
    for name, states in (("a", "+"), ("b", "-")):
        write_report(report("ff", name, "data/sst2.dev.tsv", states), tmp_path / name / f"ff-{name}")
        make_findings.main(tmp_path / name, tmp_path / "findings")
    page = (tmp_path / "findings/README.md").read_text()
    assert "| Claim 0 \\| x | \u2713 | \u2717 | holds in 1 of 2, does not in 1 |" in page
    make_findings.main(None, tmp_path / "findings")
    assert (tmp_path / "findings/README.md").read_text() == page


def test_the_page_is_that_of_the_findings() -> None:
    found = make_findings.findings_page(list(make_findings.read_findings(make_findings.FINDINGS)))
    assert found == (make_findings.FINDINGS / "README.md").read_text(encoding="utf-8")


def test_the_matrix(page: str) -> None:
    head = (
        "| claim | [unknown, own.txt](ff-other/report.md) | [all-mpnet-base-v2, SST-2](ff-sst2/report.md) "
        "| [unknown, SST-2](ff-third/report.md) | in all |"
    )
    for text in (
        head,
        "| Claim 0 \\| x | \u2713 | \u2713 | \u2713 | holds in 3 of 3 |",
        "| Claim 2 \\| x | \u2717 | \u2713 | \u2717 | holds in 1 of 3, does not in 2 |",
        "| Claim 3 \\| x | \u2713 | ? | \u2713 | holds in 2 of 3, open in 1 |",
        "Of 5 claims, 1 holds in every report; 1 holds wherever the data decide; 1 does not hold in any report; "
        "2 hold in some reports but not in others.",
        "- Hold in every report: \u201cClaim 0 \\| x\u201d.",
        "- Do not hold in any report: \u201cClaim 1 \\| x\u201d.",
        "- Depend on the model: \u201cClaim 2 \\| x\u201d.",
        "- Differ between corpora of one model: \u201cClaim 4 \\| x\u201d.",
    ):
        assert text in page, text


def test_names(page: str) -> None:
    assert "- all-mpnet-base-v2: 12 layers, MPNet, a sentence encoder\n" in page
    assert "- unknown\n" in page
    assert "- SST-2: the validation split\n" in page
    assert "RXNMapper" not in page  # not used


def test_evidence(page: str) -> None:
    link = "[all-mpnet-base-v2, SST-2](ff-sst2/report.md)"
    row = f"| {link} | does **not** hold | 1.0 | interval 1; with axis=input: holds | 9.0 |"
    assert row in page
    assert page.index("## Evidence") < page.index(row) < page.index("## Studies of our own")


def test_own_questions_are_apart(page: str) -> None:
    matrix, _, rest = page.partition("## Evidence")
    assert "Is it so?" not in matrix
    assert rest.count("Questions of our own:") == 1  # in the paper; a study has no others
    assert rest.count("| Is it so? |") == 3


def test_ranking(page: str) -> None:
    assert "[stories15M, stories](faithfulness-x/report.md):" in page
    assert "| exact | 0.500 (0.400 to 0.600) | 0.100 | +0.200 |" in page


def test_a_joint_report_is_its_models(tmp_path: Path) -> None:
    joint = tmp_path / "reports/ff-two"
    members = [report("ff", model, "data/sst2.dev.tsv", "+") for model in ("a", "b")]
    for one in members:
        write_report(one, joint / "models" / one.model)
    write_report(joint_report(members, ["models/a", "models/b"], {}), joint)
    found = list(make_findings.read_findings(tmp_path / "reports"))
    assert [(finding.name, finding.label) for finding in found] == [("ff-two-a", "a, SST-2"), ("ff-two-b", "b, SST-2")]
