"""The page: complete, self-contained, and closed to what tokens may hold."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from normscope.analysis import Analysis
from normscope.view.html import page, write
from normscope.view.labels import visible
from tests.view.fake import NASTY, SCOPES, SENTENCE, fake, fake_translation


class Page(HTMLParser):
    """The tags of a page, and the content of its scripts."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            kind = self.tags[-1][1].get("type") or "script"
            self.scripts[kind] = self.scripts.get(kind, "") + data


def data_of(analysis: Analysis) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data: dict[str, Any] = json.loads(Page(page(analysis)).scripts["application/json"], parse_constant=refuse)
    return data


def test_data_is_whole() -> None:
    analysis = fake()
    data = data_of(analysis)
    assert [row[0] for row in data["rows"]] == list(SENTENCE)
    assert data["layers"] == list(analysis.layers)
    assert list(data["scopes"]) == list(SCOPES)
    for scope in SCOPES:
        for layer in range(6):
            got = torch.tensor(data["scopes"][scope]["map"][layer], dtype=torch.float64)
            expected = analysis[scope][layer].double().flatten()
            assert torch.all((got - expected).abs() <= 5.1e-5 * expected)
        assert torch.tensor(data["scopes"][scope]["mixing"]).shape == (6, 11)


def test_numbers_have_five_digits() -> None:
    text = Page(page(fake())).scripts["application/json"]
    for number in re.findall(r"[\[,](\d[\d.e+-]*)", text):
        assert len(re.sub(r"e.*|\.", "", number).lstrip("0")) <= 5


def test_what_is_not_finite_becomes_null() -> None:
    analysis = fake(("a", "b"), layers=(0,), scopes=("ATTN-N",))
    broken = torch.tensor([[[math.nan, math.inf], [-math.inf, 1.0]]])
    measured = {"ATTN-N": replace(analysis.measured["ATTN-N"], map=broken)}
    assert data_of(replace(analysis, measured=measured))["scopes"]["ATTN-N"]["map"] == [[None, None, None, 1]]


def test_tokens_never_become_markup() -> None:
    plain, nasty = Page(page(fake(("a",) * len(NASTY)))), Page(page(fake(NASTY)))
    assert nasty.tags == plain.tags
    text = nasty.scripts["application/json"]
    assert not re.search("[<>&\u2028\u2029]", text)
    assert text.isascii()
    assert [row[0] for row in json.loads(text)["rows"]] == [visible(token) for token in NASTY]


def test_model_names_never_become_markup() -> None:
    name = "</title><script>alert(1)</script>@data@@title@"
    source = page(fake(info={"model": name, "family": "<b>"}))
    assert Page(source).tags == Page(page(fake())).tags
    assert json.loads(Page(source).scripts["application/json"])["model"] == name


def test_the_script_writes_text_only() -> None:
    script = Page(page(fake())).scripts["script"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|fetch|XMLHttp", script)


def test_the_page_needs_no_network() -> None:
    source = page(fake())
    parsed = Page(source)
    policy = next(a["content"] for _, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:")
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", source)
    assert not any(name in attributes for _, attributes in parsed.tags for name in ("src", "href"))


def test_language_and_charset_come_first() -> None:
    source = page(fake())
    assert source.startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">')


def test_every_class_the_script_asks_for_exists() -> None:
    parsed = Page(page(fake()))
    classes = {name for _, attributes in parsed.tags for name in (attributes.get("class") or "").split()}
    asked = set(re.findall(r'\$\("(\w+)"\)', parsed.scripts["script"]))
    assert len(asked) > 10
    assert asked <= classes


@pytest.mark.parametrize("tokens", [("one",), [f"t{k}" for k in range(128)]], ids=["1", "128"])
def test_short_and_long_inputs(tokens: list[str], tmp_path: Path) -> None:
    analysis = fake(tokens, layers=range(12))
    path = write(analysis, tmp_path / "x.html")
    assert path.stat().st_size < 20_000_000
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.html"]
    assert path.read_text(encoding="utf-8") == page(analysis)


def test_analysis_writes_the_same_page(tmp_path: Path) -> None:
    assert fake().to_html(tmp_path / "x.html").read_text(encoding="utf-8") == page(fake())


def test_both_sides_are_on_one_page(tmp_path: Path) -> None:
    result = fake_translation()
    source = page(result)
    parsed = Page(source)
    assert [tag for tag, _ in parsed.tags].count("article") == 2
    sides = json.loads(parsed.scripts["application/json"])["sides"]
    assert [side["side"] for side in sides] == ["decoder", "encoder"]
    assert [column[:2] for column in sides[0]["columns"]][2:4] == [["dort", "decoder"], ["the", "encoder"]]
    assert "<title>normscope: some/model: decoder 3 tokens, 6 layers; encoder 2 tokens, 6 layers</title>" in source
    assert result.to_html(tmp_path / "x.html").read_text(encoding="utf-8") == source


def test_one_side_alone_is_an_article() -> None:
    assert [tag for tag, _ in Page(page(fake())).tags].count("article") == 1


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
@pytest.mark.slow
def test_the_script_runs(tmp_path: Path) -> None:
    path = write(fake_translation(), tmp_path / "x.html")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{path}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert dom.count("<canvas") == 2
    for part in ("some/model, decoder", "some/model, encoder", "decoder tokens", "encoder tokens"):
        assert f">{part}<" in dom
