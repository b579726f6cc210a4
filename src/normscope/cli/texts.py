"""Reading and analysing one text, for `analyze`, `flow` and `demo`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from normscope.cli.progress import progress_bars
from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from normscope import Analysis, Analyzer
    from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
    from normscope.engine.request import Estimate

LONG = 10  # longer analyses (in seconds) print an estimate first


def read_cli_text_argument(text: str) -> str:
    """TEXT, or the content of standard input for `-`."""
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise NormscopeError("The text on standard input is not UTF-8.") from error


def cli_text_arguments(lens: Analyzer, text: str, pair: str | None, chat: bool, generate: int | None) -> dict[str, Any]:
    """TEXT, --pair, --chat and --generate as arguments of `Analyzer.analyze` and `Analyzer.flow`."""
    if chat and pair is not None and not lens.two_sided:
        raise NormscopeError("--chat applies the chat template to one message: leave --pair or --chat out.")
    given: dict[str, Any] = {} if generate is None else {"generate": generate}
    message = [{"role": "user", "content": text}]
    if pair is None:
        return given | ({"text": None, "chat": message} if chat else {"text": text})
    if not chat:
        return given | {"text": (text, pair)}
    from normscope.inputs.generation import chat_prompt, encode_chat_prompt

    return given | {"text": (encode_chat_prompt(lens.tokenizer, chat_prompt(lens.tokenizer, message)), pair)}


def read_cli_sources(paths: Sequence[Path] | None, template: str | None, by: str | None) -> dict[str, Any]:
    """--source, --template and --by as arguments of `Analyzer.analyze`. A source has the name of its file, without
    suffix."""
    if by is not None and paths:
        raise NormscopeError(
            "The columns are either the files of --source or parts of TEXT: leave --by or --source out."
        )
    if not paths:
        if template is not None:
            raise NormscopeError("--template joins the files of --source with TEXT: pass at least one.")
        return {} if by is None else {"sources": str(by)}
    found: dict[str, str] = {}
    for path in paths:
        if path.stem in found:
            raise NormscopeError(f"Two sources are named {path.stem!r}, after their files. Rename one of them.")
        try:
            found[path.stem] = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise NormscopeError(f"Cannot read {path} as UTF-8 text: {error}.") from error
    # A shell passes \n as two characters.
    return {"sources": found, "template": None if template is None else template.replace("\\n", "\n")}


def analyze_cli_text(lens: Analyzer, text: Any, **options: Any) -> Analysis | EncoderDecoderAnalysis:
    """Run the analysis with a progress bar; print an estimate first if it will take long."""
    # Generated tokens are not known before the run.
    generates = "generate" in options or (lens.two_sided and not isinstance(text, tuple))
    if not generates:
        print_long_estimate(lens.estimate(text, **options))
    with progress_bars() as show:
        progress = None if show is None else partial(show, "layers")
        found: Analysis | EncoderDecoderAnalysis = lens.analyze(text, progress=progress, **options)
        return found


def print_long_estimate(estimate: Estimate) -> None:
    """Print the estimate of a run that will take long."""
    if estimate.seconds > LONG:
        typer.echo(f"estimate: {estimate}", err=True)


def main_side(result: Analysis | EncoderDecoderAnalysis, scopes: Sequence[str] | None = None) -> Analysis:
    """The side that the terminal shows: the one with the last requested scope, or the decoder."""
    from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis

    if not isinstance(result, EncoderDecoderAnalysis):
        return result
    return result.side_with(scopes[-1]) if scopes else result.main
