"""Random inputs: tokens, images and sounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.models.base import media_key
from normscope.models.loaded import LoadedModel

FRAMES = 9  # tokens of a random sound, at least


def random_inputs(loaded: LoadedModel, lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """Random encodings of these lengths, with a fixed seed; images and sounds have the model's input size."""
    generator = torch.Generator().manual_seed(0)
    if loaded.family.input == "text":
        sources = [{"input_ids": _random_sample_ids(loaded, n, generator)} for n in lengths]
    else:
        sources = [random_media(loaded.base, generator) for _ in lengths]
    if loaded.two_sided:
        targets = [_random_sample_ids(loaded, n, generator) for n in reversed(lengths)]
        return [source | {"decoder_input_ids": target} for source, target in zip(sources, targets, strict=True)]
    return sources


def random_media(base: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """A random image, spectrogram or waveform (without the axis of the batch) for a model that reads one."""
    config, key = base.config, media_key(base)
    bins, frames = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    size: tuple[int, ...]
    if key == "pixel_values" and getattr(config, "image_size", None) is not None:
        side = config.image_size
        size = (getattr(config, "num_channels", 3), *((side, side) if isinstance(side, int) else side))
    elif key == "input_features" and isinstance(bins, int) and isinstance(frames, int):
        size = (bins, 2 * frames)
    elif key == "input_values" and hasattr(base, "_get_feat_extract_output_lengths"):
        size = (_sound_length(base),)
    elif key == "input_values" and isinstance(bins, int) and isinstance(getattr(config, "max_length", None), int):
        size = (config.max_length, bins)
    else:
        raise NormscopeError(f"{type(base).__name__} reads {key}, of a form that normscope does not know.")
    return {key: torch.randn(size, generator=generator)}


def _sound_length(base: Any) -> int:
    """A number of samples of which the convolutions of a model make at least FRAMES tokens."""
    length = 1
    while int(base._get_feat_extract_output_lengths(torch.tensor(length))) < FRAMES:
        length *= 2
    return length


def _random_sample_ids(loaded: LoadedModel, count: int, generator: torch.Generator) -> Tensor:
    low = min(5, loaded.limits.vocabulary - 1)
    size = (max(1, min(count, loaded.limits.positions or count)),)
    ids = torch.randint(low, loaded.limits.vocabulary, size, generator=generator)
    end: Any = getattr(loaded.base.config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < loaded.limits.vocabulary and loaded.two_sided:
        ids[-1] = end  # some heads read the state at this token
    return ids
