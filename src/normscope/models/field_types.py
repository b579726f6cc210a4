"""Whether the fields of a description have the types that the specification gives them."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from normscope.errors import NormscopeError


def check_field_types(part: Any, where: str) -> None:
    """Raise an error that names the first field of a part of the specification, or of a part inside it, that holds
    something of another type than it should, or no path where there must be one."""
    kind = type(part)
    hints = get_type_hints(kind)
    for field in dataclasses.fields(part):
        value, place = getattr(part, field.name), f"{where}.{field.name}"
        if not _is_of_type(value, hints[field.name]):
            expected = _described(hints[field.name])
            raise NormscopeError(f"{place} ({kind.__name__}) cannot be {_shown(value)}; expected {expected}.")
        if value == "" and field.default is dataclasses.MISSING and field.name != "module":
            raise NormscopeError(f"{place} ({kind.__name__}) is empty.")
        _check_inside(value, place)


def _check_inside(value: Any, where: str) -> None:
    if dataclasses.is_dataclass(value):
        check_field_types(value, where)
    elif isinstance(value, tuple):
        for number, one in enumerate(value):
            _check_inside(one, f"{where}[{number}]")


def _is_of_type(value: Any, expected: Any) -> bool:
    origin, inside = get_origin(expected), get_args(expected)
    if expected is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_is_of_type(value, one) for one in inside)
    if origin is Literal:
        return isinstance(value, str) and value in inside
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of_type(one, inside[0]) for one in value)
    if origin is frozenset:
        return isinstance(value, frozenset) and all(_is_of_type(one, inside[0]) for one in value)
    if expected in (int, float):
        return isinstance(value, int if expected is int else int | float) and not isinstance(value, bool)
    return isinstance(value, origin or expected)


def _shown(value: Any) -> str:
    text = f"a {type(value).__name__}" if dataclasses.is_dataclass(value) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _described(expected: Any) -> str:
    """A type as it is written in the specification."""
    if get_origin(expected) is None:
        return str(expected.__name__)
    return str(expected).replace("normscope.models.spec.", "").replace("typing.", "")
