"""Analysis: the maps of one input, with its tokens, measures and completeness errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from normscope.errors import NormscopeError, nearest
from normscope.measures import first_token
from normscope.result_base import ResultBase

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes

    from normscope.decompose.layer import Vectors
    from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
    from normscope.flow.result import Flow
    from normscope.view.figure.axes import AxesGrid

Receive = Callable[[str, int, int, "Vectors"], None]  # scope, layer, number of the block, its vectors
# Runs the model again and hands over the vectors of some scopes and layers, for blocks of rows.
Recompute = Callable[[Sequence[str], Sequence[int], Sequence[Sequence[int]], Receive], None]
NO_MODEL = (
    "Contribution vectors are computed on demand and need the model. This analysis has none: it was loaded from a "
    "file, unpickled or made by words(). Run Analyzer.analyze(...) on the input again."
)


class Label(NamedTuple):
    """A token as the row or column of a map: its text, the side it belongs to, its position there."""

    token: str
    side: str
    position: int


@dataclass(frozen=True)
class Measured:
    """What is kept of one scope, all layers that were asked for."""

    map: Tensor  # (layers, rows, columns): norm of the contribution of column j to row i, or attention weight
    mixing: Tensor | None  # (layers, rows); None of cross-attention alone, where no token can keep anything of its own
    remainder: Tensor  # (layers, rows): norm of the part that comes from biases and belongs to no token
    completeness: Tensor  # (layers,)


class HeadMaps(dict[str, Tensor]):
    """Head-level maps by scope: `"ATTN-W"` and the attention scope, in any case or by the aliases of the model."""

    def __init__(self, maps: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
        super().__init__(maps)
        self.aliases = aliases

    def __contains__(self, scope: object) -> bool:
        return isinstance(scope, str) and super().__contains__(self._name(scope))

    def __missing__(self, scope: str) -> Tensor:
        if scope in self:
            return self[self._name(scope)]
        if not self:
            raise NormscopeError("This analysis holds no head-level maps: ask for them with heads=True.")
        raise NormscopeError(f"No head-level map of {scope!r}; there are: {', '.join(self)}.")

    def get(self, scope: str, default: Any = None) -> Any:
        """The map of a scope, given in any case or as an alias; `default` where there is none."""
        return super().get(self._name(scope), default)

    def _name(self, scope: str) -> str:
        return self.aliases.get(str(scope).strip().lower(), str(scope).strip().upper())


NO_HEADS = HeadMaps({}, {})


@dataclass(frozen=True, eq=False, repr=False)  # identity comparison: tensor == is elementwise
class Analysis(ResultBase):
    """The maps of one input, with its tokens, measures and completeness errors.

    Read it like a dict: ``result[scope]`` is the map of a scope, ``scope in result`` says whether there is one (in any
    case, or by its alias), ``for scope in result``, ``len(result)`` and ``result.keys()`` go by the scopes. Layers,
    heads and positions are counted from 0. An analysis can be copied and pickled; a pickle leaves the model out, so
    that `vectors` and `words` refuse after it, as after `load`.
    """

    measured: Mapping[str, Measured]
    rows: tuple[Label, ...]
    columns: tuple[Label, ...]
    layers: tuple[int, ...]
    aliases: Mapping[str, str]
    heads: HeadMaps  # "ATTN-W", "ATTN-N": (layers, heads, rows, columns); empty unless asked for
    value_norms: Tensor | None = None  # (layers, heads, columns): ||f^h(x_j)||, when heads were asked for
    head_indices: tuple[int, ...] = ()
    word_ids: tuple[int | None, ...] | None = None  # the word of each column, None for special tokens
    info: Mapping[str, Any] = field(default_factory=dict)  # model, family, dtype, options, versions
    _recompute: Recompute | None = field(default=None, repr=False, compare=False)

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scopes present, in the layer's order."""
        return tuple(self.measured)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens of the rows, that is, of the outputs: all of them, or those chosen with `analyze(rows=...)`, in
        that order. The input tokens are always complete: `[label.token for label in result.columns]`."""
        return tuple(label.token for label in self.rows)

    @property
    def completeness(self) -> dict[str, Tensor]:
        """scope -> (layers,): ``max_i ||sum_j c_ij + b_i - y_i|| / max(||y_i||, max_j ||c_ij||)``."""
        return {scope: measured.completeness for scope, measured in self.measured.items()}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before believing these maps; empty where nothing is wrong."""
        return tuple(self.info.get("warnings", ()))

    def __getitem__(self, scope: str) -> Tensor:
        """The map of a scope: (layers, rows, columns), row = output i, column = input j."""
        return self._measured(scope).map

    def at(self, scope: str, layer: int) -> Tensor:
        """The map of a scope at one layer of the model, also where only some layers were asked for.

        Args:
            scope: A scope, in any case, or its alias.
            layer: The model's layer index, one of `layers`.

        Returns:
            (rows, columns): row = output i, column = input j.

        Raises:
            NormscopeError: If the scope or the layer is not in this analysis.
        """
        return self[scope][self.layer_position(layer)]

    @property
    def mixing_scopes(self) -> tuple[str, ...]:
        """The scopes that have a mixing ratio: all but cross-attention alone."""
        return tuple(scope for scope, measured in self.measured.items() if measured.mixing is not None)

    def mixing_ratio(self, scope: str) -> Tensor:
        """(layers, rows): the share of the other tokens in each output vector. Cross-attention alone (`XATTN-W`,
        `XATTN-N`) has none: it reads the encoder's tokens only."""
        found = self._measured(scope).mixing
        if found is None:
            residual = self.aliases.get("attention-residual", "attention-residual")
            raise NormscopeError(
                f"{self.resolve(scope)} has no mixing ratio: cross-attention reads only the encoder's tokens, so there "
                f"is no own token to keep. Use a scope that has the residual connection too, such as {residual}."
            )
        return found

    def remainder(self, scope: str) -> Tensor:
        """(layers, rows): norm of the bias part that is attributed to no token."""
        return self._measured(scope).remainder

    def first_token_share(self, scope: str) -> Tensor:
        """(layers, rows): the share of the first token, the attention sink of causal models, in each output.

        ``m_i0 / sum_j m_ij`` of the scope's map m: by weight for a -W scope, by norm for an -N scope.
        """
        return first_token.first_token_share(self[scope])

    def without_first(self, scope: str, renormalise: bool = False) -> Tensor:
        """(layers, rows, columns - 1): the map without the first token; with `renormalise` its rows sum to 1 again."""
        return first_token.without_first(self[scope], renormalise)

    def vectors(self, scope: str, layer: int, rows: Sequence[int] | None = None) -> Tensor:
        """The contribution vectors themselves, by running the model again on this input.

        Args:
            scope: An -N scope, in any case, or its alias.
            layer: The model's layer index, one of `layers`.
            rows: Places among this analysis' rows (negative from the end); by default all. The result takes
                rows x columns x d numbers.

        Returns:
            (rows, columns, d).

        Raises:
            NormscopeError: If the scope has no vectors (-W), or this analysis has no model.
        """
        return self.parts(scope, layer, rows).contributions

    def parts(self, scope: str, layer: int, rows: Sequence[int] | None = None) -> Vectors:
        """As `vectors`, with the remainder b_i and the model's own vector that they must add up to."""
        scope = self.resolve(scope)
        if scope.endswith("-W"):
            raise NormscopeError(f"{scope} reads attention weights: it has no contribution vectors. Use an -N scope.")
        self.layer_position(layer)
        if self._recompute is None:
            raise NormscopeError(NO_MODEL)
        found: list[Vectors] = []
        chosen = range(len(self.rows)) if rows is None else rows
        self._recompute([scope], [layer], [chosen], lambda scope, layer, block, vectors: found.append(vectors))
        return found[0]

    def words(
        self,
        scopes: Iterable[str] | str | None = None,
        layers: Iterable[int] | int | None = None,
        *,
        word_ids: Sequence[int | None] | None = None,
    ) -> Analysis:
        """The maps between words instead of tokens, by running the model again on this input.

        The contribution of a word W to an output token i is the norm of a sum of vectors, ``||sum_{j in W} c_ij||``,
        not a sum of norms: subwords that point in opposite directions cancel. The row of a word is the mean of the rows
        of its tokens (of those in this analysis), as are its mixing ratio, where all tokens of the word count as its
        own, and its remainder. Weights (-W scopes) are added over the tokens of W and averaged over rows, and need no
        model. Special tokens stay by themselves. Vectors are held for a block of rows at a time.

        Args:
            scopes: Which of the scopes here; by default all.
            layers: Which of the model's layers here; by default all.
            word_ids: The word of each column, None for a token by itself; by default the tokenizer's, `word_ids`. Equal
                neighbours of one side are one word.

        Returns:
            An Analysis whose rows and columns are words. It has no head-level maps and no model.

        Raises:
            NormscopeError: If there are no word ids (a slow tokenizer, an encoding), or there is no model.
        """
        from normscope.word_level import word_level_analysis

        return word_level_analysis(self, scopes, layers, word_ids)

    def resolve(self, scope: str) -> str:
        """The name of a scope of this analysis, given in any case or as an alias."""
        name = self._name(scope)
        if name not in self.measured:
            raise NormscopeError(
                f"No scope {scope!r} in this analysis.{nearest(scope, self.scopes)} It holds: {', '.join(self.scopes)}."
            )
        return name

    def has(self, scope: str) -> bool:
        """Whether a scope, given in any case or as an alias, is in this analysis."""
        return self._name(scope) in self.measured

    def layer_position(self, layer: int) -> int:
        """Where the model's layer `layer` stands in the first dimension of every tensor here."""
        if layer not in self.layers:
            raise NormscopeError(
                f"Layer {layer} is not in this analysis, which holds the layers {', '.join(map(str, self.layers))} "
                "(counted from 0)."
            )
        return self.layers.index(layer)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Analysis | EncoderDecoderAnalysis:
        """Read what `save` wrote.

        Args:
            path: A safetensors file.

        Returns:
            The Analysis or EncoderDecoderAnalysis that was saved, without its model. ``isinstance`` tells which.

        Raises:
            NormscopeError: If the file is damaged (its checksum does not match) or was not written by `save`.
        """
        from normscope.engine.saving import load_analysis

        return load_analysis(path)

    def plot(
        self,
        scope: str | None = None,
        layer: int | None = None,
        *,
        token: str | int | None = None,
        image: Any = None,
        ax: Axes | None = None,
        cmap: Any = None,
        normalize: bool = False,
        annotate: bool = False,
    ) -> Axes | AxesGrid:
        """Draw one map; without a layer or a scope, small multiples of all layers or scopes.

        For a vision model, draw one row on the grid of patches, by default that of [CLS] in the last scope and layer.

        Args:
            scope: The scope to draw; by default all.
            layer: The model's layer index; by default all layers.
            token: For a vision model, the output to draw, by its label ("3,7") or its place among the rows.
            image: For a vision model, the picture to draw it over: a path, a PIL image or an array.
            ax: Axes to draw into, for one map; by default those of a new figure.
            cmap: A colour map of matplotlib or its name; by default cividis.
            normalize: Divide each row by its sum, so that cells are shares.
            annotate: Write the value into each cell, for one map.

        Returns:
            The axes of one map, or the array of axes of several (row by row). Both have the figure as `.figure`:
            ``result.plot().figure.savefig("maps.pdf")``.

        Raises:
            NormscopeError: If matplotlib is not installed (``pip install 'normscope[plot]'``), there is no such scope
                or layer, or `ax` or `annotate` is given for several maps.
        """
        from normscope.view.figure.maps import plot
        from normscope.view.figure.patches import plot_patches
        from normscope.view.figure.style import Look
        from normscope.view.images import patch_grid

        look = Look(cmap, normalize, annotate)
        if patch_grid(self) is not None:
            return plot_patches(self, scope, layer, token=token, image=image, ax=ax, look=look)
        if token is not None or image is not None:
            raise NormscopeError("This is no analysis of a picture: plot() takes no token and no image for it.")
        return plot(self, scope, layer, ax=ax, look=look)

    def to_xarray(self) -> xarray.Dataset:
        """The maps as an xarray Dataset.

        Returns:
            A Dataset with one variable for each scope and the dimensions `layer` (the model's layer index), `output`
            and `input` (positions of tokens on their side, counted from 0), with the coordinates `output_token`,
            `input_token`, `output_side` and `input_side`. `attrs` says what was run.

        Raises:
            NormscopeError: If xarray is not installed (``pip install 'normscope[frames]'``).
        """
        from normscope.frames import to_xarray

        return to_xarray(self)

    def to_html(self, path: str | os.PathLike[str], *, image: Any = None, flow: Flow | None = None) -> Path:
        """Write a self-contained page: the viewer and every map in one file, cells in 16 bits (the page says how exact
        they are).

        Args:
            path: The file, ending in `.html` or `.htm`, or without a suffix.
            image: For a vision model, the picture under the patches: a path, a PIL image or an array.
            flow: A flow of the same input to a target, from `Analyzer.flow`.

        Returns:
            The path of the file.

        Raises:
            NormscopeError: If the file cannot be written, or `flow` is of another input or has no target.
        """
        from normscope.view.html import write_page

        if image is not None and "grid" not in self.info:
            raise NormscopeError("This is no analysis of a picture: to_html() takes no image for it.")
        return write_page(self, path, image=image, flow=flow)

    @property
    def summary(self) -> str:
        """What was computed, and how exact it is, in one line."""
        worst = max((float(one.completeness.nan_to_num(inf).max()) for one in self.measured.values()), default=0.0)
        cells = f"{len(self.rows)} x {len(self.columns)} {self.info.get('level', 'tokens')}"
        counts = f"{_count(len(self), 'scope')}, {_count(len(self.layers), 'layer')}"
        return f"{counts}, {cells}, completeness error {worst:.1e}"

    def __repr__(self) -> str:
        return f"Analysis(model={self.info.get('model', '')!r}, {self.summary})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recompute": None}  # the model is not part of a pickle

    def __copy__(self) -> Analysis:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Analysis:
        copied = {one.name: deepcopy(getattr(self, one.name), memo) for one in fields(self) if one.name != "_recompute"}
        return Analysis(**copied, _recompute=self._recompute)  # of the same model

    @property
    def _by_side(self) -> dict[str, Analysis]:
        return {self.rows[0].side: self}

    def _name(self, scope: str) -> str:
        if not isinstance(scope, str):
            raise NormscopeError(f"A scope is a name such as 'ATTNRESLN-N', not {type(scope).__name__} {scope!r}.")
        return self.aliases.get(scope.strip().lower(), scope.strip().upper())

    def _measured(self, scope: str) -> Measured:
        return self.measured[self.resolve(scope)]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
