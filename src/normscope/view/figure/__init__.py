"""Maps and flows as matplotlib figures."""

from normscope.view.figure.maps import plot

__all__ = ["plot"]
