"""Flow: how much of the last hidden states, or of one logit, comes from each input token."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normscope.errors import NormscopeError
from normscope.labels import Label

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Scores:
    """A scalar target by input token: ``sum of scores + remainder = value`` where a method decomposes it.

    A method that has maps only scores tokens by the row of the map at the token that the target is read from, whatever
    the target; remainder and completeness are then nan.
    """

    target: str  # in words: "logit of 'cat' at 7"
    value: float  # the model's own
    scores: Tensor  # (columns,), signed
    remainder: float  # what biases and frozen constants add, attributed to no token
    completeness: float  # |sum of scores + remainder - value| / max(|value|, sum of |scores|)
    contrast: bool = False  # whether the target is the difference of two logits
    layers: Mapping[str, Tensor] = field(default_factory=dict)  # side -> (layers + 1, n), of the exact decomposition:
    # by token of the states before each layer and after the last
    remainders: Mapping[str, Tensor] = field(default_factory=dict)  # side -> (layers + 1,): of constants behind those


@dataclass(frozen=True, eq=False, repr=False)
class Flow:
    """What one method says of one input. Rows are output positions of the model's last side, columns input tokens.

    A flow can be copied and pickled. Its maps are computed when they are first asked for; `save` and a pickle ask for
    them.
    """

    method: str
    rows: tuple[Label, ...]
    columns: tuple[Label, ...]  # of an encoder-decoder: the decoder's tokens, then the encoder's
    layers: tuple[int, ...]
    to: Scores | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    _maps: Callable[[], tuple[Tensor, Tensor | None]] | None = field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The input tokens."""
        return tuple(label.token for label in self.columns)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before believing this flow; empty where nothing is wrong."""
        return tuple(self.info.get("warnings", ()))

    @cached_property
    def _found(self) -> tuple[Tensor, Tensor | None]:
        if self._maps is None:
            raise NormscopeError(f"The method {self.method!r} has scores for a target only, and no maps.")
        return self._maps()

    @property
    def has_maps(self) -> bool:
        """Whether the method has maps; some have only scores for a target."""
        return self._maps is not None

    @property
    def maps(self) -> Tensor:
        """(layers, rows, columns): from the input to the states after each layer; computed when first asked for."""
        return self._found[0]

    @property
    def map(self) -> Tensor:
        """(rows, columns): from the input to the last layer's states."""
        return self.maps[-1]

    @property
    def completeness(self) -> Tensor | None:
        """(layers,): ``max_i ||sum_k x_i<-k + remainder - x_i|| / ||x_i||`` of the methods that decompose vectors."""
        return self._found[1]

    @property
    def scores(self) -> Tensor:
        """(columns,): the target by input token, signed."""
        return self._to.scores

    @property
    def value(self) -> float:
        """The target itself, as the model computed it."""
        return self._to.value

    @property
    def remainder(self) -> float:
        """The share of the target that is attributed to no token."""
        return self._to.remainder

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the scores of the target by token, and below them by layer; without a target, the map from the input to
        the last layer.

        Args:
            ax: Axes to draw into; by default those of a new figure. Of a target, the scores by token alone.

        Returns:
            The axes of the scores or of the map; the whole figure is their `.figure`:
            ``flow.plot().figure.savefig("flow.pdf")``.

        Raises:
            NormscopeError: If matplotlib is not installed (``pip install 'normscope[plot]'``).
        """
        from normscope.view.flow_figure import draw

        return draw(self, ax)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything but the model to a safetensors file, with a checksum. The maps are computed for it.

        Args:
            path: The file, ending in `.safetensors` or without a suffix. It appears whole or not at all.

        Returns:
            The path of the file.

        Raises:
            NormscopeError: If the file cannot be written or has another suffix.
        """
        from normscope.flow.saved import save

        return save(path, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Flow:
        """Read what `save` wrote.

        Args:
            path: A safetensors file.

        Returns:
            The flow, maps included.

        Raises:
            NormscopeError: If the file is damaged (its checksum does not match) or was not written by `save`.
        """
        from normscope.flow.saved import load

        return load(path)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained page, without scripts: the tokens coloured by their scores for the target and a table
        of them, or the map without a target. `Analysis.to_html` with ``flow=`` has the viewer.

        Args:
            path: The file, ending in `.html` or `.htm`, or without a suffix.

        Returns:
            The path of the file.

        Raises:
            NormscopeError: If the file cannot be written or has another suffix.
        """
        from normscope.view.flow_page import write

        return write(self, path)

    def __repr__(self) -> str:
        to = "" if self.to is None else f", {' '.join(self.to.target.split())} = {self.to.value:.4g}"
        count = f"{len(self.columns)} tokens, {len(self.layers)} layers"
        return f"Flow(method={self.method!r}, model={self.info.get('model', '')!r}, {count}{to})"

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_found"}
        if self._maps is not None:
            state["_maps"] = partial(keep, *self._found)
        return state

    def __copy__(self) -> Flow:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Flow:
        maps = self._maps
        if "_found" in self.__dict__:
            maps = partial(keep, *deepcopy(self._found, memo))
        return replace(self, to=deepcopy(self.to, memo), info=deepcopy(self.info, memo), _maps=maps)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """What a notebook shows: the page of `to_html`, or a line of text."""
        from normscope.view.flow_page import fragment

        shown = {"text/plain": repr(self), "text/html": fragment(self)}
        kinds = set(include or shown) - set(exclude or ())
        return {kind: value for kind, value in shown.items() if kind in kinds}

    @property
    def _to(self) -> Scores:
        if self.to is None:
            raise NormscopeError("This flow has no target: ask for one, such as flow(text, target='top').")
        return self.to


def keep(maps: Tensor, completeness: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What a flow with known maps has instead of a model."""
    return maps, completeness
