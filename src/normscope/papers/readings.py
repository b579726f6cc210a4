"""Readings: documented parameters for the choices that a paper leaves open.

@dataclass(frozen=True)
class Readings:
    mask_seed: int = reading(0, "seed of the draw of masked tokens")
    distance: str = reading_choice("how far apart two subwords are", "absolute", "signed")
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from normscope.errors import NormscopeError, did_you_mean
from normscope.reports.report import ReadingValue

Readings = TypeVar("Readings")
TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def reading(default: Any, help: str, choices: Sequence[Any] | None = None) -> Any:
    """A field of a readings dataclass: a str, int, float or bool, limited to `choices` if given."""
    return field(default=default, metadata={"help": help, "choices": None if choices is None else tuple(choices)})


def reading_choice(help: str, *options: str) -> Any:
    """A field of a readings dataclass with fixed options; the first is the default."""
    return reading(options[0], help, options)


def parse_readings(cls: type[Readings], given: Sequence[str]) -> Readings:
    """Readings from "key=value" strings; missing ones keep their defaults, whose types are used for conversion."""
    known: dict[str, Field[Any]] = {entry.name: entry for entry in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    values: dict[str, Any] = {}
    for entry in given:
        key, equals, value = entry.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not name:
            raise NormscopeError(f"A reading must have the form KEY=VALUE, not {entry!r}.")
        if name not in known:
            raise NormscopeError(
                f"Unknown reading {key!r}.{did_you_mean(name, known)} Known: {', '.join(known) or 'none'}."
            )
        values[name] = _parse_reading(known[name], value.strip())
    return cls(**values)


def describe_readings(readings: Any) -> tuple[ReadingValue, ...]:
    """Name, value and meaning of each reading, with its choices and default."""
    found = ((entry, getattr(readings, entry.name)) for entry in fields(readings))
    return tuple(
        ReadingValue(entry.name, _format_reading(value), _explain_reading(entry), value != entry.default)
        for entry, value in found
    )


def _parse_reading(entry: Field[Any], text: str) -> Any:
    value = _convert_reading(entry.name, text, type(entry.default))
    choices = entry.metadata["choices"]
    if choices is not None and value not in choices:
        raise NormscopeError(
            f"The reading {entry.name} must be one of {', '.join(map(_format_reading, choices))}, not {text!r}."
        )
    return value


def _convert_reading(name: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return TRUTHS[text.lower()]
        if kind is int:
            return int(text)
        if kind is float:
            number = float(text)
            if math.isfinite(number):
                return number
            raise ValueError
    except (KeyError, ValueError) as error:
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise NormscopeError(f"The reading {name} must be {wanted}, not {text!r}.") from error
    return text


def _explain_reading(entry: Field[Any]) -> str:
    choices = entry.metadata["choices"]
    others = f"one of {', '.join(map(_format_reading, choices))}; " if choices else ""
    return f"{entry.metadata['help']} ({others}default {_format_reading(entry.default)})"


def _format_reading(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
