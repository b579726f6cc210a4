"""Plugins: families and measures of other packages, and normscope's own measures.

Another package declares them as entry points in its pyproject.toml:

    [project.entry-points."normscope.families"]
    mine = "my_package.families:MINE"

    [project.entry-points."normscope.measures"]
    sink = "my_package.measures:sink"

normscope's own modules are listed in OWN_MODULES. They are not entry points, because entry points exist only in the
metadata of an installed package: a source tree on PYTHONPATH, or a package directory sent to Ray workers, has none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from normscope.errors import NormscopeWarning

# Importing one registers what it defines.
OWN_MODULES = {
    "normscope.measures": (
        "normscope.corpus.word_links",
        "normscope.corpus.comparison",
        "normscope.corpus.explained",
        "normscope.papers.measures",
    )
}


def import_own_modules(group: str) -> None:
    """Import normscope's own modules that register objects of a group."""
    for module in OWN_MODULES.get(group, ()):
        import_module(module)


def load_entry_points(group: str, check: Callable[[Any], None]) -> list[Any]:
    """The objects named by the entry points of a group.

    An entry point that cannot be loaded, or whose object `check` rejects, is skipped with a warning.
    """
    found = []
    for point in entry_points(group=group):
        try:
            loaded = point.load()
            check(loaded)
        except Exception as error:  # third-party code may raise anything
            package = point.dist.name if point.dist is not None else point.value
            warnings.warn(
                f"The package {package} has an entry point {point.name!r} in {group} that cannot be used "
                f"({point.value}: {error}). It is skipped. Update or remove the package.",
                category=NormscopeWarning,
                stacklevel=3,
            )
        else:
            found.append(loaded)
    return found
