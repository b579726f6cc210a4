"""normscope: how information mixes inside Transformers, by the norms of contribution vectors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from normscope._version import __version__
from normscope.errors import NormscopeError, NormscopeWarning

if TYPE_CHECKING:
    from normscope.analysis import Analysis, EncoderDecoderAnalysis
    from normscope.analyzer import Analyzer
    from normscope.models.registry import register

__all__ = [
    "Analysis",
    "Analyzer",
    "EncoderDecoderAnalysis",
    "NormscopeError",
    "NormscopeWarning",
    "__version__",
    "register",
]

# Loaded on first use: torch and transformers take seconds, which `normscope --help` need not wait for.
_LAZY = {
    "Analysis": "normscope.analysis",
    "Analyzer": "normscope.analyzer",
    "EncoderDecoderAnalysis": "normscope.analysis",
    "register": "normscope.models.registry",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'normscope' has no attribute {name!r}")
