"""Families and measures from other packages, found through entry points.

A package declares them in its pyproject.toml:

    [project.entry-points."normscope.families"]
    mine = "my_package.families:MINE"

    [project.entry-points."normscope.measures"]
    sink = "my_package.measures:sink"
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from normscope.errors import NormscopeWarning


def load_entry_points(group: str, check: Callable[[Any], None]) -> list[Any]:
    """The objects that the entry points of a group refer to. An entry point that cannot be loaded, or whose object
    `check` rejects, is skipped with a warning."""
    found = []
    for point in entry_points(group=group):
        try:
            loaded = point.load()
            check(loaded)
        except Exception as error:  # third-party code may raise anything
            package = point.dist.name if point.dist is not None else point.value
            warnings.warn(
                f"Skipped the entry point {point.name!r} of the package {package} in {group}, which cannot be used "
                f"({point.value}: {error}). Update or remove the package.",
                category=NormscopeWarning,
                stacklevel=3,
            )
        else:
            found.append(loaded)
    return found
