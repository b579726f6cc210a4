"""Files and helpers for the tests of readers."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from normscope.corpus import Entry, Fault

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def real_file(name: str) -> Path:
    """A file of the real data; skips the test where it is absent."""
    folder = os.environ.get("NORMSCOPE_TEST_DATA")
    if not folder:
        pytest.skip("NORMSCOPE_TEST_DATA names no folder with real data")
    path = Path(folder) / "data" / name
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return path


def good(found: Entry | Fault) -> Entry:
    """The entry; a fault fails the test."""
    assert isinstance(found, Entry), found
    return found


def bad(found: Entry | Fault) -> Fault:
    """The fault; an entry fails the test."""
    assert isinstance(found, Fault), found
    return found


@lru_cache
def letters_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer with a token per letter: the tokens of a text are the letters of its words."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    backend = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
