"""Small corpus runs: a toy corpus, a run of it, and the bytes of its tables."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from normscope import corpus
from tests.helpers.toys import WORDS as VOCABULARY

WORDS = [word for word in VOCABULARY if word.isalpha()]
SHARD = 4


def toy_lines(count: int = 10, seed: int = 0) -> list[str]:
    """Lines of toy words."""
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, 12))) for _ in range(count)]


def toy_corpus(folder: Path, count: int = 10, name: str = "data.txt") -> Path:
    """A text file with one toy entry per line."""
    path = folder / name
    path.write_text("\n".join(toy_lines(count)) + "\n")
    return path


def toy_run(data: Any, model: Any, out: Path, **options: Any) -> corpus.Summary:
    """A run of a few layers and scopes in small shards."""
    defaults: dict[str, Any] = {"shard_size": SHARD, "batch_size": 3, "measures": ["mixing"], "scopes": ["layer"]}
    return corpus.run(data, model, out, **defaults | options)


def table_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a run that another tool could read as a table or as maps, as bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in {".parquet", ".safetensors"}
    }


def flip_bit(path: Path, position: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position // 8] ^= 1 << position % 8
    path.write_bytes(bytes(content))
