"""What a flow and an explanation share: files, pages, and the display in notebooks."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self


class ScoreResult(ABC):
    """Scores by token that are saved to a file and shown on a page."""

    @abstractmethod
    def _save(self, path: str | os.PathLike[str]) -> Path: ...

    @classmethod
    @abstractmethod
    def _load(cls, path: str | os.PathLike[str]) -> Self: ...

    @abstractmethod
    def _page_body(self) -> str:
        """The body of the page, as HTML without scripts."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything but the model to a safetensors file, with a checksum. Computes the maps of a flow.

        Args:
            path: The file, ending in `.safetensors` or without a suffix. It is written completely or not at all.

        Returns:
            The path of the file.

        Raises:
            NormscopeError: If the file cannot be written or has another suffix.
        """
        return self._save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file written by `save`.

        Args:
            path: A safetensors file.

        Returns:
            The result, with the maps of a flow.

        Raises:
            NormscopeError: If the file is damaged (its checksum does not match) or was not written by `save`.
        """
        return cls._load(path)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained page without scripts: the tokens coloured by their scores, with a table, or the map of
        a flow without a target; of an explanation, each sentence of the answer with what it rests on. For the viewer,
        use `Analysis.to_html` with ``flow=``.

        Args:
            path: The file, ending in `.html` or `.htm`, or without a suffix.

        Returns:
            The path of the file.

        Raises:
            NormscopeError: If the file cannot be written or has another suffix.
        """
        from normscope.view.html import write_scores_page

        return write_scores_page(repr(self), self._page_body(), path)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """For notebooks: the page of `to_html`, and a line of text."""
        shown = {"text/plain": repr(self), "text/html": self._page_body()}
        kinds = set(include or shown) - set(exclude or ())
        return {kind: value for kind, value in shown.items() if kind in kinds}
