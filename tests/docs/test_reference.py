"""The reference lists every module of the library, with a sentence about it."""

from __future__ import annotations

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("latex2mathml")

from docs.site_hooks import MODULES, module_table
from tests.helpers.pages import DOCS, ROOT


def test_every_module_is_in_the_reference() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md")]
    tables = [module_table(match["package"]) for page in pages for match in MODULES.finditer(page)]
    listed = [line.split("`")[1] for table in tables for line in table.splitlines()[2:]]
    assert len(set(listed)) == len(listed)
    source = ROOT / "src"
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts)
        for path in (source / "normscope").rglob("*.py")
        if not path.name.startswith("_") and path.parent.name != "cli"  # the commands have their own page
    }
    assert set(listed) == modules


def test_every_module_has_a_sentence() -> None:
    rows = module_table("normscope.measures").splitlines()[2:]
    assert len(rows) > 10
    assert all(row.endswith(". |") or row.endswith("). |") for row in rows), rows
