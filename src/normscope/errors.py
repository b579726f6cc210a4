"""The exception and warning classes. Messages say what was wrong, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class NormscopeError(ValueError):
    """Raised for invalid input, an unsupported model, a damaged file and anything else normscope refuses."""


class NormscopeWarning(UserWarning):
    """Issued when a result should be read with care. Also stored in the result, as `info["warnings"]`."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'a' or 'b'?"` with the known names closest to `name`, or `""` if none is close."""
    by_upper = {k.upper(): k for k in known}
    close = get_close_matches(name.upper(), by_upper, n=3, cutoff=0.4)
    return f" Did you mean {' or '.join(repr(by_upper[c]) for c in close)}?" if close else ""
