"""What several commands share: options, loading a model, progress, and quiet libraries."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from normscope import Analysis, Analyzer
    from normscope.analysis import EncoderDecoderAnalysis

DEFAULT = "default"
DEFAULT_NAME = "all-MiniLM-L6-v2"
LONG = 10  # seconds from which on an estimate is printed first


class Precision(StrEnum):
    """Number formats of an analysis."""

    float32 = "float32"
    float64 = "float64"


Model = Annotated[
    str,
    typer.Option("--model", "-m", metavar="M", help=f"Hub name or folder of a model; '{DEFAULT}' is {DEFAULT_NAME}."),
]
Dtype = Annotated[
    Precision | None, typer.Option("--dtype", help="Precision of the run; float32 when not given.", show_default=False)
]


def load(model: str, dtype: Precision | None = None, device: str | None = None) -> Analyzer:
    import torch

    from normscope import Analyzer, default_model

    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise NormscopeError(f"Cannot use the device {device!r}: {reason}") from error
    lens = Analyzer.from_pretrained(
        default_model.find() if model == DEFAULT else model,
        device=device,
        dtype=None if dtype is None else getattr(torch, dtype.value),
    )
    if model == DEFAULT:
        lens.model_name = DEFAULT_NAME
    return lens


def analyzed(lens: Analyzer, given: Any, **options: Any) -> Analysis | EncoderDecoderAnalysis:
    """Run the analysis, with an estimate first when it will take long, and a bar over its layers."""
    writes = "generate" in options or (lens.two_sided and "target" not in options)  # tokens that are not known yet
    if not writes:
        estimate = lens.estimate(given, **options)
        if estimate.seconds > LONG:
            typer.echo(f"estimate: {estimate}", err=True)
    with progress_bar("layers") as progress:
        try:
            found: Analysis | EncoderDecoderAnalysis = lens.analyze(given, progress=progress, **options)
        except NormscopeError as error:
            raise counted_from_one(error) from error
        return found


def counted_from_one(error: NormscopeError) -> NormscopeError:
    """The refusal of a row, which the library counts from 0, as it was typed."""
    match = re.match(r"There is no row (-?\d+): valid are 0 to (\d+)", str(error))
    if match is None:
        return error
    row, last = map(int, match.groups())
    return NormscopeError(
        f"There is no row {row + 1 if row >= 0 else row}: there are the rows 1 to {last + 1} (or -{last + 1} to -1)."
    )


def main_side(result: Analysis | EncoderDecoderAnalysis, scopes: Sequence[str] | None = None) -> Analysis:
    """What the terminal shows: of an encoder-decoder the side with the last scope asked for, the decoder first."""
    from normscope.analysis import EncoderDecoderAnalysis

    if not isinstance(result, EncoderDecoderAnalysis):
        return result
    return result.side_with(scopes[-1]) if scopes else result.main


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error where that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the loading bars, notes and warnings of the libraries."""
    logging: Any = import_module("transformers.utils.logging")  # untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
