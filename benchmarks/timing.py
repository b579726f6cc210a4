"""Timing on a machine that is not ours alone: tasks take turns, and the best time of each counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Task = Callable[[], object]
Seconds = dict[str, list[float]]


def interleaved(tasks: Mapping[str, Task], budget: float, least: int = 3, most: int = 40) -> Seconds:
    """Run every task once per round, in alternating order, for about `budget` seconds; all times, in seconds.

    There is no separate warm-up: the best of several rounds leaves the first one out by itself.
    """
    seconds: Seconds = {name: [] for name in tasks}
    start = time.perf_counter()
    for turn in range(most):
        order = list(tasks) if turn % 2 == 0 else list(reversed(tasks))
        for name in order:
            begin = time.perf_counter()
            tasks[name]()
            seconds[name].append(time.perf_counter() - begin)
        if turn + 1 >= least and time.perf_counter() - start > budget:
            break
    return seconds


def best(seconds: Seconds) -> dict[str, float]:
    return {name: min(times) for name, times in seconds.items()}
