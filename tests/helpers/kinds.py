"""Tiny models of every kind that the viewer supports, each with its tokenizer or processor and an input."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from functools import cache
from typing import Any

from normscope import Analyzer
from normscope.flow.result import Flow
from normscope.view.document import Result
from tests.helpers.toys import PROMPT, SOURCE, TARGET, TEXT, picture, seer, speaker, toy_lens, translator

KINDS = ("encoder", "causal", "encoder-decoder", "vision")
LENSES: dict[str, Callable[[], Analyzer]] = {
    "encoder": toy_lens,
    "causal": speaker,
    "encoder-decoder": translator,
    "vision": seer,
}
INPUTS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "encoder": (lambda: TEXT, {}),
    "causal": (lambda: PROMPT, {}),
    "encoder-decoder": (lambda: SOURCE, {"text_target": TARGET}),
    "vision": (picture, {}),
}


@cache
def result_of(kind: str, heads: bool = False) -> Result:
    """The analysis of a tiny random model."""
    given, options = INPUTS[kind]
    result: Result = LENSES[kind]().analyze(given(), heads=heads, **options)
    return result


@cache
def lenses() -> dict[str, Analyzer]:
    """One model of every kind, by its name on the server."""
    return {f"tiny-{kind}": make() for kind, make in LENSES.items()}


def png(width: int = 30, height: int = 20) -> str:
    """An image as base64, as in a request."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture(height, width)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")


def flow_of(kind: str, **options: Any) -> Flow:
    given, more = INPUTS[kind]
    text = (given(), more["text_target"]) if more else given()
    return LENSES[kind]().flow(text, **{"target": "top", **options})
