"""Image and audio inputs: images, and encodings with pixel_values or input_features."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normscope.errors import NormscopeError
from normscope.inputs.item import IGNORED_KEYS, Item, Tokens
from normscope.inputs.sound import encode_sound, holds_sound
from normscope.models.base import media_key
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_modules

SECONDS_PER_FRAME = 0.02  # of Whisper's encoder
SAMPLING_RATE = 16000  # of models that read waveforms
IMAGE_TOKENS = (  # parameters of the embeddings -> labels of the tokens before the patches
    ("cls_token", "[CLS]"),
    ("class_embedding", "[CLS]"),
    ("distillation_token", "[DIST]"),
    ("register_tokens", "[REG]"),
)


def media_image_items(given: Any, loaded: LoadedModel) -> list[Item]:
    """Convert a path, PIL image, array (height, width, channels) or encoding with pixel_values to items."""
    config: Any = loaded.base.config
    processor = loaded.tokenizer
    if isinstance(given, Mapping):
        _refuse_unknown_media_keys(given, "pixel_values")
        pixels = _read_media_features(given, "pixel_values", 3)
    else:
        if processor is None:
            raise NormscopeError(
                "This Analyzer has no image processor. Pass an encoding, which is a dict with pixel_values, or create "
                "the Analyzer with AutoImageProcessor.from_pretrained(...) to analyse images."
            )
        image = as_media_image(given)
        try:
            pixels = processor(images=image, return_tensors="pt")["pixel_values"]
        except (ValueError, TypeError) as error:
            raise NormscopeError(f"The image processor rejected the image: {error}") from error
    if pixels.dim() != 4:
        raise NormscopeError(
            "The image processor cuts the image into tiles, but the model reads whole images. Use an image processor "
            "without tiles, or pass pixel_values."
        )
    channels, height, width = pixels.shape[1:]
    expected = getattr(config, "num_channels", channels)
    if channels != expected:
        raise NormscopeError(f"The image has {channels} channels, but the model expects {expected}.")
    patch = getattr(config, "patch_size", None)
    patch = patch[0] if isinstance(patch, tuple | list) else patch
    if not isinstance(patch, int):
        raise NormscopeError(f"{type(config).__name__} has no patch_size, so the tokens of an image are unknown.")
    grid = (height // patch, width // patch)
    if not all(grid):
        raise NormscopeError(
            f"The image has {width} x {height} pixels, which is smaller than a patch ({patch} x {patch}). Use a larger "
            "one."
        )
    patches = [f"{row + 1},{column + 1}" for row in range(grid[0]) for column in range(grid[1])]
    names = (*_media_image_special_tokens(loaded.base), *patches)
    if loaded.family.derived:  # other tokens may stand before the patches
        extra = count_first_layer_tokens(loaded, {"pixel_values": pixels[:1]}) - len(patches)
        if extra < 0:
            raise NormscopeError(
                f"{type(loaded.base).__name__} makes {extra + len(patches)} tokens of {len(patches)} patches; only "
                "models with at least one token for each patch are supported."
            )
        names = names if len(names) == extra + len(patches) else (*(f"[{n + 1}]" for n in range(extra)), *patches)
    tokens = Tokens(names, torch.ones(len(names), dtype=torch.bool))
    return [Item({"pixel_values": one}, {"encoder": tokens}, grid) for one in pixels]


def _media_image_special_tokens(base: PreTrainedModel) -> tuple[str, ...]:
    """Names of the tokens before the patches: [CLS], DeiT's distillation token, registers."""
    holder = getattr(base, "vision_model", base)  # CLIP before transformers 5.6
    embeddings = getattr(holder, "embeddings", None)
    found: list[str] = []
    for name, label in IMAGE_TOKENS:
        tokens = getattr(embeddings, name, None)
        count = (tokens.shape[-2] if tokens.dim() > 1 else 1) if isinstance(tokens, Tensor) else 0
        found += [label] if count == 1 else [f"{label[:-1]}{n + 1}]" for n in range(count)]
    return tuple(found)


class _FirstLayerReachedError(Exception):
    """Stops a pass before the first layer."""


