"""The files of a report: complete, self-contained, and safe with any token."""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from normscope import NormscopeError
from normscope.papers.verify import verify_numbers
from normscope.reports import charts, html, map_charts, markdown
from normscope.reports.report import (
    Claim,
    Picture,
    ReadingValue,
    Report,
    Section,
    Table,
    describe_changed,
    format_cell,
    tally_claims,
)
from normscope.reports.write import write_report

NASTY = "<script>alert('1')</script> & \"q\" | `c` *b* _i_ $m$ [a](b) \x00\ud800"


def chart(tokens: list[str] | None = None) -> Any:
    given = tokens or ["a", "b"]
    return map_charts.heat_map_chart(np.eye(len(given)), rows=given, columns=given)


def table(name: str = "table1", **changes: Any) -> Table:
    rows = (("a", 1, 0.123456789, True), ("b", 20_000, None, False), ("c", np.int64(-3), np.float64(-2.0), None))
    return replace(
        Table(name, "Table 1. Things", ("name", "count", "value", "holds"), rows, {"value": ".2f"}), **changes
    )


def report(**changes: Any) -> Report:
    first = Section(
        "first",
        "The first experiment",
        "A paragraph.\n\nAnother one.",
        (table(note="A note."), Picture("fig1", "Fig. 1. A map", chart(), "A note on it.")),
        (
            Claim("It is so", True, "1.0", "2.0", "95 % interval 0.8 to 1.2", ("with axis=input: does not hold",)),
            Claim("It is not so", False, "3.0"),
            Claim("Who knows", None, "no data"),
            Claim("Is it so elsewhere", True, "4.0", own=True),
        ),
        {"data.tokens": 121_134.0, "own.number": 0.1 + 0.2},
    )
    second = Section(
        "second",
        "The second experiment",
        parts=(
            Picture("fig2", "Fig. 2. Another", chart()),
            Table("long", "Long", ("n",), tuple((k,) for k in range(50)), folded=True),
        ),
        numbers={"spearman.first": -0.5},
    )
    made = Report(
        "emnlp2020",
        "Attention is Not Only a Weight",
        "Kobayashi et al. 2020",
        (("model", "tiny"), ("data", "lines.txt")),
        (
            ReadingValue("mask_seed", "0", "the seed (default 0)"),
            ReadingValue("axis", "input", "the axis (default output)", True),
        ),
        (first, second),
        (("Alignment", "The model has no cross-attention."),),
        "normscope paper emnlp2020 --out here",
        verify_numbers(
            {"data.tokens": 121_134, "spearman.first": -0.5}, {"data.tokens": 121_134, "spearman.first": -0.34}
        ),
    )
    return replace(made, **changes)


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data

    def ids(self) -> list[str]:
        return [attributes["id"] or "" for _, attributes in self.tags if "id" in attributes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("report")
    assert write_report(report(), place / "deep" / "out") == place / "deep" / "out" / "report.html"
    return place / "deep" / "out"


def test_every_file_is_written(folder: Path) -> None:
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        *("report.html", "report.md", "report.json", "numbers.csv", "claims.csv"),
        *("tables/table1.csv", "tables/long.csv"),
        *(f"figures/fig{n}.{kind}" for n in (1, 2) for kind in ("svg", "pdf")),
    }
    for path in (folder / "figures").glob("*.svg"):
        ElementTree.parse(path)


def test_tables_are_in_full_precision(folder: Path) -> None:
    rows = list(csv.reader((folder / "tables/table1.csv").open()))
    assert rows == [
        ["name", "count", "value", "holds"],
        ["a", "1", "0.123456789", "true"],
        ["b", "20000", "", "false"],
        ["c", "-3", "-2.0", ""],
    ]
    numbers = list(csv.reader((folder / "numbers.csv").open()))
    assert numbers[1:] == [
        ["first", "data.tokens", "121134.0", "121134", "0", "true"],
        ["first", "own.number", repr(0.1 + 0.2), "", "", ""],
        ["second", "spearman.first", "-0.5", "-0.34", "0.006", "false"],
    ]


