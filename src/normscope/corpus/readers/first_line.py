"""What the first line of a file looks like, for error messages about a wrong format."""

from __future__ import annotations

import json

from normscope.corpus.readers.data_files import DataFile, open_binary
from normscope.errors import NormscopeError

SHOWN = 60  # characters
SEPARATORS = {"\t": ("tabs", "tsv"), ";": ("semicolons", "csv"), ",": ("commas", "csv"), "|": ("bars", "csv")}


def describe_first_line(file: DataFile) -> str:
    """A sentence with the first line and the format that it looks like, or nothing if that cannot be said."""
    try:
        with open_binary(file) as opened:
            raw = opened.readline(10_000)
    except (NormscopeError, OSError):
        return ""
    if raw.startswith(b"PAR1"):
        return " It looks like parquet."
    try:
        line = raw.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return " It is not UTF-8 text."
    if not line:
        return ""
    shown = line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
    return f" It begins with {shown!r}{_likely_format(line)}."


def _likely_format(line: str) -> str:
    if line.startswith("{"):
        try:
            json.loads(line)
        except ValueError:
            return ", like JSON that is not on one line"
        return ", which looks like jsonl"
    for separator, (name, format) in SEPARATORS.items():
        if separator in line and " " not in line.replace(f"{separator} ", separator):
            option = "" if separator in "\t," else f" with delimiter={separator!r}"
            return f", which looks like {format}{option} (separated by {name})"
    return ""
