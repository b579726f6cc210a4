"""`make release-notes`: the section of CHANGELOG.md for the current version, as the text of its release page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from normscope import __version__

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
HEADING = re.compile(r"^## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d\d-\d\d))?$", re.MULTILINE)


def release_notes(changelog: str, version: str) -> str:
    """The section of a version, with each entry on one line, because a release page keeps line breaks.

    Raises ValueError if the section is missing, is empty or has no date.
    """
    for heading in HEADING.finditer(changelog):
        if heading["version"] == version:
            break
    else:
        raise ValueError(f"CHANGELOG.md has no section for {version}. Move the unreleased changes under it.")
    if not heading["date"]:
        raise ValueError(f"The section for {version} has no date. Write: ## [{version}] - YYYY-MM-DD")
    section = re.split(r"^## ", changelog[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0].strip()
    if not section:
        raise ValueError(f"The section for {version} is empty.")
    return re.sub(r"(?<=\S)\n *(?![\s#*|-])", " ", section) + "\n"


def check_tag(tag: str, version: str) -> None:
    """Raise ValueError unless the tag matches the version."""
    if tag != f"v{version}":
        raise ValueError(f"The tag {tag} does not match version {version}: expected v{version}.")


def main() -> None:
    try:
        for tag in sys.argv[1:]:
            check_tag(tag, __version__)
        print(release_notes(CHANGELOG.read_text(encoding="utf-8"), __version__), end="")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
