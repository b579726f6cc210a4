"""Made-up inputs: random tokens, pictures and sounds of noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from normscope.analyzer import Analyzer


def made_up(lens: Analyzer, lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """Encodings of these lengths, the same every time; pictures and sounds are as large as the model takes them."""
    generator = torch.Generator().manual_seed(0)
    config: Any = lens.base.config
    if lens.family.input == "image":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        pictures = torch.randn(len(lengths), config.num_channels, height, width, generator=generator)
        return [{"pixel_values": picture} for picture in pictures]
    targets = [_ids(lens, n, generator) for n in reversed(lengths)]
    if lens.family.input == "audio":
        sounds = torch.randn(len(lengths), config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return [{"input_features": s, "decoder_input_ids": t} for s, t in zip(sounds, targets, strict=True)]
    made = [{"input_ids": _ids(lens, n, generator)} for n in lengths]
    if lens.two_sided:
        made = [one | {"decoder_input_ids": target} for one, target in zip(made, targets, strict=True)]
    return made


def _ids(lens: Analyzer, count: int, generator: torch.Generator) -> Tensor:
    low = min(5, lens.limits.vocabulary - 1)
    size = (max(1, min(count, lens.limits.positions or count)),)
    ids = torch.randint(low, lens.limits.vocabulary, size, generator=generator)
    end: Any = getattr(lens.base.config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < lens.limits.vocabulary and lens.two_sided:
        ids[-1] = end  # some heads read the state there
    return ids
