"""Where the tokens of a picture lie: their grid, from the shapes that a processor returns and the model's config.

A picture becomes tokens in one of a few ways: one grid of patches, perhaps merged or pooled; a grid with a token at the
end of each line; tiles, each with a grid, beside an overview of the whole; or a detailed grid behind an overview.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

OVERVIEW = "overview"
TILE = re.compile(r"<row_(\d+)_col_(\d+)>")  # the token before a tile


@dataclass(frozen=True)
class PictureLayout:
    """How the tokens of one picture lie: their number, and grids (down, across) of indices among them."""

    count: int
    grids: tuple[tuple[str, Tensor], ...]  # name and indices, the finest first


@dataclass(frozen=True)
class PictureEncoding:
    """What is known of the pictures of one input."""

    config: Any  # of the model
    media: Mapping[str, Tensor]
    runs: tuple[int, ...]  # the numbers of adjacent picture tokens in the text
    before: tuple[str, ...]  # the token before each run
    sizes: tuple[tuple[int, int], ...] | None  # (height, width) of the pictures as given; None if unknown

    @property
    def patch(self) -> int:
        """The side of a patch in pixels; 0 if unknown."""
        found = getattr(self.config.vision_config, "patch_size", None)
        found = found[0] if isinstance(found, tuple | list) else found
        return found if isinstance(found, int) else 0


def picture_layouts(given: PictureEncoding) -> list[PictureLayout]:
    """The layout of every picture; empty if the form of the encoding is not known, or does not fit its tokens."""
    if not hasattr(given.config, "vision_config"):
        return []
    pixels = given.media.get("pixel_values")
    if "image_grid_thw" in given.media:
        found = _merged_grids(given)
    elif "image_sizes" in given.media and hasattr(given.config, "image_grid_pinpoints"):
        found = _overviews_with_details(given)
    elif "image_sizes" in given.media and given.patch:
        found = _sized_grids(given)
    elif pixels is not None and pixels.dim() == 5:
        found = _named_tiles(given)
    elif pixels is not None and pixels.dim() == 4 and given.patch:
        found = _slices(given, pixels)
    else:
        found = []
    return found if sum(one.count for one in found) == sum(given.runs) else []


def _grid(down: int, across: int, start: int = 0) -> Tensor:
    return start + torch.arange(down * across).view(down, across)


def _plain(down: int, across: int) -> PictureLayout:
    return PictureLayout(down * across, (("", _grid(down, across)),))


def _merged_grids(given: PictureEncoding) -> list[PictureLayout]:
    """Grids of patches (time, height, width), of which squares of `spatial_merge_size` become one token."""
    merge = getattr(given.config.vision_config, "spatial_merge_size", None)
    sizes = given.media["image_grid_thw"].tolist()
    if not isinstance(merge, int) or any(time != 1 for time, _, _ in sizes):
        return []
    return [_plain(down // merge, across // merge) for _, down, across in sizes]


def _sized_grids(given: PictureEncoding) -> list[PictureLayout]:
    """Pictures of the sizes that the processor gave them, with their patches merged."""
    side = given.patch * int(getattr(given.config, "spatial_merge_size", 1))
    return [_plain(height // side, width // side) for height, width in given.media["image_sizes"].tolist()]


def _overviews_with_details(given: PictureEncoding) -> list[PictureLayout]:
    """An overview of s x s tokens, then the details without the padding of their canvas, a token after each line."""
    image = given.config.vision_config.image_size
    side = image // given.patch
    sizes = given.media["image_sizes"].tolist()
    if given.media["pixel_values"].shape[1] == 1 or sum(given.runs) == len(sizes) * (side * side + 1):
        return [PictureLayout(side * side + 1, (("", _grid(side, side)),)) for _ in sizes]
    found = []
    for height, width in sizes:
        canvas = _best_canvas(height, width, given.config.image_grid_pinpoints)
        down, across = (edge // image * side for edge in canvas)
        if width / height > across / down:
            down -= (down - int(round(height * (across / width), 7))) // 2 * 2
        else:
            across -= (across - int(round(width * (down / height), 7))) // 2 * 2
        down, across = _shrunken(down, across, side, str(getattr(given.config, "vision_aspect_ratio", "")))
        lines = _grid(down, across + 1, side * side)
        overview = (OVERVIEW, _grid(side, side))
        found.append(PictureLayout(side * side + lines.numel(), (("", lines[:, :-1]), overview)))
    return found


def _best_canvas(height: int, width: int, canvases: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The canvas on which the picture keeps the most pixels; among those, the one that wastes the fewest."""

    def kept_and_wasted(canvas: Sequence[int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - canvas[0] * canvas[1]

    down, across = max(canvases, key=kept_and_wasted)
    return down, across


def _shrunken(down: int, across: int, side: int, ratio: str) -> tuple[int, int]:
    """The grid of details after it was shrunk to at most the number of tiles in the name "anyres_max_9"."""
    most = re.fullmatch(r"anyres_max_(\d+)", ratio)
    if most is None:
        return down, across
    factor = math.sqrt(down * across / (int(most[1]) * side * side))
    return (int(down // factor), int(across // factor)) if factor > 1.1 else (down, across)


def _named_tiles(given: PictureEncoding) -> list[PictureLayout]:
    """Tiles after tokens such as <row_1_col_2>, and an overview after the last one; a picture without tiles is one
    grid."""
    found: list[PictureLayout] = []
    tiles: list[tuple[int, int]] = []
    for count, name in zip(given.runs, given.before, strict=True):
        side = math.isqrt(count)
        if side * side != count or count != given.runs[0]:
            return []
        if tile := TILE.fullmatch(name):
            tiles.append((int(tile[1]) - 1, int(tile[2]) - 1))
            continue
        found.append(_join_tiles(tiles, side, side))
        tiles = []
    return [] if tiles else found


def _join_tiles(tiles: Sequence[tuple[int, int]], down: int, across: int) -> PictureLayout:
    """Tiles, given by row and column in the order of their tokens, as one grid, and an overview after them."""
    if not tiles:
        return _plain(down, across)
    rows, columns = (max(places) + 1 for places in zip(*tiles, strict=True))
    grid = torch.full((rows * down, columns * across), -1)
    for number, (row, column) in enumerate(tiles):
        area = slice(row * down, (row + 1) * down), slice(column * across, (column + 1) * across)
        grid[area] = _grid(down, across, number * down * across)
    start = len(tiles) * down * across
    return PictureLayout(start + down * across, (("", grid), (OVERVIEW, _grid(down, across, start))))


def _slices(given: PictureEncoding, pixels: Tensor) -> list[PictureLayout]:
    """Slices of one size (slices, channels, height, width): a picture each, or the tiles of pictures."""
    slices, count = len(pixels), sum(given.runs)
    down, across = (edge // given.patch for edge in pixels.shape[-2:])
    pooled = math.isqrt(down * across * slices // count) if count and count % slices == 0 else 0
    if not pooled or down % pooled or across % pooled or slices * down * across != count * pooled**2:
        return []
    down, across = down // pooled, across // pooled
    pictures = slices if given.sizes is None else len(given.sizes)
    if slices == pictures and not (given.sizes is None and any(run != down * across for run in given.runs)):
        return [_plain(down, across)] * slices
    return _tiled_slices(given, down, across)


def _tiled_slices(given: PictureEncoding, down: int, across: int) -> list[PictureLayout]:
    """A run of tokens is a picture: tiles, line by line, then an overview. Their number is known, and the processor
    chose the rows and columns that come closest to the shape of the picture."""
    if given.sizes is None or len(given.runs) != len(given.sizes):
        return []
    found = []
    for run, (height, width) in zip(given.runs, given.sizes, strict=True):
        tiles = run // (down * across) - 1
        pairs = [(rows, tiles // rows) for rows in range(1, tiles + 1) if tiles % rows == 0]
        rows, columns = min(pairs, key=lambda pair: abs(width / height - pair[1] / pair[0]), default=(0, 0))
        places = [(row, column) for row in range(rows) for column in range(columns)]
        found.append(_join_tiles(places, down, across))
    return found


def adjacent_runs(marked: Tensor) -> list[tuple[int, int]]:
    """The begin and end of each run of True."""
    found, at = [], 0
    for value, run in groupby(marked.tolist()):
        length = len(list(run))
        if value:
            found.append((at, at + length))
        at += length
    return found
