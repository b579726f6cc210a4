"""What a comparison of methods depends on, beside the model and the data: it is kept with the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from normscope.errors import NormscopeError

TARGETS = ("top", "given")
ERASURES = ("mask", "delete")


@dataclass(frozen=True)
class Settings:
    """`methods` empty: all that there are."""

    methods: tuple[str, ...] = ()
    target: str = "top"  # what the model itself predicts, or "given": the label, the token that really follows
    positions: int = 0  # of a language model: so many positions of each text, drawn at random; 0: the last one
    erasures: tuple[str, ...] = ERASURES  # how tokens are taken away: another in their place, or the text closes up
    replacement: str = ""  # the token that takes their place; empty: see `predicting.neutral`
    seed: int = 0  # of the drawn positions and the random scores

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise NormscopeError(f"The target is one of {', '.join(TARGETS)}, not {self.target!r}.")
        if not self.erasures or set(self.erasures) - set(ERASURES):
            raise NormscopeError(f"Tokens are taken away by {' or '.join(ERASURES)}, not {', '.join(self.erasures)!r}.")
        if self.positions < 0:
            raise NormscopeError(f"The number of positions is 0 (the last one) or more, not {self.positions}.")

    def plain(self) -> dict[str, Any]:
        """As it is kept in a run's manifest."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def from_plain(given: Mapping[str, Any]) -> Settings:
    """What `plain` made; what is missing has its default. "head" only tells runs with different heads apart."""
    known = {entry.name for entry in fields(Settings)}
    given = {key: value for key, value in given.items() if key != "head"}
    if set(given) - known:
        raise NormscopeError(f"There is no setting {', '.join(sorted(set(given) - known))} of faithfulness.")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Settings(**values)
