"""Families and measures of other packages, found by their entry points.

A package states them in its pyproject.toml:

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


def load(group: str, check: Callable[[Any], None]) -> list[Any]:
    """The objects that the entry points of a group name. One that cannot be loaded, or that `check` refuses, is left
    out with a warning."""
    found = []
    for point in entry_points(group=group):
        try:
            loaded = point.load()
            check(loaded)
        except Exception as error:  # the code of other packages may raise anything
            package = point.dist.name if point.dist is not None else point.value
            warnings.warn(
                f"The package {package} has an entry point {point.name!r} in {group} that cannot be used "
                f"({point.value}: {error}). It is left out. Update or remove the package.",
                category=NormscopeWarning,
                stacklevel=3,
            )
        else:
            found.append(loaded)
    return found
