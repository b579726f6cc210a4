"""normscope: how information mixes inside Transformers, by the norms of contribution vectors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from normscope._version import __version__
from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from normscope.analysis import Analysis
    from normscope.analyzer import Analyzer

__all__ = ["Analysis", "Analyzer", "NormscopeError", "__version__"]

# Loaded on first use: torch and transformers take seconds, which `normscope --help` need not wait for.
_LAZY = {"Analysis": "normscope.analysis", "Analyzer": "normscope.analyzer"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'normscope' has no attribute {name!r}")
