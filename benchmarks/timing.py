"""Timing on a shared machine: tasks take turns, and the best time of each counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

Task = Callable[[], object]
Seconds = dict[str, list[float]]
AGREE = 1.05  # largest ratio of a task's two best times; above it, the task is run again
PATIENCE = 2  # most time to spend on that, as a multiple of the budget


def interleaved(tasks: Mapping[str, Task], budget: float, least: int = 3, most: int = 60) -> Seconds:
    """Run every task in every round, in alternating order, for about `budget` seconds, and return all times in seconds.

    In each round, a short task runs as often as it fits into an eighth of the longest task's time, at most ten times,
    because the long task leaves the caches cold. The short task thus has more tries for its best time, which biases a
    ratio of a long and a short task in favour of the short one. Rounds continue, up to a limit, until every task has
    reached nearly its best time twice; otherwise the machine was busy. No separate warm-up is needed, because the best
    of several rounds ignores the first.
    """
    seconds: Seconds = {name: [] for name in tasks}
    order = list(tasks)
    start = time.perf_counter()
    for turn in range(most):
        longest = max((min(times) for times in seconds.values() if times), default=0.0)
        for name in order:
            fits = int(longest / (8 * min(seconds[name]))) if seconds[name] else 1
            for _ in range(min(10, max(1, fits))):
                begin = time.perf_counter()
                tasks[name]()
                seconds[name].append(time.perf_counter() - begin)
        order.reverse()
        spent = time.perf_counter() - start
        if turn + 1 >= least and (spent > PATIENCE * budget or (spent > budget and settled(seconds))):
            break
    return seconds


def best(seconds: Seconds) -> dict[str, float]:
    return {name: min(times) for name, times in seconds.items()}


def settled(seconds: Seconds) -> bool:
    """Whether the best time of every task was reached twice."""
    return all(sorted(times)[1] <= AGREE * min(times) for times in seconds.values())


class Neighbours:
    """The share of the processors used by other work, including the hypervisor; None if it is not known."""

    def __init__(self) -> None:
        self.start = self._now()

    def share(self) -> float | None:
        now = self._now()
        if self.start is None or now is None:
            return None
        busy, own, wall = (b - a for a, b in zip(self.start, now, strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        try:
            with open("/proc/stat") as file:
                user, nice, system, _idle, _wait, irq, soft, steal = (float(x) for x in file.readline().split()[1:9])
        except (OSError, ValueError):
            return None
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK"), own, time.perf_counter()
