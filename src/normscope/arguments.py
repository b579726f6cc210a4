"""Checks of arguments that several methods take."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from normscope.errors import NormscopeError


def check_integers(what: str, given: Any) -> list[int]:
    """A list of integers from an integer, an iterable of integers, or a NumPy or PyTorch array."""
    values = given.tolist() if hasattr(given, "tolist") else given
    listed: list[Any] = list(values) if hasattr(values, "__iter__") else [values]
    if not listed:
        raise NormscopeError(f"{what}s=[] is empty. Pass at least one {what}, or leave it out.")
    listed = [entry.tolist() if hasattr(entry, "tolist") else entry for entry in listed]
    for entry in listed:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise NormscopeError(f"A {what} must be an integer, not {type(entry).__name__} {entry!r}.")
    return listed


def check_indices(what: str, given: Iterable[int] | int, size: int) -> list[int]:
    """Indices counted from 0, from indices that may be negative (from the end). Raises if one is out of range."""
    listed = check_integers(what, given)
    for entry in listed:
        if not -size <= entry < size:
            raise NormscopeError(f"There is no {what} {entry}: valid are 0 to {size - 1} (or -{size} to -1).")
    return [entry % size for entry in listed]


def check_memory_budget(given: Any) -> int | None:
    """A memory budget in bytes; None for the default."""
    if given is None:
        return None
    whole = isinstance(given, Integral) or (isinstance(given, float) and given.is_integer())
    if isinstance(given, bool) or not whole or given < 1:
        raise NormscopeError(f"memory_budget must be a number of bytes, such as 8 * 10**9, or None, not {given!r}.")
    return int(given)
