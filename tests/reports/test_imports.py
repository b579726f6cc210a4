"""Reports know nothing of papers, and no import of either is hidden inside a function or behind TYPE_CHECKING,
but for those of optional packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import normscope

ROOT = Path(normscope.__file__).parent
OPTIONAL = ("matplotlib", "polars")
FILES = sorted(path for room in ("reports", "papers") for path in (ROOT / room).rglob("*.py"))


def imported(nodes: Iterator[ast.AST] | list[ast.stmt]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_are_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text())
    top = list(imported(tree.body))
    hidden = list(imported(ast.walk(tree)))
    for name in top:
        hidden.remove(name)
    assert [name for name in hidden if name.partition(".")[0] not in OPTIONAL] == []


def test_reports_do_not_import_papers() -> None:
    for path in (ROOT / "reports").glob("*.py"):
        names = list(imported(ast.walk(ast.parse(path.read_text()))))
        assert not [name for name in names if name.startswith("normscope.papers")], path.name
