"""The text of a release page: one section of the changelog, and only for the tagged version."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from docs.release_notes import check_tag, release_notes
from normscope import __version__
from tests.helpers.pages import ROOT

CHANGELOG = """# Changelog

## [Unreleased]

### Added

- Something new.

## [0.2.0] - 2026-01-31

### Added

- A first thing, which is long
  and goes on.
- A second thing:
  `code`.

### Changed

A paragraph
of two lines.

## [0.1.0] - 2025-12-01

- The first release.

## [0.0.2]

- No date.

## [0.0.1] - 2025-11-01

"""


def test_a_section_has_one_line_for_each_entry() -> None:
    assert release_notes(CHANGELOG, "0.2.0").splitlines() == [
        "### Added",
        "",
        "- A first thing, which is long and goes on.",
        "- A second thing: `code`.",
        "",
        "### Changed",
        "",
        "A paragraph of two lines.",
    ]
    assert release_notes(CHANGELOG, "0.1.0") == "- The first release.\n"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.3.0", "CHANGELOG.md has no section for 0.3.0"),
        ("0.2", "CHANGELOG.md has no section for 0.2"),
        ("0.0.2", "The section for 0.0.2 has no date"),
        ("0.0.1", "The section for 0.0.1 is empty"),
    ],
)
def test_a_section_that_is_not_ready_is_refused(version: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        release_notes(CHANGELOG, version)


def test_a_tag_must_be_that_of_the_version() -> None:
    check_tag("v0.2.0", "0.2.0")
    for tag in ("0.2.0", "v0.2", "v0.2.0rc1"):
        with pytest.raises(ValueError, match=r"expected v0\.2\.0"):
            check_tag(tag, "0.2.0")


def test_the_command_refuses_another_tag() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "docs.release_notes", "v99.0.0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == 1
    assert done.stderr == f"error: The tag v99.0.0 does not match version {__version__}: expected v{__version__}.\n"
