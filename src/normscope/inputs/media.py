"""Images and sounds as model inputs: what a processor made, or what it will make of a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from normscope.errors import NormscopeError
from normscope.inputs.item import IGNORED, Item, Tokens

SECONDS_PER_FRAME = 0.02  # of Whisper's encoder


def image_item(given: Any, processor: Any, base: PreTrainedModel) -> list[Item]:
    """The items of a path, a PIL image, an array (height, width, channels) or an encoding with pixel_values."""
    config: Any = base.config
    if isinstance(given, Mapping):
        _refuse_unknown_keys(given, "pixel_values")
        pixels = _read_features(given, "pixel_values", 3)
    else:
        if processor is None:
            raise NormscopeError(
                "This Analyzer has no image processor, so it takes encodings: a dict with pixel_values. "
                "Give AutoImageProcessor.from_pretrained(...) to analyse pictures."
            )
        picture = _as_image(given)
        try:
            pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
        except (ValueError, TypeError) as error:
            raise NormscopeError(f"The image processor refused the picture: {error}") from error
    channels, height, width = pixels.shape[1:]
    if channels != config.num_channels:
        raise NormscopeError(f"The picture has {channels} channels, but the model takes {config.num_channels}.")
    patch = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
    grid = (height // patch, width // patch)
    if not all(grid):
        raise NormscopeError(f"The picture is {width} x {height} pixels, smaller than a patch of {patch}.")
    patches = (f"{row + 1},{column + 1}" for row in range(grid[0]) for column in range(grid[1]))
    names = (*_image_special_tokens(base), *patches)
    tokens = Tokens(names, torch.ones(len(names), dtype=torch.bool))
    return [Item({"pixel_values": one}, {"encoder": tokens}, grid) for one in pixels]


def _image_special_tokens(base: PreTrainedModel) -> tuple[str, ...]:
    """The tokens in front of the patches, as the embeddings hold them: [CLS], DeiT's distillation token, registers."""
    embeddings = getattr(base, "embeddings", None)
    found: list[str] = []
    for name, label in (("cls_token", "[CLS]"), ("distillation_token", "[DIST]"), ("register_tokens", "[REG]")):
        tokens = getattr(embeddings, name, None)
        count = tokens.shape[-2] if isinstance(tokens, Tensor) else 0
        found += [label] if count == 1 else [f"{label[:-1]}{n + 1}]" for n in range(count)]
    return tuple(found)


def sound_items(given: Mapping[str, Any], config: Any) -> list[Item]:
    """The encoder's side of encodings with input_features (mel bins x frames)."""
    _refuse_unknown_keys(given, "input_features", "attention_mask")  # the mask is for training only
    features = _read_features(given, "input_features", 2)
    bins, frames = features.shape[1:]
    if bins != config.num_mel_bins or frames != 2 * config.max_source_positions:
        raise NormscopeError(
            f"input_features are {bins} x {frames}, but the model takes {config.num_mel_bins} mel bins x "
            f"{2 * config.max_source_positions} frames. Use the model's own feature extractor."
        )
    names = tuple(f"{n * SECONDS_PER_FRAME:.2f}s" for n in range(frames // 2))
    tokens = Tokens(names, torch.ones(len(names), dtype=torch.bool))
    return [Item({"input_features": one}, {"encoder": tokens}) for one in features]


def _refuse_unknown_keys(given: Mapping[str, Any], *known: str) -> None:
    unknown = {key for key, value in given.items() if value is not None} - set(known) - IGNORED
    if known[0] in given and unknown:
        raise NormscopeError(
            f"Unknown keys in the encoding: {', '.join(sorted(map(str, unknown)))}. Known: {', '.join(known)}."
        )


def _read_features(given: Mapping[str, Any], key: str, dimensions: int) -> Tensor:
    if given.get(key) is None:
        raise NormscopeError(f"The encoding has no {key}; it has {', '.join(map(str, given)) or 'nothing'}.")
    try:
        values = torch.as_tensor(given[key])
    except (TypeError, ValueError, RuntimeError) as error:
        raise NormscopeError(f"{key} is no array of numbers: {error}.") from error
    if not values.is_floating_point():
        raise NormscopeError(f"{key} must hold floating-point numbers, not {str(values.dtype).removeprefix('torch.')}.")
    values = values[None] if values.dim() == dimensions else values
    if values.dim() != dimensions + 1:
        raise NormscopeError(f"{key} has {values.dim()} dimensions; expected {dimensions} or {dimensions + 1}.")
    if not bool(torch.isfinite(values).all()):
        raise NormscopeError(f"{key} holds NaN or infinite values.")
    return values


def open_image(path: str | os.PathLike[str]) -> Any:
    """The picture in a file, in colour."""
    try:
        from PIL import Image
    except ImportError as error:
        raise NormscopeError("Reading pictures needs Pillow: pip install 'normscope[vision]'.") from error
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except Exception as error:  # readers of damaged files raise what they like
        raise NormscopeError(f"{path} is no picture that can be read: {str(error).rstrip('.')}.") from error


def _as_image(given: Any) -> Any:
    """A picture that a processor takes."""
    if isinstance(given, str | os.PathLike):
        if not Path(given).is_file():
            raise NormscopeError(
                f"This is a vision model: it takes a picture, but there is no file {str(given)[:80]!r}. "
                "Give a path, a PIL image or an array (height, width, channels)."
            )
        return open_image(given)
    if hasattr(given, "convert"):
        return given.convert("RGB")
    if hasattr(given, "shape") and len(given.shape) == 3:
        return given
    raise NormscopeError(
        f"This is a vision model: it takes a path, a PIL image, an array (height, width, channels) or a dict with "
        f"pixel_values, not {type(given).__name__}."
    )
