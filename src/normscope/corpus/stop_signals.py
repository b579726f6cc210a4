"""Ending a run at a good moment: the first Ctrl-C, SIGTERM or SIGHUP lets the current shard finish."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # Slurm and Kubernetes send SIGTERM; a closed terminal SIGHUP


@contextmanager
def stop_after_shard() -> Iterator[threading.Event]:
    """Make the first such signal set the event; a second one acts as it did before. Ignored signals stay ignored."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    previous = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def once(number: int, frame: Any) -> None:
        stopped.set()
        restore()

    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, once)
    try:
        yield stopped
    finally:
        restore()
