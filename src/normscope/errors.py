"""The one family of exceptions and of warnings: their messages say what was wrong, what was expected and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class NormscopeError(ValueError):
    """Raised for anything normscope refuses: bad input, an unsupported model, a damaged file."""


class NormscopeWarning(UserWarning):
    """What a user must know before believing a result. The result carries it too, in `info["warnings"]`."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'a' or 'b'?"`, or nothing where no known name is close."""
    by_upper = {k.upper(): k for k in known}
    close = get_close_matches(name.upper(), by_upper, n=3, cutoff=0.4)
    return f" Did you mean {' or '.join(repr(by_upper[c]) for c in close)}?" if close else ""
