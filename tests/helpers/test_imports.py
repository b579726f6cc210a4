"""Test files import from `tests.helpers`, never from one another, and the oracles import nothing from the library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
ORACLES = ("oracle_parts", "bert_oracle", "layer_oracle", "free_oracle", "detached")


def imported_modules(path: Path) -> Iterator[str]:
    """The modules imported anywhere in a file; imported names are included as if they were modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_file(module: str) -> bool:
    return (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()


def test_no_test_file_imports_another() -> None:
    """The attacks are a program (`python -m tests.attacks`); the files of that program may use one another."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        room = path.relative_to(TESTS).parts[0]
        for module in imported_modules(path):
            if not module.startswith("tests.") or not is_file(module):
                continue
            other, name = module.split(".")[1], module.split(".")[-1]
            allowed = other == "helpers" or (other == "attacks" and room in ("attacks", "conftest.py"))
            if name.startswith("test_") or not allowed:
                found.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ORACLES)
def test_oracles_take_nothing_from_the_library(name: str) -> None:
    """Not even through the helpers that they import."""
    waiting, seen = [f"tests.helpers.{name}"], set()
    while waiting:
        module = waiting.pop()
        if module in seen or not is_file(module):
            continue
        seen.add(module)
        modules = list(imported_modules((ROOT / module.replace(".", "/")).with_suffix(".py")))
        assert not [one for one in modules if one.split(".")[0] == "normscope"], module
        waiting += [one for one in modules if one.startswith("tests.")]
