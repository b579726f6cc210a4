"""Analysis: the maps of one input, with its tokens, measures and completeness errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from normscope.errors import NormscopeError, nearest
from normscope.measures import first_token

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from normscope.decompose.layer import Vectors
    from normscope.flow.result import Flow


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

    def __missing__(self, scope: str) -> Tensor:
        name = self.aliases.get(str(scope).lower(), str(scope).upper())
        if name in self:
            return self[name]
        if not self:
            raise NormscopeError("This analysis holds no head-level maps: ask for them with heads=True.")
        raise NormscopeError(f"No head-level map of {scope!r}; there are: {', '.join(self)}.")


@dataclass(frozen=True, eq=False)  # tensors have no truth value: two analyses are equal if they are the same
class Analysis:
    """One input's attribution maps. Layers, heads and positions are 0-based."""

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
    _parts: Callable[[str, int, Sequence[int] | None], Vectors] | None = field(default=None, repr=False, compare=False)

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scopes present, in the layer's order."""
        return tuple(self.measured)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The row labels."""
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
        return self._at(scope).map

    @property
    def mixing_scopes(self) -> tuple[str, ...]:
        """The scopes that have a mixing ratio: all but cross-attention alone."""
        return tuple(scope for scope, measured in self.measured.items() if measured.mixing is not None)

    def mixing_ratio(self, scope: str) -> Tensor:
        """(layers, rows): the share of the other tokens in each output vector. Cross-attention alone (`XATTN-W`,
        `XATTN-N`) has none: it reads the encoder's tokens only."""
        found = self._at(scope).mixing
        if found is None:
            residual = self.aliases.get("attention-residual", "attention-residual")
            raise NormscopeError(
                f"{self.resolve(scope)} has no mixing ratio: cross-attention reads only the encoder's tokens, so there "
                f"is no own token to keep. Use a scope that has the residual connection too, such as {residual}."
            )
        return found

    def remainder(self, scope: str) -> Tensor:
        """(layers, rows): norm of the bias part that is attributed to no token."""
        return self._at(scope).remainder

    def first_token_share(self, scope: str) -> Tensor:
        """(layers, rows): the share of the first token, the attention sink of causal models, in each output.

        ``m_i0 / sum_j m_ij`` of the scope's map m: by weight for a -W scope, by norm for an -N scope.
        """
        return first_token.first_token_share(self[scope])

    def without_first(self, scope: str, renormalise: bool = False) -> Tensor:
        """(layers, rows, columns - 1): the map without the first token; with `renormalise` its rows sum to 1 again."""
        return first_token.without_first(self[scope], renormalise)

    def vectors(self, scope: str, layer: int, rows: Sequence[int] | None = None) -> Tensor:
        """The contribution vectors (rows, columns, d) of a model layer, by running the model again on this input.

        `layer` is the model's layer index (one of `layers`), `rows` positions among this analysis' rows.
        """
        return self.parts(scope, layer, rows).contributions

    def parts(self, scope: str, layer: int, rows: Sequence[int] | None = None) -> Vectors:
        """As `vectors`, with the remainder b_i and the model's own vector that they must add up to."""
        scope = self.resolve(scope)
        if scope.endswith("-W"):
            raise NormscopeError(f"{scope} reads attention weights: it has no contribution vectors. Use an -N scope.")
        self.layer_position(layer)
        if self._parts is None:
            raise NormscopeError(
                "Contribution vectors are computed on demand and need the model: this analysis was loaded from a file. "
                "Run Analyzer.analyze(...) on the input again."
            )
        return self._parts(scope, layer, rows)

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

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything but the model to a safetensors file."""
        from normscope.engine.saving import save

        return save(path, self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Any:
        """Read what `save` wrote, an Analysis or an EncoderDecoderAnalysis; a damaged or foreign file is refused."""
        from normscope.engine.saving import load

        return load(path)

    def plot(
        self,
        scope: str | None = None,
        layer: int | None = None,
        *,
        token: str | int | None = None,
        image: Any = None,
    ) -> Figure:
        """One map as a figure; without a layer or scope, small multiples of all layers x scopes.

        Of a picture, one output's row on the grid of patches, by default [CLS] in the last scope and layer: `token` is
        another one, by its label ("3,7") or its place among the rows, and `image` (a path, a PIL image or an array) the
        picture to draw it over.
        """
        from normscope.view.figure import draw
        from normscope.view.patches import draw_patches, grid_of

        if grid_of(self) is not None:
            return draw_patches(self, scope, layer, token=token, image=image)
        if token is not None or image is not None:
            raise NormscopeError("This is no analysis of a picture: plot() takes no token and no image for it.")
        return draw(self, scope, layer)

    def to_html(self, path: str | os.PathLike[str], *, image: Any = None, flow: Flow | None = None) -> Path:
        """A self-contained page with every map: the viewer and its data in one file, cells in 16 bits (the page says
        how exact they are). `image` (a path, a PIL image or an array) is the picture under a vision model's patches,
        `flow` that of the same input to a target, from `Analyzer.flow`."""
        from normscope.view.page import write

        if image is not None and "grid" not in self.info:
            raise NormscopeError("This is no analysis of a picture: to_html() takes no image for it.")
        return write(self, path, image=image, flow=flow)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """What a notebook shows: the viewer, a static picture where scripts are off, or a line of text."""
        from normscope.view.widget import mimebundle

        return mimebundle(self, include, exclude)

    def _name(self, scope: str) -> str:
        if not isinstance(scope, str):
            raise NormscopeError(f"A scope is a name such as 'ATTNRESLN-N', not {type(scope).__name__} {scope!r}.")
        return self.aliases.get(scope.strip().lower(), scope.strip().upper())

    def _at(self, scope: str) -> Measured:
        return self.measured[self.resolve(scope)]


@dataclass(frozen=True, eq=False)
class EncoderDecoderAnalysis:
    """The analyses of both sides of an encoder-decoder. The decoder's columns are its own tokens, then the encoder's.
    A side without any of the scopes that were asked for is None.

    A scope is looked up in the decoder first, and in the encoder where the decoder lacks it: `result["ATTN-N"]` is the
    decoder's, `result.encoder["ATTN-N"]` the encoder's.
    """

    encoder: Analysis | None = None
    decoder: Analysis | None = None

    def __post_init__(self) -> None:
        if not self.sides:
            raise NormscopeError("An analysis of an encoder-decoder has an encoder or a decoder, or both.")

    @property
    def sides(self) -> dict[str, Analysis]:
        """The sides that were analysed, by name."""
        pairs = (("encoder", self.encoder), ("decoder", self.decoder))
        return {side: analysis for side, analysis in pairs if analysis is not None}

    @property
    def main(self) -> Analysis:
        """The decoder; the encoder where the decoder was not analysed."""
        return list(self.sides.values())[-1]

    @property
    def scopes(self) -> tuple[str, ...]:
        """The decoder's scopes, then those that only the encoder has."""
        return tuple(dict.fromkeys(scope for one in reversed(self.sides.values()) for scope in one.scopes))

    @property
    def info(self) -> dict[str, Any]:
        """What both sides have in common: model, family, dtype, options, versions."""
        return {key: value for key, value in self.main.info.items() if self._agree(key, value)}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to know before believing the maps of either side."""
        return tuple(dict.fromkeys(text for one in self.sides.values() for text in one.warnings))

    @property
    def completeness(self) -> dict[str, dict[str, Tensor]]:
        """side -> scope -> (layers,)."""
        return {side: analysis.completeness for side, analysis in self.sides.items()}

    def side(self, name: str) -> Analysis:
        """The analysis of `"encoder"` or `"decoder"`."""
        if name not in ("encoder", "decoder"):
            raise NormscopeError(f"A side is 'encoder' or 'decoder', not {name!r}.")
        if name not in self.sides:
            raise NormscopeError(f"The {name} was not analysed: ask for one of its scopes.")
        return self.sides[name]

    def side_with(self, scope: str) -> Analysis:
        """The side that has a scope, the decoder if both have it."""
        for analysis in reversed(self.sides.values()):
            if analysis.has(scope):
                return analysis
        known = (f"{side}: {', '.join(analysis.scopes)}" for side, analysis in self.sides.items())
        raise NormscopeError(
            f"No scope {scope!r} in this analysis.{nearest(scope, self.scopes)} It holds: {'; '.join(known)}."
        )

    def __getitem__(self, scope: str) -> Tensor:
        """The map of a scope of the decoder, or of the encoder where the decoder lacks it: (layers, rows, columns)."""
        return self.side_with(scope)[scope]

    def mixing_ratio(self, scope: str) -> Tensor:
        """(layers, rows), of the side with the scope, the decoder first."""
        return self.side_with(scope).mixing_ratio(scope)

    def remainder(self, scope: str) -> Tensor:
        """(layers, rows), of the side with the scope, the decoder first."""
        return self.side_with(scope).remainder(scope)

    def vectors(self, scope: str, layer: int, rows: Sequence[int] | None = None) -> Tensor:
        """The contribution vectors (rows, columns, d), of the side with the scope, the decoder first."""
        return self.side_with(scope).vectors(scope, layer, rows)

    def cross(self, scope: str) -> Tensor:
        """(layers, rows, encoder tokens): a decoder map without the decoder's own columns."""
        decoder = self.side("decoder")
        return decoder[scope][..., [label.side == "encoder" for label in decoder.columns]]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write both sides, everything but the model, to one safetensors file, for `Analysis.load`."""
        from normscope.engine.saving import save

        return save(path, self)

    load = staticmethod(Analysis.load)

    def plot(self, scope: str | None = None, layer: int | None = None, *, side: str | None = None) -> Figure:
        """As `Analysis.plot` of one side: by default the one with the scope, the decoder first."""
        if side is not None:
            return self.side(side).plot(scope, layer)
        return (self.main if scope is None else self.side_with(scope)).plot(scope, layer)

    def to_html(self, path: str | os.PathLike[str], *, flow: Flow | None = None) -> Path:
        """A self-contained page with every map of both sides, as `Analysis.to_html`."""
        from normscope.view.page import write

        return write(self, path, flow=flow)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """What a notebook shows: the viewer, a static picture where scripts are off, or a line of text."""
        from normscope.view.widget import mimebundle

        return mimebundle(self, include, exclude)

    def _agree(self, key: str, value: Any) -> bool:
        return key != "side" and all(key in one.info and one.info[key] == value for one in self.sides.values())