def test_the_page_has_everything(folder: Path) -> None:
    page = Page((folder / "report.html").read_text())
    assert page.open == []
    said = " ".join(page.text.split())
    for text in (
        "Attention is Not Only a Weight",
        "Kobayashi et al. 2020",
        "1 of 3 claims holds, 1 does not, 1 cannot be decided.",
        "ours1.0evidence95 % interval 0.8 to 1.2depends on the readingwith axis=input: does not holdpublished2.0",
        "1 question of our own: 1 answered yes, 0 no, 0 open.",
        "How choices that the paper leaves open were made; 1 of 2 differs from the default.",
        "axis = inputthe axis (default output)",
        "1 reading at the defaultmask_seed = 0the seed (default 0)",
        "1 of 2 numbers are within tolerance.",
        "AlignmentThe model has no cross-attention.",
        "normscope paper emnlp2020 --out here",
        "A paragraph. Another one.",
        "a10.12yes",
        "b20,000\u2013no",
        "c\u22123\u22122.00\u2013",
        "50 rows",
    ):
        assert text in said or text in page.text.replace("\n", ""), text
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert all(link and link.startswith("#") and link[1:] in page.ids() for link in links)
    assert "#section-first" in links
    assert sum(tag == "svg" for tag, _ in page.tags) == 2


def test_the_page_leads_with_the_claims(folder: Path) -> None:
    page = Page((folder / "report.html").read_text())
    sections = [name for name in page.ids() if name in ("claims", "own", "published", "run", "readings", "skipped")]
    assert sections == ["claims", "own", "published", "skipped", "run", "readings"]
    assert page.ids().index("own") < page.ids().index("section-first") < page.ids().index("run")
    said = page.text.split("Questions of our own")
    assert "Is it so elsewhere" not in said[1]  # the heading in the contents, before the paper's claims
    assert "Is it so elsewhere" in said[2]


def test_the_page_stands_alone(folder: Path) -> None:
    source = (folder / "report.html").read_text()
    page = Page(source)
    assert not {"script", "link", "iframe", "object", "img"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on") or name == "src"]
    outside = [url for url in re.findall(r'(?:href|url)[=(]["\']?([^"\')\s>]+)', source) if url[0] != "#"]
    assert all(url.startswith("data:image/png;base64") for url in outside)
    assert "@import" not in source
    assert "default-src 'none'" in source


def test_ids_of_figures_do_not_clash(folder: Path) -> None:
    source = (folder / "report.html").read_text()
    ids = Page(source).ids()
    assert [name for name, times in Counter(ids).items() if times > 1] == []
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', source)
    assert any(name.startswith("fig2-") for name in used)
    assert set(used) <= set(ids)


def test_the_same_report_is_the_same_files(folder: Path, tmp_path: Path) -> None:
    write_report(report(), tmp_path)
    for path in folder.rglob("*.*"):
        assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes(), path


def test_nothing_that_is_given_becomes_markup(tmp_path: Path) -> None:
    picture = Picture("fig1", NASTY, chart([NASTY[:20], 'id="x" url(#y)', "$x$"]), NASTY)
    section = Section(
        "one",
        NASTY,
        NASTY,
        (Table("t", NASTY, (NASTY, "n"), ((NASTY, 1),), note=NASTY), picture),
        (Claim(NASTY, True, NASTY, NASTY),),
    )
    readings = (ReadingValue(NASTY, NASTY, NASTY),)
    made = Report("ff", NASTY, NASTY, ((NASTY, NASTY),), readings, (section,), ((NASTY, NASTY),), NASTY)
    page = Page(write_report(made, tmp_path).read_text())
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert('1')</script> & \"q\" | `c` *b* _i_ $m$ [a](b) \\x00\\ud800") >= 12
    assert 'id="x" url(#y)' in page.text  # a text in a figure stays as it is
    markdown = (tmp_path / "report.md").read_text()
    assert "\x00" not in markdown
    assert not re.search(r"(?<![\\`])<script", markdown.split("```")[0])
    assert (tmp_path / "tables/t.csv").read_text().startswith('"<script>')


