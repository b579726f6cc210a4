"""Hooks: some that ignore other threads, and a watch over the calls of many modules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def only_in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a hook so that it runs only in the thread that called `only_in_this_thread`."""
    thread = threading.get_ident()

    def only(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    return only


@contextmanager
def watch_calls(
    modules: Iterable[tuple[str, nn.Module]],
    on_call: Callable[[str, nn.Module, Arguments], None],
    on_return: Callable[[str, nn.Module, Arguments, Any], None],
) -> Iterator[None]:
    """While the context is open, tell of every call of the modules (path, module), and of what it returned."""
    handles = []
    try:
        for path, module in modules:

            def before(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                on_call(path, module, (args, kwargs))

            def after(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                on_return(path, module, (args, kwargs), output)

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
