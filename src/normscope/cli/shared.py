"""What the commands share: the model and how it is loaded, bars of progress, and quiet libraries."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

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

from normscope import default_model
from normscope.errors import NormscopeError, NormscopeWarning

if TYPE_CHECKING:
    from normscope import Analysis, Analyzer
    from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis

DEFAULT = "default"
MODEL_HELP = f"Hub name or folder of a model; '{DEFAULT}' is {default_model.NAME}."
LONG = 10  # seconds from which on an estimate is printed first


class Precision(StrEnum):
    """Number formats of an analysis."""

    float32 = "float32"
    float64 = "float64"


Model = Annotated[
    str,
    typer.Option("--model", "-m", metavar="M", help=MODEL_HELP),
]
Dtype = Annotated[
    Precision | None, typer.Option("--dtype", help="Precision of the run; float32 when not given.", show_default=False)
]


def load(model: str, dtype: Precision | None = None, device: str | None = None) -> Analyzer:
    import torch

    from normscope import Analyzer

    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise NormscopeError(f"Cannot use the device {device!r}: {reason}") from error
    precision = None if dtype is None else getattr(torch, dtype.value)
    return Analyzer.from_pretrained(model_path(model), device=device, dtype=precision)


def model_path(model: str) -> str:
    """What is loaded for the name of a model."""
    return str(default_model.find()) if model == DEFAULT else model


def analyzed(lens: Analyzer, given: Any, **options: Any) -> Analysis | EncoderDecoderAnalysis:
    """Run the analysis, with an estimate first when it will take long, and a bar over its layers."""
    writes = "generate" in options or (lens.two_sided and "text_target" not in options)  # tokens that are not known yet
    if not writes:
        estimate = lens.estimate(given, **options)
        if estimate.seconds > LONG:
            typer.echo(f"estimate: {estimate}", err=True)
    with bars() as show, counted():
        progress = None if show is None else partial(show, "layers")
        found: Analysis | EncoderDecoderAnalysis = lens.analyze(given, progress=progress, **options)
        return found


@contextmanager
def counted() -> Iterator[None]:
    """Refusals inside count from 1."""
    try:
        yield
    except NormscopeError as error:
        raise counted_from_one(error) from error


def counted_from_one(error: NormscopeError) -> NormscopeError:
    """The refusal of a layer, row or position, which the library counts from 0, as it was typed."""
    match = re.match(r"There is no (layer|row|position) (-?\d+)(?: in the logits)?: valid are 0 to (\d+)", str(error))
    if match is None:
        return error
    what, index, size = match[1], int(match[2]), int(match[3]) + 1
    typed = index + 1 if index >= 0 else index
    if what == "layer":
        return no_layer(typed, size)
    return NormscopeError(f"There is no {what} {typed}: there are the {what}s 1 to {size} (or -{size} to -1).")


def no_layer(layer: int, depth: int) -> NormscopeError:
    """The refusal of a layer, counted from 1."""
    return NormscopeError(f"There is no layer {layer}: this model has the layers 1 to {depth}.")


def main_side(result: Analysis | EncoderDecoderAnalysis, scopes: Sequence[str] | None = None) -> Analysis:
    """What the terminal shows: of an encoder-decoder the side with the last scope asked for, the decoder first."""
    from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis

    if not isinstance(result, EncoderDecoderAnalysis):
        return result
    return result.side_with(scopes[-1]) if scopes else result.main


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if not task.speed else f"{task.speed:.1f}/s")


@contextmanager
def bars() -> Iterator[Callable[[str, int, int], None] | None]:
    """How much of what is done, its rate and the time left, on standard error where that is a terminal."""
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
    """Without the loading bars, notes and warnings of the libraries. Our own warnings go to standard error, each kind
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


def _show_once(shown: set[tuple[str, int]]) -> Callable[..., None]:
    """Stands in for `warnings.showwarning`; `shown` are the places that have warned."""

    def show(message: Warning | str, category: type[Warning], filename: str, line: int, *_: Any) -> None:
        if (filename, line) not in shown:
            shown.add((filename, line))
            Console(stderr=True, highlight=False).print(Text(f"Warning: {message}", style="yellow"))

    return show
