"""The base class of Analysis and EncoderDecoderAnalysis: scopes as keys, files, tables and notebook display.

Internal: only the two subclasses are public."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import pandas
    import polars

    from normscope.analysis import Analysis


class ResultBase(ABC):
    """Scopes and their maps, read like a dict: ``result[scope]``, ``scope in result``, ``for scope in result``."""

    @property
    @abstractmethod
    def scopes(self) -> tuple[str, ...]:
        """The scopes of this result, in the order of computation."""

    @property
    @abstractmethod
    def _by_side(self) -> Mapping[str, Analysis]:
        """The analyses by side, "encoder" or "decoder"."""

    @abstractmethod
    def has(self, scope: str) -> bool:
        """True if the result has this scope, given in any case or as an alias."""

    @abstractmethod
    def __getitem__(self, scope: str) -> Tensor: ...

    def __contains__(self, scope: object) -> bool:
        return isinstance(scope, str) and self.has(scope)

    def __iter__(self) -> Iterator[str]:
        return iter(self.scopes)

    def __len__(self) -> int:
        return len(self.scopes)

    def keys(self) -> tuple[str, ...]:
        """The scopes, so that ``dict(result)`` maps each scope to its map."""
        return self.scopes

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result, without the model, to a safetensors file with a checksum.

        Args:
            path: The file, ending in `.safetensors` or without a suffix. It is written atomically.

        Returns:
            The path of the file.

        Raises:
            NormscopeError: If the file cannot be written or has another suffix.
        """
        from normscope.engine.saving import save_analysis

        return save_analysis(path, self)  # type: ignore[arg-type]  # one of the two

    def to_pandas(self) -> pandas.DataFrame:
        """Every cell of every map as a row of a pandas DataFrame.

        Returns:
            A long table with the columns `scope`, `layer`, `output`, `input`, `output_token`, `input_token`,
            `output_side`, `input_side` and `value`. `layer` is the model's layer index; `output` and `input` are
            positions of tokens on their side. Everything is counted from 0.

        Raises:
            NormscopeError: If pandas is not installed (``pip install 'normscope[frames]'``).
        """
        from normscope.frames import to_pandas

        return to_pandas(self._by_side)

    def to_polars(self) -> polars.DataFrame:
        """Every cell of every map as a row of a polars DataFrame, with the columns of `to_pandas`.

        Returns:
            A long table.

        Raises:
            NormscopeError: If polars is not installed (``pip install 'normscope[frames]'``).
        """
        from normscope.frames import to_polars

        return to_polars(self._by_side)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """The notebook display: the viewer, with a static picture and a line of text as fallbacks."""
        from normscope.view.widget import mimebundle

        return mimebundle(self, include, exclude)  # type: ignore[arg-type]  # one of the two
