"""Made-up inputs: random tokens, pictures and sounds of noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normscope.models.loaded import LoadedModel


def random_inputs(loaded: LoadedModel, lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """Encodings of these lengths, the same every time; pictures and sounds are as large as the model takes them."""
    generator = torch.Generator().manual_seed(0)
    config: Any = loaded.base.config
    if loaded.family.input == "image":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        pictures = torch.randn(len(lengths), config.num_channels, height, width, generator=generator)
        return [{"pixel_values": picture} for picture in pictures]
    targets = [_random_token_ids(loaded, n, generator) for n in reversed(lengths)]
    if loaded.family.input == "audio":
        sounds = torch.randn(len(lengths), config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return [{"input_features": s, "decoder_input_ids": t} for s, t in zip(sounds, targets, strict=True)]
    made = [{"input_ids": _random_token_ids(loaded, n, generator)} for n in lengths]
    if loaded.two_sided:
        made = [one | {"decoder_input_ids": target} for one, target in zip(made, targets, strict=True)]
    return made


def _random_token_ids(loaded: LoadedModel, count: int, generator: torch.Generator) -> Tensor:
    low = min(5, loaded.limits.vocabulary - 1)
    size = (max(1, min(count, loaded.limits.positions or count)),)
    ids = torch.randint(low, loaded.limits.vocabulary, size, generator=generator)
    end: Any = getattr(loaded.base.config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < loaded.limits.vocabulary and loaded.two_sided:
        ids[-1] = end  # some heads read the state there
    return ids
