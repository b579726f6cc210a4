"""The transformers versions that normscope is tested with."""

from __future__ import annotations

import warnings
from functools import lru_cache

import transformers

from normscope.errors import NormscopeWarning

TESTED = ("5.21.0", "5.22.2")  # lowest (pyproject.toml) and newest (constraints.txt)


@lru_cache(maxsize=1)
def warn_if_untested_version() -> None:
    """Warn once if the installed transformers is older or newer than the tested minor versions."""
    installed = transformers.__version__
    lowest, newest = TESTED
    if (
        not _minor_transformers_version(lowest)
        <= _minor_transformers_version(installed)
        <= _minor_transformers_version(newest)
    ):
        warnings.warn(
            f"normscope is tested with transformers {lowest} to {newest}; {installed} is installed. Models whose "
            "layers are built differently in that version may be refused.",
            category=NormscopeWarning,
            stacklevel=3,
        )


def _minor_transformers_version(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
