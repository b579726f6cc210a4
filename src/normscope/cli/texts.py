"""One text through a model: read, and analysed. For `analyze`, `flow` and `demo`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from normscope.cli.progress import bars
from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from normscope import Analysis, Analyzer
    from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis

LONG = 10  # seconds from which on an estimate is printed first


def read_text(text: str) -> str:
    """TEXT as it was given, or what standard input holds."""
    if text != "-":
        return text
    try:
        return sys.stdin.buffer.read().decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise NormscopeError("The text on standard input is not UTF-8.") from error


def arguments(lens: Analyzer, text: str, pair: str | None, chat: bool, generate: int | None) -> dict[str, Any]:
    """TEXT and the options beside it as arguments of `Analyzer.analyze` and `Analyzer.flow`."""
    if chat and pair is not None and not lens.two_sided:
        raise NormscopeError("--chat puts one message through the chat template: leave --pair or --chat out.")
    given: dict[str, Any] = {} if generate is None else {"generate": generate}
    message = [{"role": "user", "content": text}]
    if pair is None:
        return given | ({"text": None, "chat": message} if chat else {"text": text})
    if not chat:
        return given | {"text": (text, pair)}
    from normscope.inputs.generation import chat_text

    return given | {"text": (chat_text(lens.tokenizer, message), pair)}


def analyze_shown(lens: Analyzer, text: Any, **options: Any) -> Analysis | EncoderDecoderAnalysis:
    """Run the analysis, with an estimate first when it will take long, and a bar over its layers."""
    generates = "generate" in options or (lens.two_sided and not isinstance(text, tuple))  # tokens not known yet
    if not generates:
        estimate = lens.estimate(text, **options)
        if estimate.seconds > LONG:
            typer.echo(f"estimate: {estimate}", err=True)
    with bars() as show:
        progress = None if show is None else partial(show, "layers")
        found: Analysis | EncoderDecoderAnalysis = lens.analyze(text, progress=progress, **options)
        return found


def main_side(result: Analysis | EncoderDecoderAnalysis, scopes: Sequence[str] | None = None) -> Analysis:
    """What the terminal shows: of an encoder-decoder the side with the last scope asked for, the decoder first."""
    from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis

    if not isinstance(result, EncoderDecoderAnalysis):
        return result
    return result.side_with(scopes[-1]) if scopes else result.main
