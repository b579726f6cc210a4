"""The page: complete, self-contained, and safe with any token."""

import base64
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from normscope import NormscopeError
from normscope.labels import visible_label_text
from normscope.view.document import pack_document
from normscope.view.html import build_page, escape_script, read_static_file, script_hash, server_page, write_page
from tests.helpers.fakes import NASTY, fake, fake_picture, fake_translation

NAME = "</title><script>alert(1)</script>{policy}{title}{style}{without}"


class Page(HTMLParser):
    """The tags of a page, the content of its scripts by their ids, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            name = self.tags[-1][1].get("id") or "script"
            self.scripts[name] = self.scripts.get(name, "") + data
        else:
            self.words.append(data)

    @property
    def policy(self) -> str:
        return next(str(a["content"]) for _, a in self.tags if a.get("http-equiv") == "Content-Security-Policy")


def without_policy(parsed: Page) -> list[tuple[str, dict[str, str | None]]]:
    return [entry for entry in parsed.tags if entry[0] != "meta"]


def test_everything_is_in_the_page() -> None:
    analysis = fake(heads=3)
    parsed = Page(build_page(analysis))
    described, data = pack_document(analysis)
    assert json.loads(parsed.scripts["normscope-header"]) == described
    assert base64.b64decode(parsed.scripts["normscope-data"]) == data
    assert len(zlib.decompress(data, -15)) == 2 * 6 * 11 * 11 * (8 + 2 * 3)
    assert parsed.scripts["script"] == escape_script(read_static_file("viewer.js"))
    assert ("div", {"id": "normscope"}) in parsed.tags


def test_tokens_never_become_markup() -> None:
    plain, nasty = Page(build_page(fake(("a",) * len(NASTY)))), Page(build_page(fake(NASTY)))
    assert without_policy(nasty) == without_policy(plain)
    text = nasty.scripts["normscope-header"]
    assert text.isascii()
    assert not re.search("[<>&]", text)
    tokens = [row["token"] for row in json.loads(text)["sides"][0]["rows"]]
    assert tokens == [visible_label_text(token) for token in NASTY]


def test_names_of_models_never_become_markup() -> None:
    parsed = Page(build_page(fake(info={"model": NAME, "family": "<b>"})))
    assert without_policy(parsed) == without_policy(Page(build_page(fake())))
    assert json.loads(parsed.scripts["normscope-header"])["model"]["name"] == NAME


def test_only_the_viewer_may_run() -> None:
    parsed = Page(build_page(fake()))
    assert parsed.policy == (
        f"default-src 'none'; script-src {script_hash(parsed.scripts['script'])}; style-src 'unsafe-inline'; "
        "img-src data: blob:; connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    executed = [a for tag, a in parsed.tags if tag == "script" and "type" not in a]
    assert executed == [{}]


def test_the_page_loads_nothing_external() -> None:
    parsed = Page(build_page(fake()))
    assert not [a for _, a in parsed.tags if "src" in a or not str(a.get("href", "data:")).startswith("data:")]
    assert not re.search(r"@import|url\((?!['\"]?data:)", parsed.scripts["script"])


def test_language_and_charset_come_first() -> None:
    assert build_page(fake()).startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">')


def test_pages_without_scripts_list_the_strongest_cells() -> None:
    source = build_page(fake_translation())
    without = source.partition("<noscript>")[2].partition("</noscript>")[0]
    assert "some/model: decoder 3 tokens, 6 layers; encoder 2 tokens, 6 layers" in without
    assert "<bdi>dort</bdi>" in without
    assert "worst completeness error 2.5e-07" in without
    assert without.count("<ol>") == 2
    assert "<li><bdi>" in without
    assert "<noscript" not in build_page(fake(("</noscript><script>alert(1)</script>", "b"))).partition("<noscript>")[2]


def test_one_token_has_no_strongest_cells() -> None:
    assert "<ol></ol>" in build_page(fake(("one",)))


def test_a_page_of_the_largest_usual_size(tmp_path: Path) -> None:
    """128 tokens, 12 layers, all scopes: less than 5 MB, with cells to better than a thousandth."""
    analysis = fake([f"token{k}" for k in range(128)], layers=range(12))
    path = write_page(analysis, tmp_path / "x.html")
    assert path.stat().st_size < 5_000_000
    assert pack_document(analysis)[0]["precision"] < 1e-3
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.html"]


def test_results_write_the_same_page(tmp_path: Path) -> None:
    for result in (fake(), fake_translation()):
        assert result.to_html(tmp_path / "x.html").read_text(encoding="utf-8") == build_page(result)


def test_the_same_result_is_the_same_page() -> None:
    assert build_page(fake()) == build_page(fake())


def test_a_picture_is_in_the_page(tmp_path: Path) -> None:
    image = torch.zeros(20, 30, 3).numpy()
    source = fake_picture().to_html(tmp_path / "x.html", image=image).read_text()
    assert json.loads(Page(source).scripts["normscope-header"])["image"].startswith("data:image/png;base64,")
    with pytest.raises(NormscopeError, match="not of an image"):
        fake().to_html(tmp_path / "y.html", image=image)


def test_a_failed_page_leaves_no_file(tmp_path: Path) -> None:
    broken = replace(fake().measured["ATTN-N"], map=torch.full((6, 11, 11), torch.nan))
    with pytest.raises(NormscopeError, match="NaN"):
        replace(fake(), measured={"ATTN-N": broken}).to_html(tmp_path / "x.html")
    assert not list(tmp_path.iterdir())


def test_a_script_inside_a_page_does_not_end_early() -> None:
    script = "a='</script>',b=`<!-- x </SCRIPT >`,c=1<2"
    made = escape_script(script)
    assert made == r"a='\x3c/script>',b=`\x3c!-- x \x3c/SCRIPT >`,c=1<2"
    source = escape_script(read_static_file("viewer.js"))
    assert not re.search("</script|<!--", source, re.IGNORECASE)


def test_a_viewer_that_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NormscopeError, match=r"other\.js is missing. Build it with `make web`"):
        read_static_file("other.js")


def test_the_served_page_has_no_inline_script() -> None:
    parsed = Page(server_page())
    assert [a for tag, a in parsed.tags if tag == "script"] == [{"src": "/viewer.js", "defer": None}]
    assert not parsed.scripts
    assert "script-src 'self';" in parsed.policy
    assert "connect-src 'self';" in parsed.policy
