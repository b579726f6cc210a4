"""Hooks that leave a pass of the same model in another thread alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def mine(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook, where the thread that is running is the one which made it."""
    thread = threading.get_ident()

    def only(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    return only
