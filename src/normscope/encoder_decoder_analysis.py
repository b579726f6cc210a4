"""EncoderDecoderAnalysis: the analyses of the encoder and the decoder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normscope.analysis import Analysis
from normscope.errors import NormscopeError, did_you_mean
from normscope.result_base import ResultBase
from normscope.saving import save_both_sides
from normscope.word_alignment import WordAlignment, align_words

if TYPE_CHECKING:
    import xarray
    from matplotlib.axes import Axes

    from normscope.flow.result import Flow
    from normscope.view.figure.axes import AxesGrid


@dataclass(frozen=True, eq=False, repr=False)
class EncoderDecoderAnalysis(ResultBase):
    """The analyses of the encoder and the decoder. The decoder's columns are its own tokens, then the encoder's.
    A side that has none of the requested scopes is None.

    Scopes are looked up in the decoder first, then in the encoder: `result["ATTN-N"]` is the decoder's map,
    `result.encoder["ATTN-N"]` the encoder's. ``scope in result``, ``for scope in result``, ``len(result)`` and
    ``result.keys()`` cover the scopes of both sides.
    """

    encoder: Analysis | None = None
    decoder: Analysis | None = None

    def __post_init__(self) -> None:
        if not self.sides:
            raise NormscopeError("An EncoderDecoderAnalysis needs an encoder, a decoder or both; got neither.")

    @property
    def sides(self) -> dict[str, Analysis]:
        """The sides that were analysed, by name."""
        pairs = (("encoder", self.encoder), ("decoder", self.decoder))
        return {side: analysis for side, analysis in pairs if analysis is not None}

    @property
    def _by_side(self) -> dict[str, Analysis]:
        return self.sides

    @property
    def main(self) -> Analysis:
        """The decoder, or the encoder if the decoder was not analysed."""
        return list(self.sides.values())[-1]

    @property
    def scopes(self) -> tuple[str, ...]:
        """The decoder's scopes, then those that only the encoder has."""
        return tuple(dict.fromkeys(scope for one in reversed(self.sides.values()) for scope in one.scopes))

    @property
    def info(self) -> dict[str, Any]:
        """The entries that both sides share: model, family, dtype, options, versions."""
        return {key: value for key, value in self.main.info.items() if self._agree(key, value)}

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of both sides."""
        return tuple(dict.fromkeys(text for one in self.sides.values() for text in one.warnings))

    @property
    def completeness(self) -> dict[str, dict[str, Tensor]]:
        """side -> scope -> (layers,)."""
        return {side: analysis.completeness for side, analysis in self.sides.items()}

    def side(self, name: str) -> Analysis:
        """The analysis of `"encoder"` or `"decoder"`."""
        if name not in ("encoder", "decoder"):
            raise NormscopeError(f"side must be 'encoder' or 'decoder', not {name!r}.")
        if name not in self.sides:
            raise NormscopeError(f"The {name} was not analysed. Request at least one of its scopes.")
        return self.sides[name]

    def side_with(self, scope: str) -> Analysis:
        """The side that has a scope; the decoder if both do."""
        for analysis in reversed(self.sides.values()):
            if analysis.has(scope):
                return analysis
        known = (f"{side}: {', '.join(analysis.scopes)}" for side, analysis in self.sides.items())
        raise NormscopeError(
            f"No scope {scope!r} in this analysis.{did_you_mean(scope, self.scopes)} It holds: {'; '.join(known)}."
        )

    def has(self, scope: str) -> bool:
        """Whether either side has a scope, given case-insensitively or as an alias."""
        return any(analysis.has(scope) for analysis in self.sides.values())

    def __getitem__(self, scope: str) -> Tensor:
        """(layers, rows, columns): the map of a scope in the decoder, or in the encoder if the decoder lacks it."""
        return self.side_with(scope)[scope]

    def at(self, scope: str, layer: int) -> Tensor:
        """(rows, columns): the map of a scope at one layer of the model. See `side_with`."""
        return self.side_with(scope).at(scope, layer)

    def mixing_ratio(self, scope: str) -> Tensor:
        """(layers, rows): the mixing ratio of a scope. See `side_with`."""
        return self.side_with(scope).mixing_ratio(scope)

    def remainder(self, scope: str) -> Tensor:
        """(layers, rows): the norm of the remainder at a scope. See `side_with`."""
        return self.side_with(scope).remainder(scope)

    def vectors(self, scope: str, layer: int, rows: Sequence[int] | None = None) -> Tensor:
        """(rows, columns, d): the contribution vectors of a scope. See `side_with`."""
        return self.side_with(scope).vectors(scope, layer, rows)

    def cross(self, scope: str) -> Tensor:
        """(layers, rows, encoder tokens): the encoder's columns of a decoder map."""
        decoder = self.side("decoder")
        decoder.refuse_by_source("cross()")
        return decoder[scope][..., [label.side == "encoder" for label in decoder.columns]]

    def alignments(
        self,
        scope: str | None = None,
        layer: int | None = None,
        *,
        setting: str | None = None,
        threshold: float | None = None,
        symmetrise: str | None = None,
        word_ids: Sequence[int | None] | None = None,
    ) -> WordAlignment:
        """Which source word each target word is linked to.

        Rows of lower decoder layers align with the word being read, the input token of the row; rows of upper layers
        with the word being written, the next token. Subwords are merged: cells are summed over the subwords of a source
        word and averaged over those of a target word.

        Args:
            scope: A scope with cross-attention; default: `XATTN-N`. Norms align better than the weights, `XATTN-W`.
            layer: The model's layer index; default: the second of six layers (the same share of another depth), which
                aligns best; for weights the third, with "AWO" the fifth.
            setting: "AWI" (alignment with input: the rows that read a word) or "AWO" (alignment with output: the rows
                that write it), as in Kobayashi et al. (2020); default: "AWI" in the lower two thirds of the layers,
                "AWO" above.
            threshold: Link a target word to every source word with at least this share of its row; default: to the one
                with the largest cell, or to none if that is a special token.
            symmetrise: "intersection" keeps a link if its target word is also the best one of its source word; "union"
                adds the best target word of each source word. Default: neither.
            word_ids: The word of each column (the decoder's, then the encoder's), counted from 0 on each side, None for
                special tokens; default: what is between spaces, with every punctuation mark as a word of its own.

        Returns:
            The links, with the words, the map between words, and Pharaoh format as `.pharaoh`.

        Raises:
            NormscopeError: If the decoder, the scope, the layer or a row was not analysed, or the words are unknown.
        """
        return align_words(self.side("decoder"), scope, layer, setting, threshold, symmetrise, word_ids)

    def _write(self, path: str | os.PathLike[str]) -> Path:
        return save_both_sides(path, self.sides)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> EncoderDecoderAnalysis:
        """Read an analysis written by `save`.

        Args:
            path: A safetensors file.

        Returns:
            The analysis, without its model.

        Raises:
            NormscopeError: If the file is damaged, was not written by `save`, or holds an Analysis (use
                `Analysis.load`).
        """
        found = Analysis.load(path)
        if not isinstance(found, EncoderDecoderAnalysis):
            raise NormscopeError(
                f"{path} holds an Analysis, not an EncoderDecoderAnalysis. Read it with Analysis.load."
            )
        return found

    def plot(
        self, scope: str | None = None, layer: int | None = None, *, side: str | None = None, **options: Any
    ) -> Axes | AxesGrid:
        """Draw maps of one side, as `Analysis.plot` does.

        Args:
            scope: The scope to draw; default: all.
            layer: The model's layer index; default: all layers.
            side: "encoder" or "decoder"; default: the decoder if it has the scope.
            **options: `ax`, `cmap`, `normalize` and `annotate`, as for `Analysis.plot`.

        Returns:
            The axes of one map, or an array of axes.
        """
        chosen = self.side(side) if side is not None else self.main if scope is None else self.side_with(scope)
        return chosen.plot(scope, layer, **options)

    def to_xarray(self) -> dict[str, xarray.Dataset]:
        """The maps as one xarray Dataset per side. See `Analysis.to_xarray`.

        Returns:
            side -> Dataset.

        Raises:
            NormscopeError: If xarray is not installed (``pip install 'normscope[frames]'``).
        """
        return {side: analysis.to_xarray() for side, analysis in self.sides.items()}

    def to_html(self, path: str | os.PathLike[str], *, flow: Flow | None = None) -> Path:
        """Write a self-contained HTML page with every map of both sides. See `Analysis.to_html`."""
        from normscope.view.html import write_page

        return write_page(self, path, flow=flow)

    def __repr__(self) -> str:
        sides = "; ".join(f"{side}: {analysis.summary}" for side, analysis in self.sides.items())
        return f"EncoderDecoderAnalysis(model={self.main.info.get('model', '')!r}, {sides})"

    def _agree(self, key: str, value: Any) -> bool:
        return key != "side" and all(key in one.info and one.info[key] == value for one in self.sides.values())
