"""`normscope models`: the model families and the scopes of their layers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from normscope.cli import completion
from normscope.errors import NormscopeError, did_you_mean

if TYPE_CHECKING:
    from normscope.models.spec import Family


def models_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="FAMILY",
            help="Show the scopes of this family or model type, such as Llama.",
            show_default=False,
            autocompletion=completion.complete_family,
        ),
    ] = None,
    scopes: Annotated[bool, typer.Option("--scopes", help="Also list the scopes of every kind of layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the supported model families, and what is special about each.

    Example: normscope models Llama
    """
    from normscope.models.registry import FAMILIES

    entries = [_family_entry(family) for family in FAMILIES]
    if name is not None:
        entries = _families_named(entries, name)
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    lines = list(map(_family_details, entries))
    if name is None:
        lines = _family_overview(entries, console.width if console.is_terminal else None)
        if not scopes:
            lines += [
                "",
                "`normscope models FAMILY` shows the model types and scopes of a family; --scopes lists all scopes.",
            ]
    if scopes:
        kinds = {stack["order"]: stack["scopes"] for entry in entries for stack in entry["stacks"]}
        lines += [f"\nScopes of {order}:\n{' '.join(listed)}" for order, listed in kinds.items()]
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _family_overview(entries: Sequence[dict[str, Any]], width: int | None) -> list[str]:
    """One line per family, with the decoder's layer for encoder-decoders. In a terminal, lines are cut at its width and
    have the first model type and the number of others."""
    lines = [("family", "model types", "a layer is", "note")]
    for entry in entries:
        first, *others = entry["model_types"]
        types = f"{first} +{len(others)}" if others and width is not None else ", ".join(entry["model_types"])
        lines.append((entry["name"], types, entry["stacks"][-1]["order"], entry["note"]))
    wide = [max(len(line[k]) for line in lines) for k in range(3)]
    texts = ["  ".join([*(f"{cell:{w}}" for cell, w in zip(line, wide, strict=False)), line[3]]) for line in lines]
    return texts if width is None else [text if len(text) <= width else f"{text[: width - 1]}…" for text in texts]


def _family_details(entry: dict[str, Any]) -> str:
    lines = [f"{entry['name']} ({', '.join(entry['model_types'])}): {entry['note']}"]
    for stack in entry["stacks"]:
        named: dict[str, list[str]] = {}
        for alias, scope in stack["aliases"].items():
            named.setdefault(scope, []).append(alias)
        lines.append(f"  {stack['side']} layer: {stack['order']}")
        width = max(map(len, stack["scopes"]))
        lines += [f"    {scope:{width}}  {', '.join(named.get(scope, []))}".rstrip() for scope in stack["scopes"]]
    return "\n".join(lines)


def _families_named(entries: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The families with this name or model type, in any case."""
    wanted = name.lower()
    found = [e for e in entries if wanted in (e["name"].lower(), *(kind.lower() for kind in e["model_types"]))]
    if not found:
        known = [known for e in entries for known in (e["name"], *e["model_types"])]
        raise NormscopeError(
            f"Unknown family {name!r}.{did_you_mean(name, known)} `normscope models` lists all families."
        )
    return found


def _family_entry(family: Family) -> dict[str, Any]:
    from normscope.models.scopes import scope_aliases, scope_names

    return {
        "name": family.name,
        "model_types": list(family.model_types),
        "input": family.input,
        "note": family.note,
        "stacks": [
            {
                "side": stack.side,
                "order": " ".join(re.findall("X?ATTN|MIX|RES|LN|FF", scope_names(stack.blocks)[-1])),
                "scopes": list(scope_names(stack.blocks)),
                "aliases": scope_aliases(stack.blocks),
            }
            for stack in family.stacks
        ],
    }
