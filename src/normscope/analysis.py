"""Analysis: the maps of one input, with its tokens, measures and completeness errors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normscope.errors import NormscopeError, did_you_mean
from normscope.frames import to_xarray
from normscope.labels import Label, count_label
from normscope.measures import first_token
from normscope.measures.picture_sink import PictureSink, picture_sinks
from normscope.result_base import NO_MODEL, HeadMaps, Measured, Recompute, ResultBase
from normscope.saving import load_saved_analysis, save_analysis
from normscope.word_level import word_level_analysis

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes

    from normscope.decompose.layer import Vectors
    from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
    from normscope.flow.result import Flow
    from normscope.view.figure.axes import AxesGrid


@dataclass(frozen=True, eq=False, repr=False)  # identity comparison: tensor == is elementwise
class Analysis(ResultBase):
    """The maps of one input, with its tokens, measures and completeness errors.

    An analysis behaves like a read-only dict of maps by scope: ``result[scope]``, ``scope in result``, ``for scope in
    result``, ``len(result)`` and ``result.keys()``. Scopes are case-insensitive and may be given as aliases. Layers,
    heads and positions are counted from 0. An analysis can be copied and pickled. A pickle, like a saved file, does not
    include the model, so `vectors` and `words` are not available afterwards.
    """

    measured: Mapping[str, Measured]
    rows: tuple[Label, ...]
    columns: tuple[Label, ...]
    layers: tuple[int, ...]
    aliases: Mapping[str, str]
    heads: HeadMaps  # "ATTN-W", "ATTN-N": (layers, heads, rows, columns); empty unless requested
    value_norms: Tensor | None = None  # (layers, heads, columns): ||f^h(x_j)||, if heads were requested
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
        """The tokens of the rows (outputs): all tokens, or those selected with `analyze(rows=...)`, in that order. All
        input tokens are in the columns: `[label.token for label in result.columns]`."""
        return tuple(label.token for label in self.rows)

    @property
    def by_source(self) -> bool:
        """Whether the columns are sources, as asked for with `analyze(sources=...)`, instead of tokens."""
        return any(label.side == "source" for label in self.columns)

    @property
    def completeness(self) -> dict[str, Tensor]:
        """scope -> (layers,): ``max_i ||sum_j c_ij + b_i - y_i|| / max(||y_i||, max_j ||c_ij||)``."""
        return {scope: measured.completeness for scope, measured in self.measured.items()}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to read these maps with care. Usually empty."""
        return tuple(self.info.get("warnings", ()))

    def __getitem__(self, scope: str) -> Tensor:
        """The map of a scope: (layers, rows, columns), row = output i, column = input j."""
        return self._measured(scope).map

    def at(self, scope: str, layer: int) -> Tensor:
        """The map of a scope at one layer, by the model's layer index even if only some layers were requested.

        Args:
            scope: A scope (case-insensitive) or its alias.
            layer: The model's layer index, one of `layers`.

        Returns:
            (rows, columns): row = output i, column = input j.

        Raises:
            NormscopeError: If the scope or the layer is not in this analysis.
        """
        return self[scope][self.layer_position(layer)]

    @property
    def mixing_scopes(self) -> tuple[str, ...]:
        """The scopes that have a mixing ratio: all except cross-attention alone."""
        return tuple(scope for scope, measured in self.measured.items() if measured.mixing is not None)

    def mixing_ratio(self, scope: str) -> Tensor:
        """(layers, rows): the share of the other tokens in each output vector. Cross-attention alone (`XATTN-W`,
        `XATTN-N`) has no mixing ratio because it reads only the encoder's tokens."""
        found = self._measured(scope).mixing
        if found is None:
            residual = self.aliases.get("attention-residual", "attention-residual")
            raise NormscopeError(
                f"{self.resolve(scope)} has no mixing ratio: cross-attention reads only the encoder's tokens, so no "
                f"token attends to itself. Use a scope that includes the residual connection, such as {residual}."
            )
        return found

    def remainder(self, scope: str) -> Tensor:
        """(layers, rows): norm of the bias part, which is attributed to no token."""
        return self._measured(scope).remainder

    def first_token_share(self, scope: str) -> Tensor:
        """(layers, rows): the share of the first token, the attention sink of causal models, in each output.

        ``m_i0 / sum_j m_ij`` of the scope's map m: by weight for a -W scope, by norm for an -N scope.
        """
        self.refuse_by_source("first_token_share()")
        return first_token.first_token_share(self[scope])

    def without_first(self, scope: str, renormalise: bool = False) -> Tensor:
        """(layers, rows, columns - 1): the map without the first token. `renormalise` scales its rows to sum to 1."""
        self.refuse_by_source("without_first()")
        return first_token.without_first(self[scope], renormalise)

    def vectors(self, scope: str, layer: int, rows: Sequence[int] | None = None) -> Tensor:
        """The contribution vectors, computed by running the model again on this input.

        Args:
            scope: An -N scope (case-insensitive) or its alias.
            layer: The model's layer index, one of `layers`.
            rows: Indices into this analysis' rows (negative: from the end); default: all. The result has
                rows x columns x d numbers.

        Returns:
            (rows, columns, d); for sources, the sums over their tokens.

        Raises:
            NormscopeError: If the scope has no vectors (-W scopes) or this analysis has no model.
        """
        return self.parts(scope, layer, rows).contributions

    def parts(self, scope: str, layer: int, rows: Sequence[int] | None = None) -> Vectors:
        """Like `vectors`, with the remainder b_i and the model's own vector, to which they add up."""
        scope = self.resolve(scope)
        if scope.endswith("-W"):
            raise NormscopeError(
                f"{scope} consists of attention weights and has no contribution vectors. Use an -N scope."
            )
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
        """The maps between words instead of tokens, computed by running the model again on this input.

        The contribution of a word W to an output token i is the norm of a sum of vectors, ``||sum_{j in W} c_ij||``,
        not a sum of norms: subwords that point in opposite directions cancel. The row of a word is the mean over the
        rows of its tokens in this analysis. The same holds for its remainder and its mixing ratio, in which all tokens
        of the word count as its own. Weights (-W scopes) are summed over the tokens of W, averaged over rows, and need
        no model. Special tokens remain separate. Vectors are held in memory for one block of rows at a time.

        Args:
            scopes: Scopes of this analysis; default: all.
            layers: The model's layer indices, out of `layers`; default: all.
            word_ids: The word of each column, None for a token that stays separate; default: `word_ids`, from the
                tokenizer. Adjacent equal ids on one side form one word.

        Returns:
            An Analysis whose rows and columns are words. It has no head-level maps and no model.

        Raises:
            NormscopeError: If there are no word ids (slow tokenizers, encodings), no model, or the columns are sources.
        """
        self.refuse_by_source("words()")
        return word_level_analysis(self, scopes, layers, word_ids)

    def refuse_by_source(self, what: str) -> None:
        """Raise if the columns are sources, which `what` cannot use."""
        if self.by_source:
            raise NormscopeError(
                f"{what} needs a column for each token, but the columns of this analysis are sources. Analyse the text "
                "without sources."
            )

    def resolve(self, scope: str) -> str:
        """The canonical name of a scope of this analysis, given case-insensitively or as an alias."""
        name = self._name(scope)
        if name not in self.measured:
            raise NormscopeError(
                f"No scope {scope!r} in this analysis.{did_you_mean(scope, self.scopes)} "
                f"It holds: {', '.join(self.scopes)}."
            )
        return name

    def has(self, scope: str) -> bool:
        """Whether this analysis has a scope, given case-insensitively or as an alias."""
        return self._name(scope) in self.measured

    def layer_position(self, layer: int) -> int:
        """The index of the model's layer `layer` in the first dimension of every tensor here."""
        if layer not in self.layers:
            raise NormscopeError(
                f"Layer {layer} is not in this analysis, which has the layers {', '.join(map(str, self.layers))} "
                "(counted from 0)."
            )
        return self.layers.index(layer)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Analysis | EncoderDecoderAnalysis:
        """Read an analysis written by `save`.

        Args:
            path: A safetensors file.

        Returns:
            The Analysis or EncoderDecoderAnalysis that was saved, without its model.

        Raises:
            NormscopeError: If the file is damaged (its checksum does not match) or was not written by `save`.
        """
        # The two classes refer to each other: that one holds analyses.
        from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis

        found = load_saved_analysis(path, Analysis)
        return EncoderDecoderAnalysis(**found) if isinstance(found, dict) else found

    def _write(self, path: str | os.PathLike[str]) -> Path:
        return save_analysis(path, self)

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
        """Draw one map, or small multiples if no layer or no scope is given.

        For a vision model, draw one row on the grid of patches; default: [CLS] in the last scope and layer. With
        `token` or `image`, draw the row of one output of a text with pictures over them.

        Args:
            scope: The scope to draw; default: all.
            layer: The model's layer index; default: all layers.
            token: The output whose row is drawn on the picture: its label ("3,7", or a token of the text) or row
                index.
            image: The picture to draw over: a path, a PIL image or an array; of several, a list.
            ax: Axes to draw a single map into; default: those of a new figure.
            cmap: A matplotlib colormap or its name; default: cividis.
            normalize: Divide each row by its sum, so that cells are shares.
            annotate: Write the value into each cell of a single map.

        Returns:
            The axes of one map, or an array of axes (row by row). Both have a `.figure`:
            ``result.plot().figure.savefig("maps.pdf")``.

        Raises:
            NormscopeError: If matplotlib is not installed (``pip install 'normscope[plot]'``), the scope or layer is
                not in this analysis, or `ax` or `annotate` is given for several maps.
        """
        from normscope.view.figure.maps import plot
        from normscope.view.figure.patches import plot_patches
        from normscope.view.figure.pictures import plot_on_pictures
        from normscope.view.figure.style import Look
        from normscope.view.images import image_patch_grid

        look = Look(cmap, normalize, annotate)
        if image_patch_grid(self) is not None:
            return plot_patches(self, scope, layer, token=token, image=image, ax=ax, look=look)
        if "pictures" in self.info and (token is not None or image is not None):
            return plot_on_pictures(self, scope, layer, token=token, image=image, ax=ax, look=look)
        if token is not None or image is not None:
            raise NormscopeError("token and image are for vision models only: this analysis is not of an image.")
        return plot(self, scope, layer, ax=ax, look=look)

    def picture_sink(self, scope: str, picture: str | None = None) -> PictureSink:
        """The patch that receives most of what the outputs take from a picture, its share, and the maps without it.

        Args:
            scope: The scope, by weight such as "weights", or by norm such as "attention".
            picture: The name of the picture, such as "image 2"; default: the first.

        Returns:
            For each layer the patch and its share of the picture in every row, and the picture's columns of the maps
            without it, as shares.

        Raises:
            NormscopeError: If the input has no such picture, or the columns are sources.
        """
        pictures = {one["name"]: set(one["positions"]) for one in self.info.get("pictures", ())}
        if self.by_source or not pictures:
            raise NormscopeError("This analysis has no pictures whose tokens are columns.")
        if picture is not None and picture not in pictures:
            raise NormscopeError(f"There is no picture {picture!r}. Known: {', '.join(pictures)}.")
        places = pictures[next(iter(pictures)) if picture is None else picture]
        own = [n for n, label in enumerate(self.columns) if label.position in places]
        return picture_sinks(self[scope][..., own], [self.columns[n].token for n in own])

    def to_xarray(self) -> xarray.Dataset:
        """The maps as an xarray Dataset.

        Returns:
            A Dataset with one variable per scope and the dimensions `layer` (the model's layer index), `output` and
            `input` (token positions on their side, counted from 0). The coordinates are `output_token`,
            `input_token`, `output_side` and `input_side`; `attrs` holds `info`.

        Raises:
            NormscopeError: If xarray is not installed (``pip install 'normscope[frames]'``).
        """
        return to_xarray(self)

    def to_html(self, path: str | os.PathLike[str], *, image: Any = None, flow: Flow | None = None) -> Path:
        """Write a self-contained HTML page with the viewer and every map. Cells are stored in 16 bits; the page states
        their precision.

        Args:
            path: The output file, with the suffix `.html`, `.htm` or none.
            image: For a vision model, the image under the patches: a path, a PIL image or an array.
            flow: A flow to a target for the same input, from `Analyzer.flow`.

        Returns:
            The path of the file.

        Raises:
            NormscopeError: If the file cannot be written, `flow` is for another input or has no target, or the columns
                are sources, which the viewer does not show.
        """
        from normscope.view.html import write_page

        if image is not None and "grid" not in self.info:
            raise NormscopeError("image is for vision models only: this analysis is not of an image.")
        return write_page(self, path, image=image, flow=flow)

    @property
    def summary(self) -> str:
        """Scopes, layers, size and completeness error in one line."""
        worst = max((float(one.completeness.nan_to_num(inf).max()) for one in self.measured.values()), default=0.0)
        level = "tokens by source" if self.by_source else self.info.get("level", "tokens")
        cells = f"{len(self.rows)} x {len(self.columns)} {level}"
        counts = f"{count_label(len(self), 'scope')}, {count_label(len(self.layers), 'layer')}"
        return f"{counts}, {cells}, completeness error {worst:.1e}"

    def __repr__(self) -> str:
        return f"Analysis(model={self.info.get('model', '')!r}, {self.summary})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recompute": None}  # pickles do not include the model

    def __copy__(self) -> Analysis:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Analysis:
        copied = {one.name: deepcopy(getattr(self, one.name), memo) for one in fields(self) if one.name != "_recompute"}
        return Analysis(**copied, _recompute=self._recompute)  # shares the model

    @property
    def _by_side(self) -> dict[str, Analysis]:
        return {self.rows[0].side: self}

    def _name(self, scope: str) -> str:
        if not isinstance(scope, str):
            raise NormscopeError(f"A scope is a name such as 'ATTNRESLN-N', not {type(scope).__name__} {scope!r}.")
        return self.aliases.get(scope.strip().lower(), scope.strip().upper())

    def _measured(self, scope: str) -> Measured:
        return self.measured[self.resolve(scope)]
