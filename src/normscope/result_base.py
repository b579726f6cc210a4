"""The base class of Analysis and EncoderDecoderAnalysis: scopes as keys, files, tables and notebook display.

Internal: only the two subclasses are public."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normscope.errors import NormscopeError
from normscope.frames import to_pandas, to_polars

if TYPE_CHECKING:
    import pandas
    import polars

    from normscope.analysis import Analysis
    from normscope.decompose.layer import Vectors

Receive = Callable[[str, int, int, "Vectors"], None]  # scope, layer, index of the block, vectors
# Reruns the model and passes the vectors of the given scopes, layers and blocks of rows to `receive`.
Recompute = Callable[[Sequence[str], Sequence[int], Sequence[Sequence[int]], Receive], None]
NO_MODEL = (
    "Contribution vectors are computed on demand and need the model, but this analysis has none: it was loaded from "
    "a file, unpickled or returned by words(). Run Analyzer.analyze(...) on the input again."
)


@dataclass(frozen=True)
class Measured:
    """The map and measures of one scope, for all requested layers."""

    map: Tensor  # (layers, rows, columns): norm of the contribution of column j to row i, or attention weight
    mixing: Tensor | None  # (layers, rows); None for cross-attention alone, where no token attends to itself
    remainder: Tensor  # (layers, rows): norm of the bias part, which is attributed to no token
    completeness: Tensor  # (layers,)


class HeadMaps(dict[str, Tensor]):
    """Head-level maps by scope: `"ATTN-W"` and the attention scope, case-insensitive, or their aliases."""

    def __init__(self, maps: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
        super().__init__(maps)
        self.aliases = aliases

    def __contains__(self, scope: object) -> bool:
        return isinstance(scope, str) and super().__contains__(self._name(scope))

    def __missing__(self, scope: str) -> Tensor:
        if scope in self:
            return self[self._name(scope)]
        if not self:
            raise NormscopeError("This analysis has no head-level maps. Request them with heads=True.")
        raise NormscopeError(f"No head-level map of {scope!r}. Available: {', '.join(self)}.")

    def get(self, scope: str, default: Any = None) -> Any:
        """The map of a scope (case-insensitive, or an alias), or `default` if there is none."""
        return super().get(self._name(scope), default)

    def _name(self, scope: str) -> str:
        return self.aliases.get(str(scope).strip().lower(), str(scope).strip().upper())


NO_HEADS = HeadMaps({}, {})


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
    def _write(self, path: str | os.PathLike[str]) -> Path:
        """Write the file of `save`."""

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
        return self._write(path)

    def to_pandas(self) -> pandas.DataFrame:
        """Every cell of every map as a row of a pandas DataFrame.

        Returns:
            A long table with the columns `scope`, `layer`, `output`, `input`, `output_token`, `input_token`,
            `output_side`, `input_side` and `value`. `layer` is the model's layer index; `output` and `input` are
            positions of tokens on their side. Everything is counted from 0.

        Raises:
            NormscopeError: If pandas is not installed (``pip install 'normscope[frames]'``).
        """
        return to_pandas(self._by_side)

    def to_polars(self) -> polars.DataFrame:
        """Every cell of every map as a row of a polars DataFrame, with the columns of `to_pandas`.

        Returns:
            A long table.

        Raises:
            NormscopeError: If polars is not installed (``pip install 'normscope[frames]'``).
        """
        return to_polars(self._by_side)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """The notebook display: the viewer, with a static picture and a line of text as fallbacks."""
        from normscope.view.widget import mimebundle

        return mimebundle(self, include, exclude)  # type: ignore[arg-type]  # one of the two
