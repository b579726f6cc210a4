"""Corpora: readers of every common format, and the papers' masking."""

from __future__ import annotations

from normscope.corpus.items import Entity, Entry, Fault, TokenSpan, strict, subword_spans
from normscope.corpus.masking import mask, masked_positions, papers_masking
from normscope.corpus.readers import FORMATS, read

__all__ = [
    "FORMATS",
    "Entity",
    "Entry",
    "Fault",
    "TokenSpan",
    "mask",
    "masked_positions",
    "papers_masking",
    "read",
    "strict",
    "subword_spans",
]
