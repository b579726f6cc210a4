"""`normscope analyze --target`: how much each input token adds to a logit, in the terminal or in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from normscope.cli import shared
from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from normscope import Analyzer
    from normscope.flow.result import Flow

TABLES = (".npz", ".safetensors")


@dataclass(frozen=True)
class Aim:
    """What to explain, and how."""

    target: str | tuple[str, str]
    position: int | None  # counted from 0
    method: str


def aim_of(target: str | None, against: str | None, position: int | None, method: str) -> Aim | None:
    """The options of a target together; None where there is no target."""
    if target is None:
        given = {"--against": against, "--position": position, "--method": None if method == "exact" else method}
        for option, value in given.items():
            if value is not None:
                raise NormscopeError(f"{option} says how a target is explained: give one with --target, such as top.")
        return None
    place = position - 1 if position is not None and position > 0 else position
    return Aim(target if against is None else (target, against), place, method)


def check_options(maps: Mapping[str, Any]) -> None:
    """Refuse options that choose among maps: a target is explained across all of them."""
    for option, value in maps.items():
        if value:
            raise NormscopeError(
                f"{option} chooses among maps, but --target explains a logit across all layers: leave one of them out."
            )


def check_path(path: Path) -> None:
    """Refuse a format that holds maps only."""
    if path.suffix.lower() in TABLES:
        raise NormscopeError(f"Cannot write the scores of a target to {path}: use .html, .json, .svg, .pdf or .png.")


def explain(lens: Analyzer, given: Mapping[str, Any], aim: Aim, out: Sequence[Path], truncate: bool, gate: str) -> None:
    """Print the scores of the tokens, or write them."""
    from normscope.view import flow_terminal

    options = {**given, "truncation": truncate, "gate": gate}
    with shared.counted():
        flow = lens.flow(**options, target=aim.target, position=aim.position, method=aim.method)
    if not out:
        Console(highlight=False).print(flow_terminal.scores(flow))
        return
    for path in out:
        _write(lens, flow, options, path)
    typer.echo(f"{flow_terminal.equation(flow)}: wrote {', '.join(map(str, out))}")


def _write(lens: Analyzer, flow: Flow, given: Mapping[str, Any], path: Path) -> None:
    from normscope.view import figure, flow_export

    suffix = path.suffix.lower()
    if suffix == ".json":
        flow_export.write_json(flow, path)
    elif suffix == ".html":
        options = dict(given)
        text = options.pop("text")
        if lens.two_sided and isinstance(text, tuple):
            text, options["text_target"] = text
        shared.analyzed(lens, text, **options).to_html(path, flow=flow)
    else:
        figure.save(figure.figure_of(flow.plot()), path)
