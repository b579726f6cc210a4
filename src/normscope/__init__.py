"""normscope: how information mixes inside Transformers, by the norms of contribution vectors."""

from normscope._version import __version__
from normscope.analysis import Analysis
from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError

__all__ = ["Analysis", "Analyzer", "NormscopeError", "__version__"]
