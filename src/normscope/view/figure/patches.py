"""One output of a vision model on the grid of patches, over the picture if it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from normscope.analysis import Analysis
from normscope.figure_style import figure_style
from normscope.labels import visible_label_text
from normscope.view.figure.maps import figure_map_axes_class, figure_of
from normscope.view.figure.style import (
    PLAIN,
    Look,
    annotate_cells,
    new_figure,
    style_colorbar_ends,
    tidy_colorbar,
    write_caption,
)
from normscope.view.images import (
    find_image_output_row,
    image_patch_scale,
    image_patch_values,
    image_to_greyscale,
    own_image_patch,
    view_image_pixels,
)
from normscope.view.scales import Scale, Values
from normscope.view.tokens import model_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar

PATCH_MAP_SIDE = 4.0  # inches; longer side
VEIL = 0.6  # opacity of the map over a picture


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
    """Draw the row of one output on the patch grid, by default [CLS] in the last scope and layer.

    `image` is stretched over the grid; if the model's processor crops pictures, pass the cropped one.
    """
    scope = analysis.scopes[-1] if scope is None else analysis.resolve(scope)
    layer = analysis.layers[-1] if layer is None else analysis.layers[analysis.layer_position(layer)]
    row = find_image_output_row(analysis, token)
    patches, others = image_patch_values(analysis, scope, layer, row, look)
    own = own_image_patch(analysis, analysis.rows[row])
    scale = image_patch_scale(patches, own)
    pixels = None if image is None else view_image_pixels(image)
    with figure_style():
        made, bar = _draw_patches(patches, scale, own, pixels, ax, look)
        name = visible_label_text(analysis.rows[row].token)
        made.set_title(f"{scope}, layer {layer + 1}, output {name}", pad=5)
        tidy_colorbar(bar, scale, look.quantity(scope))
        if ax is not None:
            return made
        rest = ", ".join(f"{visible_label_text(label)} {value:.3g}" for label, value in others.items())
        beyond = f" Its own patch (framed): {scale.top:.3g}, beyond the scale." if scale.clipped else ""
        note = f" Not on the grid: {rest}." if rest else ""
        whole = figure_of(made)
        write_caption(whole, f"{model_label(analysis)}. Contribution of each patch to the output {name}.{note}{beyond}")
        whole.draw_without_rendering()
        return made


def _draw_patches(
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
    # The picture keeps its aspect ratio, so patches have the shape that the processor's resizing gave them.
    shape = 1.0 if pixels is None else (pixels.shape[0] / down) / (pixels.shape[1] / across)
    width, height = across, down * shape
    size = PATCH_MAP_SIDE / max(width, height)
    axes = ax
    if axes is None:
        axes = new_figure(size * width + 1.2, size * height + 0.9).add_subplot(axes_class=figure_map_axes_class())
    if pixels is not None:
        axes.imshow(image_to_greyscale(pixels), extent=edges, aspect="auto", interpolation="antialiased", cmap="gray")
    colours = look.colours(scale)
    options: dict[str, Any] = {"cmap": colours, "vmin": 0.0, "vmax": scale.end}
    drawn = axes.imshow(patches, extent=edges, aspect="auto", alpha=None if pixels is None else VEIL, **options)
    if own is not None:
        axes.add_patch(Rectangle((own[1] - 0.5, own[0] - 0.5), 1, 1, fill=False, edgecolor="white", linewidth=1.2))
    if look.annotate:
        annotate_cells(axes, patches, scale, look, min(7.5, size * 72 * 0.3))
    axes.set_aspect(shape)
    axes.set_axis_off()
    key = ScalarMappable(drawn.norm, colours)  # opaque, unlike the map over a picture
    return axes, axes.figure.colorbar(
        key, ax=axes, fraction=0.05, pad=0.03, aspect=28, extend=style_colorbar_ends(scale)
    )
