"""A family as JSON and as the Python that `models/` would hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normscope.errors import NormscopeError, did_you_mean
from normscope.models.field_types import check_field_types
from normscope.models.spec import (
    Attention,
    AttentionGate,
    Block,
    Branch,
    Experts,
    Family,
    FeedForward,
    GatedNorm,
    Norm,
    Recurrence,
    Refusal,
    ShortConvolution,
    Stack,
)

PARTS = (
    *(Attention, AttentionGate, Block, Branch, Experts, Family, FeedForward, GatedNorm, Norm, Recurrence, Refusal),
    *(ShortConvolution, Stack),
)
KINDS = {kind.__name__: kind for kind in PARTS}


def family_to_json(family: Family) -> str:
    """The family as JSON: every part an object with its `type` and the fields that are not at their default."""
    return json.dumps(_to_plain(family), indent=2) + "\n"


def family_from_json(given: str | Path | Mapping[str, Any]) -> Family:
    """A family from JSON text, the path of a file, or what JSON gave; raises an error that names what is wrong."""
    data: Any = given
    if isinstance(given, Path) or (isinstance(given, str) and not given.lstrip().startswith("{")):
        try:
            data = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NormscopeError(f"Cannot read the description {given}: {error}.") from error
    if isinstance(data, str):
        try:
            data = json.loads(data)
        except ValueError as error:
            raise NormscopeError(f"The description is not JSON: {error}.") from error
    family = _from_plain(data, "the description")
    if not isinstance(family, Family):
        raise NormscopeError(f"The description is of a {type(family).__name__}, not of a Family.")
    check_field_types(family, "the description")
    return family


def family_to_python(family: Family) -> str:
    """Python source that makes the family."""
    names = sorted(name for name in KINDS if name != "Refusal" and f"{name}(" in _source(family, ""))
    return f"from normscope.models.spec import {', '.join(names)}\n\nFAMILY = {_source(family, '')}\n"


def _changed_fields(one: Any) -> dict[str, Any]:
    """The fields of a part of the specification that are not at their default."""
    found = {}
    for field in dataclasses.fields(one):
        value = getattr(one, field.name)
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if value != made:
            found[field.name] = value
    return found


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {"type": type(value).__name__} | {k: _to_plain(v) for k, v in _changed_fields(value).items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [_to_plain(one) for one in value]
    return dict(value) if isinstance(value, Mapping) else value


def _from_plain(value: Any, where: str) -> Any:
    """The part of a specification that plain data stand for. Lists become tuples."""
    if isinstance(value, list):
        return tuple(_from_plain(one, f"{where}[{n}]") for n, one in enumerate(value))
    if not isinstance(value, Mapping) or "type" not in value:
        return value
    kind = KINDS.get(str(value["type"]))
    if kind is None:
        raise NormscopeError(f"Unknown type {value['type']!r} in {where}. Known: {', '.join(KINDS)}.")
    known = {field.name: field for field in dataclasses.fields(kind)}
    given = {name: one for name, one in value.items() if name != "type"}
    for name in given:
        if name not in known:
            raise NormscopeError(
                f"A {kind.__name__} has no field {name!r} ({where}).{did_you_mean(name, known)} "
                f"Known: {', '.join(known)}."
            )
    made = {name: _from_plain(one, f"{where}.{name}") for name, one in given.items()}
    names = made.get("attributes")
    if isinstance(names, tuple) and all(isinstance(one, str) for one in names):
        made["attributes"] = frozenset(names)
    try:
        return kind(**made)
    except TypeError as error:
        raise NormscopeError(f"A {kind.__name__} in {where} is incomplete: {error}.") from error


def _source(value: Any, indent: str) -> str:
    """Python source of a value, long parts on lines of their own."""
    deeper = indent + "    "
    if dataclasses.is_dataclass(value):
        fields = [f"{name}={_source(one, deeper)}" for name, one in _changed_fields(value).items()]
        short = f"{type(value).__name__}({', '.join(fields)})"
        if len(short) + len(indent) <= 100 and "\n" not in short:
            return short
        return f"{type(value).__name__}(\n" + "".join(f"{deeper}{one},\n" for one in fields) + f"{indent})"
    if isinstance(value, frozenset):
        return f'frozenset("{" ".join(sorted(value))}".split())'
    if isinstance(value, tuple):
        parts = [_source(one, deeper) for one in value]
        short = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if len(short) + len(indent) <= 100 and "\n" not in short:
            return short
        return "(\n" + "".join(f"{deeper}{one},\n" for one in parts) + f"{indent})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
