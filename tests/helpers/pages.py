"""The pages of the documentation: their fenced blocks and their links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)```[ ]*(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"")
SHOWN = ("normscope ", "make ", "pip ", "python -m ")  # prefixes of command lines
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
TRAINED = {  # hub models named on pages, and their replacements: the default model or test data
    "bert-base-uncased": None,
    "gpt2": "stories15M",
    "meta-llama/Llama-3.2-1B": "stories15M",
    "Xenova/llama2.c-stories15M": "stories15M",
    "Helsinki-NLP/opus-mt-en-fr": "opus-mt-en-fr",
}
PARAGRAPHS = [
    "The old harbour of Barnsley has no ships. It never had any, because the town is far from the sea.",
    "A canal was built in 1799, and boats carried coal and glass along it for more than a century.",
    "Colin Fleming played tennis there as a boy. He later moved to another town with his family.",
    "The soap opera was filmed near the market. Visitors still ask where the tiny houses are.",
]
SAMPLES = {  # files that pages use without creating them
    "texts.txt": "Lily had a red ball.\nTom went to the park.\n",
    "sst2.tsv": "text\tlabel\nA warm, funny film.\tpositive\nIt never ends.\tnegative\n",
    "wiki.txt": "\n\n".join(PARAGRAPHS * 3) + "\n",
    "conll.iob": "Colin NNP B-NP B-PER\nFleming NNP I-NP I-PER\nplays VBZ B-VP O\n. . O O\n\n" * 3,
}


@dataclass
class Block:
    kind: str  # "python", "sh", or "either": alternative command lines
    code: str
    line: int  # line of the page where the code starts
    printed: str | None = None  # the text block that follows immediately, if any


def pages() -> list[Path]:
    """All pages: README.md and the other files at the top, and everything in docs/."""
    return sorted(ROOT.glob("*.md")) + sorted(DOCS.rglob("*.md"))


def blocks(text: str) -> list[Block]:
    """The python and sh blocks, in order, and unlabelled blocks of command lines. A `text` block right after a python
    block is its expected output."""
    found: list[Block] = []
    end = None
    for match in FENCE.finditer(text):
        _, kind, body = match.groups()
        if not kind and body.startswith(SHOWN):
            kind = "either"
        if kind in ("python", "sh", "either"):
            found.append(Block(kind, body, text.count("\n", 0, match.start(3))))
        elif kind == "text" and end is not None and not text[end : match.start()].strip():
            found[-1].printed = body
        end = match.end() if kind == "python" else None
    return found


def commands(block: str) -> list[list[str]]:
    """The command lines of an sh block, split as a shell splits them; comments are left out."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def links(text: str) -> Iterator[str]:
    """The targets of a page's links, without those in code."""
    for match in LINK.finditer(CODE.sub("", text)):
        yield match[1] or match[2]
