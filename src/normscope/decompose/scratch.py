"""Working memory that is used again layer after layer.

Fresh large tensors cost a page fault for every 4 kB, which is more than many of the passes over them.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Scratch:
    """Named buffers. A tensor taken is overwritten by the next taker of its name."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor of this shape."""
        size = prod(shape)
        key = (name, dtype, device)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return self._buffers[key][:size].view(shape)

    def like(self, name: str, shape: tuple[int, ...], tensor: Tensor) -> Tensor:
        """The same, of the dtype and device of `tensor`."""
        return self.take(name, shape, tensor.dtype, tensor.device)

    def trim(self, limit: int) -> None:
        """Let go of everything if it is more than `limit` bytes."""
        if sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values()) > limit:
            self._buffers.clear()
