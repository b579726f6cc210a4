"""File formats of results, by suffix. Does not import torch, so that a wrong file name is reported at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from normscope.errors import NormscopeError
from normscope.figure_style import NO_MATPLOTLIB

FIGURES = (".svg", ".pdf", ".png")
ANALYSIS_SUFFIXES = (".html", *FIGURES, ".json", ".npz", ".safetensors")
FLOW_SUFFIXES = (".html", *FIGURES, ".json", ".safetensors")


def check_output_path(path: str | os.PathLike[str], suffixes: Sequence[str] = ANALYSIS_SUFFIXES) -> None:
    """Raise if the file cannot be written, before anything is computed."""
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
