"""Flow: how much of the last hidden states, or of one logit, comes from each input token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normscope.analysis import Label
from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


@dataclass(frozen=True, eq=False)
class Flow:
    """What one method says of one input. Rows are output positions of the model's last side, columns input tokens."""

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

    def plot(self) -> Figure:
        """The scores of the target by token and layer; without a target, the map from the input to the last layer."""
        from normscope.view.flow_figure import draw

        return draw(self)

    @property
    def _to(self) -> Scores:
        if self.to is None:
            raise NormscopeError("This flow has no target: ask for one, such as flow(text, target='top').")
        return self.to
