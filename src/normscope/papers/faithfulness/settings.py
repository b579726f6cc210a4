"""Settings of a comparison, which are stored with the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from normscope.errors import NormscopeError

TARGETS = ("top", "given")
ERASURES = ("mask", "delete")


@dataclass(frozen=True)
class Settings:
    """What to compare, and how; without `methods`, all methods are compared."""

    methods: tuple[str, ...] = ()
    target: str = "top"  # the model's own prediction; "given": the label, or the actual token
    positions: int = 0  # language models: number of random positions per text; 0: the last position
    erasures: tuple[str, ...] = ERASURES  # "mask" replaces tokens, "delete" removes them
    replacement: str = ""  # the replacement token; empty: see `predictions.replacement_token`
    seed: int = 0  # of the random positions and scores

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise NormscopeError(f"The target must be one of {', '.join(TARGETS)}, not {self.target!r}.")
        if not self.erasures or set(self.erasures) - set(ERASURES):
            raise NormscopeError(f"Erasures must be {' or '.join(ERASURES)}, not {', '.join(self.erasures)!r}.")
        if self.positions < 0:
            raise NormscopeError(
                f"The number of positions must be 0 (the last position) or more, not {self.positions}."
            )

    def to_plain(self) -> dict[str, Any]:
        """The settings in the form stored in a run's manifest."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def settings_from_plain(given: Mapping[str, Any]) -> Settings:
    """Settings from `to_plain`; missing ones keep their defaults. "head" only distinguishes models."""
    known = {entry.name for entry in fields(Settings)}
    given = {key: value for key, value in given.items() if key != "head"}
    if set(given) - known:
        raise NormscopeError(f"Unknown faithfulness settings: {', '.join(sorted(set(given) - known))}.")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Settings(**values)
