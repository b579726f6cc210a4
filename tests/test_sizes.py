"""Files and functions stay short: at most 400 lines per file, and 60 per function without its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import normscope

SOURCE = Path(normscope.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = node.end_lineno - node.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
            assert lines <= 60, f"{node.name} has {lines} lines"
