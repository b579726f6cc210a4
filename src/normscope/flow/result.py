"""Flow: how much of the last hidden states, or of a target, comes from each input token."""

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
from normscope.flow.saving import load_flow, save_flow, saved_flow_maps
from normscope.flow.score_result import ScoreResult
from normscope.labels import Label, source_labels
from normscope.measures.source_share import source_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Scores:
    """A scalar target by input token: ``sum of scores + remainder = value`` if the method decomposes it.

    For a method that only has maps, the scores are the row of the map at the target's token, the same for every target;
    remainder and completeness are then nan.
    """

    target: str  # a description: "logit of 'cat' at position 7"
    value: float  # as the model computed it
    scores: Tensor  # (columns,), signed
    remainder: float  # from biases and frozen constants, attributed to no token
    completeness: float  # |sum of scores + remainder - value| / max(|value|, sum of |scores|)
    contrast: bool = False  # True for a difference of logits
    # The exact decomposition only. side -> (layers + 1, n): the target by token of the states before each layer and
    # after the last; and side -> (layers + 1,): the constants that are added after these states.
    layers: Mapping[str, Tensor] = field(default_factory=dict)
    remainders: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ScoreMatrix:
    """Several scalar targets by input token: ``sum of scores + remainder = value`` in every row."""

    targets: tuple[str, ...]  # a description of each
    values: Tensor  # (targets,), float64: as the model computed them
    scores: Tensor  # (targets, columns), signed
    remainders: Tensor  # (targets,), float64: from biases and frozen constants, attributed to no token
    completeness: Tensor  # (targets,): as for `Scores`
    contrast: bool = False  # True for differences of logits

    def first(self, count: int) -> ScoreMatrix:
        """The first targets only."""
        return ScoreMatrix(
            self.targets[:count],
            self.values[:count],
            self.scores[:count],
            self.remainders[:count],
            self.completeness[:count],
            self.contrast,
        )

    def total(self) -> Scores:
        """The sum of all targets."""
        scores = self.scores.double().sum(0).to(self.scores.dtype)
        value, remainder = float(self.values.sum()), float(self.remainders.sum())
        size = max(abs(value), float(scores.double().abs().sum()), 1e-30)
        error = abs(float(self.scores.double().sum()) + remainder - value) / size
        described = f"the sum of {len(self.targets)} targets"
        return Scores(described, value, scores, remainder, error, self.contrast)


@dataclass(frozen=True, eq=False, repr=False)
class Flow(ScoreResult):
    """The result of one method for one input. Rows are output positions of the model's last side, columns input tokens.

    The maps are computed when first accessed. A flow can be copied, pickled and saved; pickling and saving compute the
    maps.
    """

    method: str
    rows: tuple[Label, ...]
    columns: tuple[Label, ...]  # for an encoder-decoder, the decoder's tokens, then the encoder's
    layers: tuple[int, ...]
    to: Scores | None = None  # with each=True, the sum of the targets
    each: ScoreMatrix | None = None  # every target by itself
    sources: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # the columns of each source
    info: Mapping[str, Any] = field(default_factory=dict)
    _maps: Callable[[], tuple[Tensor, Tensor | None]] | None = field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The input tokens."""
        return tuple(label.token for label in self.columns)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about this flow, such as contributions that do not quite add up; usually empty."""
        return tuple(self.info.get("warnings", ()))

    @cached_property
    def _found(self) -> tuple[Tensor, Tensor | None]:
        if self._maps is None:
            raise NormscopeError(f"The method {self.method!r} has no maps, only scores for a target.")
        return self._maps()

    @property
    def has_maps(self) -> bool:
        """Whether the method has maps; some have only scores for a target."""
        return self._maps is not None

    @property
    def maps(self) -> Tensor:
        """(layers, rows, columns): from the input to the states after each layer; computed when first accessed."""
        return self._found[0]

    @property
    def map(self) -> Tensor:
        """(rows, columns): from the input to the last layer's states."""
        return self.maps[-1]

    @property
    def source_share(self) -> Tensor:
        """(layers, rows): the share of the source's tokens in each state of an encoder-decoder's decoder, against the
        target tokens so far. Row i is about to write token i + 1. With ``method="alti+"`` this is the share of ALTI+.
        """
        if self.rows[0].side == self.columns[-1].side:
            raise NormscopeError("Only a flow of an encoder-decoder has a source and a target text.")
        return source_share(self.maps, source_labels(self.columns))

    @property
    def completeness(self) -> Tensor | None:
        """(layers,): ``max_i ||sum_k x_i<-k + remainder - x_i|| / ||x_i||``; None if the method does not decompose
        vectors."""
        return self._found[1]

    @property
    def scores(self) -> Tensor:
        """(columns,): the target by input token, signed; with ``each=True``, (targets, columns)."""
        return self._to.scores if self.each is None else self.each.scores

    @property
    def value(self) -> Any:
        """The target, as the model computed it: a float; with ``each=True``, a tensor (targets,)."""
        return self._to.value if self.each is None else self.each.values

    @property
    def remainder(self) -> Any:
        """The part of the target that is attributed to no token: a float; with ``each=True``, a tensor (targets,)."""
        return self._to.remainder if self.each is None else self.each.remainders

    @property
    def by_source(self) -> dict[str, Any]:
        """The target by source: the sum of the scores of its tokens, a float; with ``each=True``, a tensor (targets,).

        "(rest)" holds the tokens of no source, such as special tokens and the template's own.
        """
        if not self.sources:
            raise NormscopeError("This flow has no sources. Pass them: flow(text, target=..., sources=...).")
        scores = self.scores.double()
        found = {name: scores[..., list(columns)].sum(-1) for name, columns in self.sources.items()}
        return found if self.each is not None else {name: float(one) for name, one in found.items()}

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw the scores of the target by token and, below them, by layer; without a target, the map from the input to
        the last layer.

        Args:
            ax: Axes to draw into; by default those of a new figure. With `ax`, only the scores by token are drawn.

        Returns:
            The axes of the scores or of the map; the whole figure is their `.figure`:
            ``flow.plot().figure.savefig("flow.pdf")``.

        Raises:
            NormscopeError: If matplotlib is not installed (``pip install 'normscope[plot]'``).
        """
        from normscope.view.figure.flow import plot_flow

        return plot_flow(self, ax)

    def _save(self, path: str | os.PathLike[str]) -> Path:
        return save_flow(path, self)

    @classmethod
    def _load(cls, path: str | os.PathLike[str]) -> Flow:
        return load_flow(path, cls, Scores, ScoreMatrix)

    def _page_body(self) -> str:
        from normscope.view.html import flow_html

        return flow_html(self)

    def __repr__(self) -> str:
        to = "" if self.to is None else f", {' '.join(self.to.target.split())} = {self.to.value:.4g}"
        count = f"{len(self.columns)} tokens, {len(self.layers)} layers"
        return f"Flow(method={self.method!r}, model={self.info.get('model', '')!r}, {count}{to})"

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_found"}
        if self._maps is not None:
            state["_maps"] = partial(saved_flow_maps, *self._found)
        return state

    def __copy__(self) -> Flow:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Flow:
        maps = self._maps
        if "_found" in self.__dict__:
            maps = partial(saved_flow_maps, *deepcopy(self._found, memo))
        return replace(
            self, to=deepcopy(self.to, memo), each=deepcopy(self.each, memo), info=deepcopy(self.info, memo), _maps=maps
        )

    @property
    def _to(self) -> Scores:
        if self.to is None:
            raise NormscopeError("This flow has no target. Pass one, such as flow(text, target='top').")
        return self.to
