"""Hooks that ignore forward passes of the same model in other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def only_in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook so that it runs only in the thread that called `only_in_this_thread`."""
    thread = threading.get_ident()

    def only(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    return only
