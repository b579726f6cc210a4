"""Progress of a run that has several parts: tokens written, layers read, targets explained.

The parts are far apart, and one is inside another library, so they report to whoever follows the run in this thread
instead of passing a callback from function to function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class FollowedSteps:
    """The steps of a run that are done and those to be done, by part."""

    progress: Callable[[int, int], None]
    totals: dict[str, int]  # at first, what is expected
    done: dict[str, int] = field(default_factory=dict)
    finished: int = 0  # of parts that began again, such as the layers of a second pass

    def report(self, part: str, done: int, total: int) -> None:
        """Say that `done` of the `total` steps of a part are done."""
        last = self.done.get(part, 0)
        if last and (done < last or last == self.totals[part]):
            self.finished += last
        self.done[part], self.totals[part] = done, total
        token = FOLLOWED.set(None)  # the callback may run the library itself
        try:
            self.progress(self.finished + sum(self.done.values()), self.finished + sum(self.totals.values()))
        finally:
            FOLLOWED.reset(token)


FOLLOWED: ContextVar[FollowedSteps | None] = ContextVar("followed", default=None)


@contextmanager
def follow_steps(progress: Callable[[int, int], None], expected: Mapping[str, int]) -> Iterator[None]:
    """Call `progress` with the number of steps done and the total, of all parts so far and of those `expected`."""
    token = FOLLOWED.set(FollowedSteps(progress, dict(expected)))
    try:
        yield
    finally:
        FOLLOWED.reset(token)
