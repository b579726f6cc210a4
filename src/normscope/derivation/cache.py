"""Descriptions kept in the user's cache folder, so that a model is watched once. They are always proved again.

The folder is ``$NORMSCOPE_CACHE`` (empty: nothing is kept), else ``normscope`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
A file's name is a hash of everything on which a description depends: the whole config, the structure of the model, the
source of its classes and of this package, and the versions of PyTorch and transformers.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from normscope.errors import NormscopeError
from normscope.files import write_atomically
from normscope.models import spec
from normscope.models.base import base_of
from normscope.models.description import family_from_json, family_to_json
from normscope.models.spec import Family

_described: dict[Any, Family] = {}  # in this process


def describe_once(model: PreTrainedModel, structure: Any, describe: Callable[[PreTrainedModel], Family]) -> Family:
    """What `describe` makes of a model, or made of one with the same key before."""
    own = (tuple(type(one) for one in model.modules()), _description_key(model, structure))
    if own not in _described:
        path = _cache_path(model, structure)
        family = None if path is None else _read(path)
        if family is None:
            family = describe(model)
            if path is not None:
                _write(path, family)
        _described[own] = family
    return _described[own]


def forget_descriptions() -> None:
    """Forget what was described in this process; files stay."""
    _described.clear()


def cache_folder() -> Path | None:
    """The folder of kept descriptions; None if the user wants none."""
    own = os.environ.get("NORMSCOPE_CACHE")
    if own is not None:
        return Path(own) / "derived" if own else None
    above = os.environ.get("XDG_CACHE_HOME")
    return (Path(above) if above else Path.home() / ".cache") / "normscope" / "derived"


def _description_key(model: PreTrainedModel, structure: Any) -> str:
    base: Any = base_of(model)
    versions = [f"{name} {version(name)}" for name in ("normscope", "torch", "transformers")]
    return "\n".join([*versions, str(type(model)), base.config.to_json_string(), repr(structure)])


def _cache_path(model: PreTrainedModel, structure: Any) -> Path | None:
    """The file of a model's description; None if there is no folder, or if classes have no source file."""
    try:
        folder = cache_folder()
        classes = {type(one) for one in model.modules() if not type(one).__module__.startswith("torch.")}
        files = sorted({str(inspect.getsourcefile(one)) for one in classes})
        files += [*sorted(str(one) for one in Path(__file__).parent.glob("*.py")), str(spec.__file__)]
        sources = [_file_hash(one) for one in files]
    except (OSError, TypeError, RuntimeError):  # classes made in a notebook, or no home
        return None
    key = "\n".join([_description_key(model, structure), *sources])
    return None if folder is None else folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


@lru_cache(maxsize=256)
def _file_hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _read(path: Path) -> Family | None:
    """The description in a file; None if there is none, or if it is damaged."""
    try:
        return family_from_json(path)
    except NormscopeError:
        return None


def _write(path: Path, family: Family) -> None:
    """Keep a description; a folder that cannot be written to is left alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as temporary:
            temporary.write_text(family_to_json(family), encoding="utf-8")
    except (OSError, NormscopeError):
        return
