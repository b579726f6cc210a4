"""Progress bars and warnings of a running command."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import typer
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


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if not task.speed else f"{task.speed:.1f}/s")


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None] | None]:
    """Progress bars on standard error; yields None if that is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what)
            shown.update(tasks[what], completed=done, total=total)

        yield update


@contextmanager
def silence_library_progress() -> Iterator[None]:
    """Hide progress bars, logs and warnings of other libraries, and print ours to standard error.

    Each kind of warning is printed once, since a corpus would repeat it for every text.
    """
    logging: Any = import_module("transformers.utils.logging")  # untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", NormscopeWarning)
            warnings.showwarning = _warn_once(set())  # catch_warnings() restores it
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def exit_when_stopped() -> Iterator[None]:
    """Exit with code 130 and a hint when a run of experiments is interrupted."""
    from normscope.papers.runs import StoppedError

    try:
        yield
    except StoppedError as stopped:
        typer.echo(f"{stopped} Run the same command again to resume.", err=True)
        raise typer.Exit(130) from stopped


def _warn_once(shown: set[str]) -> Callable[..., None]:
    """A replacement for `warnings.showwarning`; `shown` holds the texts already shown, without numbers."""

    def show(message: Warning | str, *_: Any) -> None:
        kind = re.sub(r"\d+", "", str(message))
        if kind not in shown:
            shown.add(kind)
            text = COMMAND_LINE.reword(str(message))
            Console(stderr=True, highlight=False).print(Text(f"Warning: {text}", style="yellow"))

    return show
