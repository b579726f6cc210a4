"""One output of a vision model on the grid of patches, over the picture where that is given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from normscope.analysis import Analysis
from normscope.errors import NormscopeError
from normscope.inputs.media import open_image
from normscope.labels import Label
from normscope.view import figure, labels
from normscope.view.labels import Scale, Values, model_label, visible
from normscope.view.look import PLAIN, Look, annotate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar

SIDE = 4.0  # inches of the longer side
VEIL = 0.6  # opacity of the map over a picture


def grid_of(analysis: Analysis) -> tuple[int, int] | None:
    """Rows and columns of the patches, of an analysis of a picture."""
    grid = analysis.info.get("grid")
    if grid is None:
        return None
    down, across = grid
    return (down, across) if down * across <= len(analysis.columns) else None


def row_of(analysis: Analysis, token: str | int | None = None) -> int:
    """The place of an output among the rows, by its label or its place; by default [CLS], else the first row."""
    tokens = list(analysis.tokens)
    if token is None:
        return tokens.index("[CLS]") if "[CLS]" in tokens else 0
    if isinstance(token, int) and not isinstance(token, bool) and -len(tokens) <= token < len(tokens):
        return token % len(tokens)
    if isinstance(token, str) and token.replace(" ", "") in tokens:
        return tokens.index(token.replace(" ", ""))
    raise NormscopeError(
        f"There is no output {token!r}: give [CLS], a patch as 'row,column' counted from 1, such as {tokens[-1]!r}, or "
        f"a place from 0 to {len(tokens) - 1}."
    )


def on_grid(
    analysis: Analysis, scope: str, layer: int, row: int, look: Look = PLAIN
) -> tuple[Values, dict[str, float]]:
    """(down, across): what each patch gives to an output; and by label what the tokens that are no patch give."""
    grid = grid_of(analysis)
    if grid is None:
        raise NormscopeError("This is no analysis of a picture: it has no grid of patches.")
    values = look.values(analysis, scope, layer)[row]
    special = len(values) - grid[0] * grid[1]
    others = {label.token: float(value) for label, value in zip(analysis.columns[:special], values, strict=False)}
    return values[special:].reshape(grid), others


def scale_of(patches: Values, own: tuple[int, int] | None) -> Scale:
    """As for maps, where the only own cell is the output's own patch."""
    cells = np.zeros(patches.shape, dtype=bool)
    if own is not None:
        cells[own] = True
    return labels.scale_of([patches], cells)


def own_patch(analysis: Analysis, label: Label) -> tuple[int, int] | None:
    """Where on the grid an output itself is; None for one that is no patch."""
    down, across = grid_of(analysis) or (0, 0)
    place = analysis.columns.index(label) - (len(analysis.columns) - down * across)
    return None if place < 0 else divmod(place, across)


def plot_patches(
    analysis: Analysis,
    scope: str | None = None,
    layer: int | None = None,
    *,
    token: str | int | None = None,
    image: Any = None,
    ax: Axes | None = None,
    look: Look = PLAIN,
) -> Axes:
    """The row of one output on the grid of patches, by default [CLS] in the last scope and layer.

    `image` is stretched over the grid: where the model's processor crops pictures, give the cropped one.
    """
    scope = analysis.scopes[-1] if scope is None else analysis.resolve(scope)
    layer = analysis.layers[-1] if layer is None else analysis.layers[analysis.layer_position(layer)]
    row = row_of(analysis, token)
    patches, others = on_grid(analysis, scope, layer, row, look)
    own = own_patch(analysis, analysis.rows[row])
    scale = scale_of(patches, own)
    pixels = None if image is None else pixels_of(image)
    with figure.style():
        made, bar = _draw(patches, scale, own, pixels, ax, look)
        name = visible(analysis.rows[row].token)
        made.set_title(f"{scope}, layer {layer + 1}, output {name}", pad=5)
        figure.tidy(bar, scale, look.quantity(scope))
        if ax is not None:
            return made
        rest = ", ".join(f"{visible(label)} {value:.3g}" for label, value in others.items())
        beyond = f" Its own patch (framed): {scale.top:.3g}, beyond the scale." if scale.clipped else ""
        note = f" Not on the grid: {rest}." if rest else ""
        whole = figure.figure_of(made)
        figure.caption(whole, f"{model_label(analysis)}. What each patch gives to the output {name}.{note}{beyond}")
        whole.draw_without_rendering()
        return made


