"""Pictures and patches: the input of a vision model as pixels, and its outputs on the grid of patches."""

from __future__ import annotations

import base64
import io
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscope.analysis import Analysis
from normscope.errors import NormscopeError
from normscope.inputs.media import open_media_image
from normscope.labels import Label
from normscope.view.figure.style import PLAIN, Look
from normscope.view.scales import Scale, Values, colour_scale

LONGEST = 512  # pixels of the longer side of an embedded picture


def image_patch_grid(analysis: Analysis) -> tuple[int, int] | None:
    """Rows and columns of the patch grid; None if the input was not a picture."""
    grid = analysis.info.get("grid")
    if grid is None:
        return None
    down, across = grid
    return (down, across) if down * across <= len(analysis.columns) else None


def find_image_output_row(analysis: Analysis, token: str | int | None = None) -> int:
    """The row index of an output given by label or index (default: [CLS], or the first row without one)."""
    tokens = list(analysis.tokens)
    if token is None:
        return tokens.index("[CLS]") if "[CLS]" in tokens else 0
    if isinstance(token, int) and not isinstance(token, bool) and -len(tokens) <= token < len(tokens):
        return token % len(tokens)
    if isinstance(token, str) and token.replace(" ", "") in tokens:
        return tokens.index(token.replace(" ", ""))
    raise NormscopeError(
        f"There is no output {token!r}. Give [CLS], a patch as 'row,column' counted from 1, such as {tokens[-1]!r}, or "
        f"an index from 0 to {len(tokens) - 1}."
    )


def image_patch_values(
    analysis: Analysis, scope: str, layer: int, row: int, look: Look = PLAIN
) -> tuple[Values, dict[str, float]]:
    """The contributions of the patches to an output (down, across), and those of all other tokens by label."""
    grid = image_patch_grid(analysis)
    if grid is None:
        raise NormscopeError("This analysis has no patch grid: its input was not a picture.")
    values = look.values(analysis, scope, layer)[row]
    special = len(values) - grid[0] * grid[1]
    others = {label.token: float(value) for label, value in zip(analysis.columns[:special], values, strict=False)}
    return values[special:].reshape(grid), others


def image_patch_scale(patches: Values, own: tuple[int, int] | None) -> Scale:
    """The colour scale of a patch map, whose only own cell is the output's own patch."""
    cells = np.zeros(patches.shape, dtype=bool)
    if own is not None:
        cells[own] = True
    return colour_scale([patches], cells)


def own_image_patch(analysis: Analysis, label: Label) -> tuple[int, int] | None:
    """The grid position of an output; None if it is not a patch."""
    down, across = image_patch_grid(analysis) or (0, 0)
    place = analysis.columns.index(label) - (len(analysis.columns) - down * across)
    return None if place < 0 else divmod(place, across)


def view_image_pixels(image: Any) -> NDArray[Any]:
    """The pixels (height, width[, channels]) of a path, a PIL image or an array."""
    if isinstance(image, str | os.PathLike):
        return np.asarray(open_media_image(image))
    if hasattr(image, "convert"):
        return np.asarray(image.convert("RGB"))
    try:
        pixels = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    except (TypeError, ValueError, AttributeError) as error:
        raise NormscopeError(f"The image is not an array of numbers: {error}.") from error
    if pixels.ndim not in (2, 3) or not np.issubdtype(pixels.dtype, np.number) or not pixels.size:
        raise NormscopeError(
            "The image must be a path, a PIL image or an array (height, width, channels), "
            f"not {type(image).__name__} of shape {pixels.shape}."
        )
    if pixels.ndim == 3 and pixels.shape[-1] not in (3, 4):
        raise NormscopeError(f"The image has the shape {pixels.shape}; expected (height, width, 3), channels last.")
    return pixels if pixels.dtype == np.uint8 else _rescale_image_pixels(pixels)


def image_to_greyscale(pixels: NDArray[Any]) -> NDArray[Any]:
    """The brightness of a picture, whose colours would mix with those of the map."""
    if pixels.ndim == 2:
        return pixels
    grey: NDArray[Any] = pixels[..., :3] @ np.array([0.299, 0.587, 0.114])
    return grey


def _rescale_image_pixels(pixels: NDArray[Any]) -> NDArray[Any]:
    """Values scaled to 0..1. Ranges within 0..1 are kept, those within 0..255 divided by 255."""
    values = np.nan_to_num(pixels.astype(np.float64))
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 255:
        return values / (1.0 if high <= 1 else 255.0)
    return (values - low) / (high - low)


def image_data_url(image: Any) -> str:
    """A picture (a path, a PIL image or an array) as a `data:` URL of a small PNG."""
    try:
        from PIL import Image
    except ImportError as error:
        raise NormscopeError("Showing pictures needs Pillow: pip install 'normscope[vision]'.") from error
    pixels = view_image_pixels(image)
    if pixels.dtype.kind == "f":  # values from 0 to 1
        pixels = (255 * pixels).round().astype("uint8")
    picture = Image.fromarray(pixels).convert("RGB")
    picture.thumbnail((LONGEST, LONGEST))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
