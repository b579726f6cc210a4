"""The versions of transformers that normscope supports, and what is special about some of them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from normscope.errors import NormscopeError

# The oldest (pyproject.toml), the pinned (constraints.txt) and the newest version that the tests were run with.
TESTED = ("5.0.0", "5.22.2", "5.23.0")
# Model type -> a setting of its attention that sdpa, its default, ignores before the given version.
IGNORED_BY_SDPA = {
    "gemma2": ("attn_logit_softcapping", (5, 21)),
    "gpt2": ("scale_attn_by_inverse_layer_idx", (5, 4)),
}


class TransformersVersionError(NormscopeError, ImportError):
    """Raised on import if transformers is missing or too old."""


@cache
def installed_version() -> str:
    """The installed version of transformers, without importing it."""
    try:
        return version("transformers")
    except PackageNotFoundError as error:
        raise TransformersVersionError(
            f"normscope needs transformers, which is not installed: pip install 'transformers>={TESTED[0]}'."
        ) from error


def refuse_old_transformers() -> None:
    """Raise an error in one sentence if the installed transformers is too old, instead of failing on import."""
    installed = installed_version()
    if minor_version(installed) < minor_version(TESTED[0]):
        raise TransformersVersionError(
            f"normscope needs transformers {TESTED[0]} or newer, but {installed} is installed: upgrade it with "
            f"pip install 'transformers>={TESTED[0]}'."
        )


def is_tested(installed: str) -> bool:
    """Whether the tests were run with this version of transformers, or with another patch of it."""
    return minor_version(installed) in map(minor_version, TESTED)


def sdpa_ignores(config: Any, installed: str) -> str | None:
    """The setting of a config that sdpa attention ignores in this version of transformers, or None."""
    name, fixed = IGNORED_BY_SDPA.get(config.model_type, ("", (0, 0)))
    return name if minor_version(installed) < fixed and getattr(config, name, None) else None


def minor_version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