def test_markdown_has_everything(folder: Path) -> None:
    source = (folder / "report.md").read_text()
    for text in (
        "# Attention is Not Only a Weight",
        "| claim | here | ours | evidence | depends on the reading | published |",
        "| It is so | holds | 1.0 | 95 % interval 0.8 to 1.2 | with axis=input: does not hold | 2.0 |",
        "| It is not so | does **not** hold | 3.0 |  |  |  |",
        "## Questions of our own\n\n1 question of our own: 1 answered yes, 0 no, 0 open.",
        "- It is not so: does **not** hold (3.0)",
        "| `axis` | `input` | the axis (default output) |",
        "[1 reading at the default](#default-readings)",
        "## Default readings\n\n| reading | used here | meaning |\n| :--- | :--- | :--- |\n| `mask_seed` | `0` |",
        "| `spearman.first` | -0.34 | -0.5 | 0.006 | FAIL | two digits are printed |",
        "![Fig. 1. A map](figures/fig1.svg)",
        "| b | 20,000 | \u2013 | no |",
        "30 more rows are in [tables/long.csv](tables/long.csv)",
        "- Alignment: The model has no cross-attention.",
    ):
        assert text in source, text
    assert "| 19 |" in source
    assert "| 20 |" not in source


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("a|b", "a\\|b"),
        ("||f(x)||", "\\|\\|f(x)\\|\\|"),
        ("mask_seed and _x_", "mask_seed and \\_x\\_"),
        ("1. first", "1\\. first"),
        ("# no heading", "\\# no heading"),
        ("- no item", "\\- no item"),
        ("-0.5", "-0.5"),
        ("[CLS] and [a](b)", "[CLS] and [a\\](b)"),
        ("a\n\nb", "a b"),
        ("$x$ <b> & `c`", "\\$x\\$ \\<b> &amp; \\`c\\`"),
    ],
)
def test_markdown_text(given: str, written: str) -> None:
    assert markdown.escape_markdown(given) == written


@pytest.mark.parametrize(
    ("cell", "spec", "text"),
    [
        (None, "", "\u2013"),
        (float("nan"), ".2f", "\u2013"),
        (True, "", "yes"),
        (9999, "", "9999"),
        (123456, "", "123,456"),
        (0.123456, "", "0.1235"),
        (123456.7, "", "123,457"),
        (0.5, ".0%", "50%"),
        (np.float32(0.5), ".2f", "0.50"),
        (np.bool_(False), "", "no"),
        ("text", ".2f", "text"),
    ],
)
def test_cells(cell: Any, spec: str, text: str) -> None:
    assert format_cell(cell, spec) == text


def test_tally() -> None:
    def claims(*states: bool | None) -> list[Claim]:
        return [Claim("", state, "") for state in states]

    assert tally_claims(claims(True, True)) == "2 of 2 claims hold."
    own = [Claim("", True, "", own=True), Claim("", None, "", own=True)]
    assert tally_claims(own) == "2 questions of our own: 1 answered yes, 0 no, 1 open."
    assert tally_claims(claims(False, False, None)) == "0 of 3 claims hold, 2 do not, 1 cannot be decided."


def test_readings_in_words() -> None:
    kept = ReadingValue("a", "1", "")
    assert describe_changed([kept]).endswith("were made; none of 1 differs from the default.")
    assert describe_changed([kept, ReadingValue("b", "2", "", True)]).endswith("; 1 of 2 differs from the default.")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ((Section("a", "", parts=(table("x"), table("X"))),), "the name 'X'"),
        ((Section("a", ""), Section("a", "")), "same name"),
        ((Section("a", "", parts=(table("../x"),)),), "letters, digits"),
        ((Section("a b", ""),), "letters, digits"),
    ],
)
def test_names_that_cannot_be(sections: tuple[Section, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match=said):
        write_report(report(sections=sections, checks=()), tmp_path)


def test_tables_that_cannot_be() -> None:
    with pytest.raises(NormscopeError, match="1 cells for 2 columns"):
        Table("t", "", ("a", "b"), ((1,),))
    with pytest.raises(NormscopeError, match="unknown columns: c"):
        Table("t", "", ("a",), (), {"c": ".2f"})


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "tables").write_text("in the way")
    with pytest.raises(NormscopeError, match="Cannot write"):
        write_report(report(), tmp_path)


def test_an_empty_report_is_a_page(tmp_path: Path) -> None:
    page = Page(write_report(Report("x", "Title", "", (), (), ()), tmp_path).read_text())
    assert "Title" in page.text
    assert "Claims" not in page.text


def test_figures_are_as_wide_as_there_is_room() -> None:
    source = html.embedded_svg(charts.chart_to_svg(chart(), "a"), "a", "A <map>")
    (root,) = [attributes for tag, attributes in Page(source).tags if tag == "svg"]
    assert "width" not in root
    assert root["aria-label"] == "A <map>"
    assert "max-width" in (root["style"] or "")
    assert "<metadata>" not in source
    assert "<style" not in source
