"""The versions that normscope says it is tested with are the same everywhere, and any other raises a warning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from normscope.models import versions

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _not_yet_warned() -> Iterator[None]:
    versions.warn_if_untested_version.cache_clear()
    yield
    versions.warn_if_untested_version.cache_clear()


def found(pattern: str, name: str) -> str:
    match = re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert match, f"{name} has no {pattern}"
    return match[1]


def test_the_lowest_and_the_newest_are_stated_alike() -> None:
    lowest, newest = versions.TESTED
    assert found(r'"transformers>=([\d.]+),', "pyproject.toml") == lowest
    assert found(r"^transformers==([\d.]+)$", "constraints.txt") == newest


@pytest.mark.parametrize("installed", ["4.57.6", "5.0.0", "5.19.4", "5.23.0", "5.100.0.dev0", "6.0.0rc1"])
def test_another_version_is_warned_of_once(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.transformers, "__version__", installed)
    lowest, newest = versions.TESTED
    with pytest.warns(UserWarning, match=re.escape(f"{lowest} to {newest}; {installed} is installed")):
        versions.warn_if_untested_version()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_if_untested_version()


@pytest.mark.parametrize("installed", [*versions.TESTED, "5.21.1", "5.22.9", "5.22.0.dev0"])
def test_tested_versions_do_not_warn(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.transformers, "__version__", installed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_if_untested_version()