def _draw(
    patches: Values,
    scale: Scale,
    own: tuple[int, int] | None,
    pixels: NDArray[Any] | None,
    ax: Axes | None,
    look: Look,
) -> tuple[Axes, Colorbar]:
    from matplotlib.cm import ScalarMappable
    from matplotlib.patches import Rectangle

    down, across = patches.shape
    edges = (-0.5, across - 0.5, down - 0.5, -0.5)
    # A picture keeps its shape: patches then are as high and wide as the processor's stretching made them.
    shape = 1.0 if pixels is None else (pixels.shape[0] / down) / (pixels.shape[1] / across)
    width, height = across, down * shape
    size = SIDE / max(width, height)
    axes = ax
    if axes is None:
        axes = figure.blank(size * width + 1.2, size * height + 0.9).add_subplot(axes_class=figure.map_axes())
    if pixels is not None:
        axes.imshow(_grey(pixels), extent=edges, aspect="auto", interpolation="antialiased", cmap="gray")
    colours = look.colours(scale)
    options: dict[str, Any] = {"cmap": colours, "vmin": 0.0, "vmax": scale.end}
    drawn = axes.imshow(patches, extent=edges, aspect="auto", alpha=None if pixels is None else VEIL, **options)
    if own is not None:
        axes.add_patch(Rectangle((own[1] - 0.5, own[0] - 0.5), 1, 1, fill=False, edgecolor="white", linewidth=1.2))
    if look.annotate:
        annotate(axes, patches, scale, look, min(7.5, size * 72 * 0.3))
    axes.set_aspect(shape)
    axes.set_axis_off()
    key = ScalarMappable(drawn.norm, colours)  # as strong as without a picture
    return axes, axes.figure.colorbar(key, ax=axes, fraction=0.05, pad=0.03, aspect=28, extend=figure.extend(scale))


def pixels_of(image: Any) -> NDArray[Any]:
    """(height, width, 3) of a path, a PIL image or an array (height, width[, channels])."""
    if isinstance(image, str | os.PathLike):
        return np.asarray(open_image(image))
    if hasattr(image, "convert"):
        return np.asarray(image.convert("RGB"))
    try:
        pixels = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    except (TypeError, ValueError, AttributeError) as error:
        raise NormscopeError(f"The image is no array of numbers: {error}.") from error
    if pixels.ndim not in (2, 3) or not np.issubdtype(pixels.dtype, np.number) or not pixels.size:
        raise NormscopeError(
            "The image is a path, a PIL image or an array (height, width, channels), "
            f"not {type(image).__name__} of shape {pixels.shape}."
        )
    if pixels.ndim == 3 and pixels.shape[-1] not in (3, 4):
        raise NormscopeError(f"The image has the shape {pixels.shape}; expected (height, width, 3), channels last.")
    return pixels if pixels.dtype == np.uint8 else _stretched(pixels)


def _grey(pixels: NDArray[Any]) -> NDArray[Any]:
    """The brightness of a picture: its own colours would mix with those of the map."""
    if pixels.ndim == 2:
        return pixels
    grey: NDArray[Any] = pixels[..., :3] @ np.array([0.299, 0.587, 0.114])
    return grey


def _stretched(pixels: NDArray[Any]) -> NDArray[Any]:
    """Numbers of any range as shades from 0 to 1; those within 0 to 1 or 0 to 255 as they are."""
    values = np.nan_to_num(pixels.astype(np.float64))
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 255:
        return values / (1.0 if high <= 1 else 255.0)
    return (values - low) / (high - low)
