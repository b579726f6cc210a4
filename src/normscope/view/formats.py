"""The files that results are written to, by the suffix of their names. Nothing here imports torch, so that a wrong name
is refused at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from normscope.errors import NormscopeError

FIGURES = (".svg", ".pdf", ".png")
SUFFIXES = (".html", *FIGURES, ".json", ".npz", ".safetensors")  # of an analysis
FLOW_SUFFIXES = (".html", *FIGURES, ".json")  # of a flow; a page needs a target
NO_MATPLOTLIB = "Figures need matplotlib: pip install 'normscope[plot]'."


def check_path(path: str | os.PathLike[str], suffixes: Sequence[str] = SUFFIXES) -> None:
    """Refuse a file that could not be written, before anything is computed."""
    target = Path(path)
    if target.suffix.lower() not in suffixes:
        raise NormscopeError(f"Cannot write {target}: its name must end in one of {', '.join(suffixes)}.")
    if target.is_dir():
        raise NormscopeError(f"Cannot write {target}: it is a folder. Give a file name.")
    if not target.parent.is_dir():
        raise NormscopeError(f"Cannot write {target}: the folder {target.parent} does not exist. Create it first.")
    if not os.access(target.parent, os.W_OK):
        raise NormscopeError(f"Cannot write {target}: the folder {target.parent} is not writable.")
    if target.suffix.lower() in FIGURES and find_spec("matplotlib") is None:
        raise NormscopeError(NO_MATPLOTLIB)
