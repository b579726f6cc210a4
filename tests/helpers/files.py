"""Files and helpers for the reader tests."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from normscope.corpus import Entry, Fault
from tests.helpers.toys import WORDS


def real_file(name: str) -> Path:
    """A file of the real data; skips the test if it is absent."""
    return _real_path("data", name)


def real_model(name: str) -> Path:
    """The folder of a real model; skips the test if it is absent."""
    return _real_path("models", name)


def _real_path(kind: str, name: str) -> Path:
    folder = os.environ.get("NORMSCOPE_TEST_DATA")
    if not folder:
        pytest.skip("NORMSCOPE_TEST_DATA names no folder with real data")
    path = Path(folder) / kind / name
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


def write(folder: Path, content: str | bytes, name: str = "x.txt") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def labelled_texts(count: int = 6) -> list[tuple[str, str]]:
    """Texts in words of the toy tokenizer, with a label, 0 to 2."""
    generator = random.Random(0)
    words = [word for word in WORDS if word.isalpha()]
    return [(" ".join(generator.choices(words, k=generator.randint(4, 9))), str(n % 3)) for n in range(count)]


def labelled_file(folder: Path, count: int = 6) -> Path:
    path = folder / "texts.tsv"
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in labelled_texts(count)))
    return path
