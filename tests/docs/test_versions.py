"""The supported versions are stated alike everywhere."""

from __future__ import annotations

import re
from pathlib import Path

from normscope.models import versions

ROOT = Path(__file__).parents[2]


def found(pattern: str, name: str) -> str:
    match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert match, f"{name} has no {pattern}"
    return match[1]


def test_the_oldest_and_the_pinned_are_stated_alike() -> None:
    oldest, pinned, newest = versions.TESTED
    assert found(r'"transformers>=([\d.]+),', "pyproject.toml") == oldest
    assert found(r"^transformers==([\d.]+)$", "constraints.txt") == pinned
    assert versions.minor_version(oldest) < versions.minor_version(pinned) <= versions.minor_version(newest)


def test_the_documentation_states_them() -> None:
    oldest, pinned, newest = versions.TESTED
    sentence = found(r"\*\*Which versions of transformers\?\*\*\n(.+)", "docs/faq.md")
    assert f"from {oldest.rpartition('.')[0]} on" in sentence
    assert f"{oldest}, {pinned} and {newest}" in sentence
    assert f"transformers {oldest.rpartition('.')[0]} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")
