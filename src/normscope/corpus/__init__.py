"""Corpora: readers of common formats, the papers' masking, resumable runs and their tables."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from normscope.corpus.entries import Entity, Entry, Fault, TokenSpan, strict, subword_spans
from normscope.corpus.masking import mask, masked_positions, papers_masking
from normscope.corpus.readers.formats import FORMATS, read
from normscope.models.source import ModelSource

if TYPE_CHECKING:
    from normscope.corpus.measure_registry import describe_measures as measures
    from normscope.corpus.runner import Summary, run
    from normscope.corpus.store import Run, open

__all__ = [
    "FORMATS",
    "Entity",
    "Entry",
    "Fault",
    "ModelSource",
    "Run",
    "Summary",
    "TokenSpan",
    "mask",
    "masked_positions",
    "measures",
    "open",
    "papers_masking",
    "read",
    "run",
    "strict",
    "subword_spans",
]

# Loaded on first use, because readers need neither torch nor transformers. No module of this package may have one of
# these names: importing it would hide the function.
_LAZY = {
    "Run": ("store", "Run"),
    "Summary": ("runner", "Summary"),
    "measures": ("measure_registry", "describe_measures"),
    "open": ("store", "open"),
    "run": ("runner", "run"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        return getattr(import_module(f"normscope.corpus.{module}"), attribute)
    raise AttributeError(f"module 'normscope.corpus' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
