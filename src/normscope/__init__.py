"""normscope: how information mixes inside Transformers, by the norms of contribution vectors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from normscope._version import __version__
from normscope.errors import NormscopeError, NormscopeWarning
from normscope.models.versions import refuse_old_transformers

if TYPE_CHECKING:
    from normscope.analysis import Analysis
    from normscope.analyzer import Analyzer
    from normscope.corpus.measure_registry import register_measure
    from normscope.derivation.prove import derive
    from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
    from normscope.explain.result import Explanation
    from normscope.flow.result import Flow
    from normscope.flow.similarity import Similarity
    from normscope.flow.spans import Passage
    from normscope.models.registry import register_family
    from normscope.reports.compare_models import compare

__all__ = [
    "Analysis",
    "Analyzer",
    "EncoderDecoderAnalysis",
    "Explanation",
    "Flow",
    "NormscopeError",
    "NormscopeWarning",
    "Passage",
    "Similarity",
    "__version__",
    "compare",
    "derive",
    "register_family",
    "register_measure",
]

# Imported on first use: torch and transformers take seconds to import, and `normscope --help` does not need them.
_LAZY = {
    "Analysis": "normscope.analysis",
    "Analyzer": "normscope.analyzer",
    "EncoderDecoderAnalysis": "normscope.encoder_decoder_analysis",
    "Explanation": "normscope.explain.result",
    "Flow": "normscope.flow.result",
    "Passage": "normscope.flow.spans",
    "Similarity": "normscope.flow.similarity",
    "compare": "normscope.reports.compare_models",
    "derive": "normscope.derivation.prove",
    "register_family": "normscope.models.registry",
    "register_measure": "normscope.corpus.measure_registry",
}
_SUBMODULES = ("corpus", "default_model")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        refuse_old_transformers()  # before anything imports what it lacks
        return getattr(import_module(_LAZY[name]), name)
    if name in _SUBMODULES:
        return import_module(f"normscope.{name}")
    raise AttributeError(f"module 'normscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