def count_first_layer_tokens(loaded: LoadedModel, inputs: Mapping[str, Tensor]) -> int:
    """The number of tokens that the first layer of a model reads, for one image or sound."""
    found: list[int] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found.append((args[0] if args else kwargs["hidden_states"]).shape[-2])
        raise _FirstLayerReachedError

    base = loaded.base
    handle = layer_modules(base, loaded.stacks[0])[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            base(**{key: one.to(base.device, base.dtype) for key, one in inputs.items()})
    except _FirstLayerReachedError:
        pass
    except Exception as error:  # models may raise anything
        raise NormscopeError(f"The model's own forward pass failed: {error}.") from error
    finally:
        handle.remove()
    return found[0]


def media_wave_items(given: Any, loaded: LoadedModel) -> list[Item]:
    """Convert a sound, or an encoding with the input of a speech encoder (a waveform, or frames x mel bins), to
    items."""
    key = media_key(loaded.base)
    if holds_sound(given):
        given = encode_sound(given, loaded, key)
    _refuse_unknown_media_keys(given, key, "attention_mask")
    mask = given.get("attention_mask")
    if mask is not None and not bool(torch.as_tensor(mask).bool().all()):
        raise NormscopeError("The sound is padded. Pass each sound alone, without padding.")
    wave = hasattr(loaded.base, "_get_feat_extract_output_lengths")  # convolutions read samples, not mel bins
    sounds = _read_media_features(given, key, 1 if wave else 2)
    count = count_first_layer_tokens(loaded, {key: sounds[:1]})
    seconds = sounds.shape[1] / SAMPLING_RATE / count if wave else 0.0
    names = tuple(f"{n * seconds:.2f}s" if wave else str(n + 1) for n in range(count))
    tokens = Tokens(names, torch.ones(count, dtype=torch.bool))
    return [Item({key: one}, {"encoder": tokens}) for one in sounds]


def media_sound_items(given: Any, loaded: LoadedModel) -> list[Item]:
    """Convert a sound, or an encoding with input_features (mel bins x frames), to encoder items."""
    config: Any = loaded.base.config
    if holds_sound(given):
        given = encode_sound(given, loaded, "input_features")
    _refuse_unknown_media_keys(given, "input_features", "attention_mask")  # the mask is used in training only
    features = _read_media_features(given, "input_features", 2)
    bins, frames = features.shape[1:]
    if bins != config.num_mel_bins or frames != 2 * config.max_source_positions:
        raise NormscopeError(
            f"input_features has shape {bins} x {frames}, but the model expects {config.num_mel_bins} mel bins x "
            f"{2 * config.max_source_positions} frames. Use the model's feature extractor."
        )
    names = tuple(f"{n * SECONDS_PER_FRAME:.2f}s" for n in range(frames // 2))
    tokens = Tokens(names, torch.ones(len(names), dtype=torch.bool))
    return [Item({"input_features": one}, {"encoder": tokens}) for one in features]


def _refuse_unknown_media_keys(given: Mapping[str, Any], *known: str) -> None:
    unknown = {key for key, value in given.items() if value is not None} - set(known) - IGNORED_KEYS
    if known[0] in given and unknown:
        raise NormscopeError(
            f"Unknown keys in the encoding: {', '.join(sorted(map(str, unknown)))}. Known: {', '.join(known)}."
        )


def _read_media_features(given: Mapping[str, Any], key: str, dimensions: int) -> Tensor:
    if given.get(key) is None:
        raise NormscopeError(f"The encoding has no {key}. Its keys are: {', '.join(map(str, given)) or 'none'}.")
    try:
        values = torch.as_tensor(given[key])
    except (TypeError, ValueError, RuntimeError) as error:
        raise NormscopeError(f"{key} must be an array of numbers: {error}.") from error
    if not values.is_floating_point():
        raise NormscopeError(
            f"{key} must contain floating-point numbers, not {str(values.dtype).removeprefix('torch.')}."
        )
    values = values[None] if values.dim() == dimensions else values
    if values.dim() != dimensions + 1:
        raise NormscopeError(f"{key} has {values.dim()} dimensions; expected {dimensions} or {dimensions + 1}.")
    if not bool(torch.isfinite(values).all()):
        raise NormscopeError(f"{key} contains NaN or infinite values.")
    return values


def open_media_image(path: str | os.PathLike[str]) -> Any:
    """Read an image file as RGB."""
    try:
        from PIL import Image
    except ImportError as error:
        raise NormscopeError("Reading images needs Pillow: pip install 'normscope[vision]'.") from error
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # damaged files may raise anything
        raise NormscopeError(f"{path} cannot be read as an image: {str(error).rstrip('.')}.") from error


def as_media_image(given: Any) -> Any:
    """Convert a path, PIL image or array to an image that a processor accepts."""
    if isinstance(given, str | os.PathLike):
        if not Path(given).is_file():
            raise NormscopeError(
                f"This is a vision model: it reads images, and there is no file {str(given)[:80]!r}. "
                "Pass the path of an image, a PIL image or an array (height, width, channels)."
            )
        return open_media_image(given)
    if hasattr(given, "convert"):
        return given.convert("RGB")
    if hasattr(given, "shape") and len(given.shape) == 3:
        return given
    raise NormscopeError(
        f"This is a vision model: pass a path, a PIL image, an array (height, width, channels) or a dict with "
        f"pixel_values, not {type(given).__name__}."
    )
