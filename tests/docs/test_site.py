"""The site builds without a warning, every link in it leads somewhere, and it loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from normscope.models.registry import FAMILIES
from tests.helpers.pages import DOCS, ROOT, links, pages

pytest.importorskip("mkdocs")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "use": "href"}
NOT_LOADED = {"canonical", "next", "prev", "alternate"}  # links that only name a page


class Page(HTMLParser):
    """Links, loaded files and anchors of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if name := given.get("id"):
            self.anchors.add(name)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if LOADED.get(tag) in given and not (tag == "link" and given.get("rel") in NOT_LOADED):
            self.loaded.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; warnings are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]  # --quiet would hide them
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@cache
def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def html(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_every_page_is_there(site: Path) -> None:
    written = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    written |= {f"tutorials/{path.stem}.html" for path in (DOCS / "tutorials").glob("*.ipynb")}
    made = {path.relative_to(site).as_posix() for path in html(site)}
    assert {name.replace("README.html", "index.html") for name in written} <= made | {"findings/README.html"}
    assert {"contributing.html", "code-of-conduct.html", "security.html", "changelog.html"} <= made
    assert "api/command-line.html" in made


def test_links_lead_somewhere(site: Path) -> None:
    broken = []
    for page in html(site):
        for link in read(page).links + read(page).loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if target.is_dir():
                target /= "index.html"
            ok = target.is_file()
            if ok and parts.fragment and target.suffix == ".html" and not parts.fragment.startswith("__"):
                ok = unquote(parts.fragment) in read(target).anchors
            if not ok:
                broken.append(f"{page.relative_to(site)} -> {link}")
    assert not broken


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in html(site):
        assert not [link for link in read(page).loaded if urlsplit(link).netloc], page
    for sheet in site.rglob("*.css"):
        text = re.sub(r"/\*.*?\*/", "", sheet.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", text), sheet
        assert "@import" not in text, sheet


def test_every_formula_is_drawn(site: Path) -> None:
    seen = 0
    for page in html(site):
        text = page.read_text(encoding="utf-8")
        assert "arithmatex" not in text, page
        for formula in re.findall(r"<math.*?</math>", text, re.DOTALL):
            assert not re.search(r"<m\w+[^>]*>\\", formula), f"{page}: {formula}"  # a command that was not understood
            seen += 1
    assert seen > 40


def test_the_search_has_every_page(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    for word in ("concepts.html", "guides/ray.html", "api/analyzer.html#normscope.analyzer.Analyzer.analyze"):
        assert word in index


def relative() -> Iterator[tuple[Path, str]]:
    for page in pages():
        for link in links(page.read_text(encoding="utf-8")):
            if not urlsplit(link).scheme and not link.endswith(".html"):
                yield page, link


def test_links_between_the_files_themselves() -> None:
    """As shown on GitHub: README, CONTRIBUTING and docs/ without the site."""
    broken = []
    for page, link in relative():
        parts = urlsplit(link)
        target = (page.parent / parts.path).resolve() if parts.path else page
        if page.is_relative_to(DOCS / "findings") and parts.path.startswith("tables/"):
            continue  # named by the reports, and not kept
        anchored = not parts.fragment or target.suffix != ".md" or _has_anchor(target, parts.fragment)
        if not target.exists() or not anchored:
            broken.append(f"{page.relative_to(ROOT)} -> {link}")
    assert not broken


def _has_anchor(page: Path, anchor: str) -> bool:
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return anchor in slugs or f'id="{anchor}"' in text or f'name="{anchor}"' in text


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_number_of_families_is_right(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert set(re.findall(r"\[(\d+) families\]", text)) == {str(len(FAMILIES))}
