"""The code on every page of docs/ runs, block after block in one namespace, and prints what the page says it prints."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from normscope import models

PAGES = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Block:
    code: str
    line: int  # of the page, where the code begins
    printed: str | None  # the text block that follows at once, if one does


def blocks(text: str) -> list[Block]:
    """The python blocks; a `text` block with nothing but blank lines before it is what the python block prints."""
    found: list[Block] = []
    end = None
    for match in FENCE.finditer(text):
        kind, body = match.groups()
        if kind == "python":
            found.append(Block(body, text.count("\n", 0, match.start(2)), None))
        elif kind == "text" and end is not None and not text[end : match.start()].strip():
            found[-1].printed = body
        end = match.end() if kind == "python" else None
    return found


def run(page: Path, module: ModuleType) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        code = compile("\n" * block.line + block.code, str(page), "exec", dont_inherit=True)  # errors name the line
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, vars(module))
        if block.printed is not None:
            assert printed.getvalue() == block.printed, f"{page.name}:{block.line + 1} prints something else"


@pytest.mark.parametrize("page", sorted(p for p in PAGES.glob("*.md") if blocks(p.read_text())), ids=lambda p: p.stem)
def test_the_code_of_a_page(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A module of its own: transformers and normscope look up what is beside a class.
    module = ModuleType(f"docs_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(models, "_registered", [])
    monkeypatch.chdir(tmp_path)
    run(page, module)


def test_blocks_are_found_with_what_they_print() -> None:
    text = "a\n```python\nprint(1)\n```\n\n```text\n1\n```\nb\n```python\nx = 2\n```\nc\n```text\nno output\n```\n"
    assert blocks(text) == [Block("print(1)\n", 2, "1\n"), Block("x = 2\n", 10, None)]


def test_a_page_that_fails_or_prints_something_else_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:6 prints something else"):
        run(page, ModuleType("page"))
    page.write_text("```python\nraise KeyError\n```\n")
    with pytest.raises(KeyError):
        run(page, ModuleType("page"))
