"""Random inputs: tokens, images and audio features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normscope.models.loaded import LoadedModel


def random_inputs(loaded: LoadedModel, lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """Random encodings of these lengths, with a fixed seed; images and audio features have the model's input size."""
    generator = torch.Generator().manual_seed(0)
    config: Any = loaded.base.config
    if loaded.family.input == "image":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        images = torch.randn(len(lengths), config.num_channels, height, width, generator=generator)
        return [{"pixel_values": image} for image in images]
    targets = [_random_sample_ids(loaded, n, generator) for n in reversed(lengths)]
    if loaded.family.input == "audio":
        features = torch.randn(len(lengths), config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return [{"input_features": f, "decoder_input_ids": t} for f, t in zip(features, targets, strict=True)]
    sources = [{"input_ids": _random_sample_ids(loaded, n, generator)} for n in lengths]
    if loaded.two_sided:
        return [source | {"decoder_input_ids": target} for source, target in zip(sources, targets, strict=True)]
    return sources


def _random_sample_ids(loaded: LoadedModel, count: int, generator: torch.Generator) -> Tensor:
    low = min(5, loaded.limits.vocabulary - 1)
    size = (max(1, min(count, loaded.limits.positions or count)),)
    ids = torch.randint(low, loaded.limits.vocabulary, size, generator=generator)
    end: Any = getattr(loaded.base.config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < loaded.limits.vocabulary and loaded.two_sided:
        ids[-1] = end  # some heads read the state at this token
    return ids
