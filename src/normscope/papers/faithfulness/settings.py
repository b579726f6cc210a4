"""The settings of a comparison, which are kept with the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from normscope.errors import NormscopeError

TARGETS = ("top", "given")
ERASURES = ("mask", "delete")


@dataclass(frozen=True)
class Settings:
    """What is compared, and how; `methods` empty: all methods."""

    methods: tuple[str, ...] = ()
    target: str = "top"  # what the model itself predicts, or "given": the label, the token that really follows
    positions: int = 0  # language models: this many random positions of each text; 0: the last one
    erasures: tuple[str, ...] = ERASURES  # "mask" replaces tokens, "delete" removes them
    replacement: str = ""  # the token that replaces them; empty: see `predictions.replacement_token`
    seed: int = 0  # of the random positions and scores

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise NormscopeError(f"The target is one of {', '.join(TARGETS)}, not {self.target!r}.")
        if not self.erasures or set(self.erasures) - set(ERASURES):
            raise NormscopeError(f"Tokens are taken away by {' or '.join(ERASURES)}, not {', '.join(self.erasures)!r}.")
        if self.positions < 0:
            raise NormscopeError(f"The number of positions is 0 (the last one) or more, not {self.positions}.")

    def to_plain(self) -> dict[str, Any]:
        """The settings as a run's manifest keeps them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def settings_from_plain(given: Mapping[str, Any]) -> Settings:
    """The settings from `to_plain`, or their defaults. "head" only distinguishes runs with different heads."""
    known = {entry.name for entry in fields(Settings)}
    given = {key: value for key, value in given.items() if key != "head"}
    if set(given) - known:
        raise NormscopeError(f"There is no setting {', '.join(sorted(set(given) - known))} of faithfulness.")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Settings(**values)
