"""What a command shows while it works: bars, and no messages of other libraries."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from normscope.errors import NormscopeWarning
from normscope.view.wording import COMMAND_LINE


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if not task.speed else f"{task.speed:.1f}/s")


@contextmanager
def bars() -> Iterator[Callable[[str, int, int], None] | None]:
    """Bars with counts, rate and time left on standard error; None where that is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what)
            shown.update(tasks[what], completed=done, total=total)

        yield update


@contextmanager
def quiet() -> Iterator[None]:
    """Without the loading bars, notes and warnings of other libraries. Our own warnings go to standard error, each kind
    once: a corpus would repeat it for every text."""
    logging: Any = import_module("transformers.utils.logging")  # untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", NormscopeWarning)
            warnings.showwarning = _show_once(set())  # catch_warnings() puts it back
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _show_once(shown: set[str]) -> Callable[..., None]:
    """Stands in for `warnings.showwarning`; `shown` are the texts already shown, without their numbers."""

    def show(message: Warning | str, *_: Any) -> None:
        kind = re.sub(r"\d+", "", str(message))
        if kind not in shown:
            shown.add(kind)
            told = COMMAND_LINE.reword(str(message))
            Console(stderr=True, highlight=False).print(Text(f"Warning: {told}", style="yellow"))

    return show
