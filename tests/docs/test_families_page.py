"""docs/families.md is the current output of docs/make_families.py."""

from __future__ import annotations

import math
import re

import transformers

from docs.make_families import GROUPS, PAGE, VERSION, page
from normscope.models.registry import FAMILIES
from normscope.models.versions import TESTED

FIGURE = re.compile(r"\b1e-\d\d\b")


def rest(text: str) -> list[str]:
    """The page without its figures and without the line that names the version."""
    return [FIGURE.sub("1e-??", line) for line in text.splitlines() if not line.startswith(VERSION)]


def test_the_page_is_up_to_date() -> None:
    kept, made = PAGE.read_text(encoding="utf-8"), page()
    assert rest(kept) == rest(made), "docs/families.md is out of date: run `make families`"
    assert f"{VERSION}{TESTED[1]}." in kept.splitlines(), "docs/families.md: run `make families`"
    if transformers.__version__ == TESTED[1]:
        # Rounding differs between machines, and may just cross a power of ten.
        pairs = list(zip(FIGURE.findall(kept), FIGURE.findall(made), strict=True))
        assert len(pairs) == 2 * len(FAMILIES)
        assert all(math.isclose(float(a), float(b), rel_tol=0.901) for a, b in pairs), pairs


def test_every_family_is_in_one_group() -> None:
    assert tuple(family for families in GROUPS.values() for family in families) == FAMILIES
