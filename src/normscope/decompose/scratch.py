"""Working memory that is used again layer after layer.

Fresh large tensors cost a page fault for every 4 kB, which is more than many of the passes over them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

BLOCK = 31 * 2**20  # bytes


class Scratch:
    """Named buffers. A tensor taken is overwritten by the next taker of its name."""

    def __init__(self) -> None:
        # Whoever frees a block of this size shows the C library that such blocks come and go, and that memory should
        # not be handed back to the system each time (glibc's threshold grows with it, up to 32 MB).
        torch.empty(BLOCK, dtype=torch.uint8)
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._taken: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}  # in the last shape asked for

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        begin: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """A tensor of this shape. As long as the name is taken in one shape it holds what was last written there; at
        first it is not initialised, but by `begin`."""
        key = (name, dtype, device)
        taken = self._taken.get(key)
        if taken is None or taken.shape != shape:
            size = prod(shape)
            if key not in self._buffers or self._buffers[key].numel() < size:
                self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
            taken = self._taken[key] = self._buffers[key][:size].view(shape)
            if begin is not None:
                begin(taken)
        return taken

    def like(
        self, name: str, shape: tuple[int, ...], tensor: Tensor, begin: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """The same, of the dtype and device of `tensor`."""
        return self.take(name, shape, tensor.dtype, tensor.device, begin)

    def trim(self, limit: int) -> None:
        """Let go of everything if it is more than `limit` bytes."""
        if sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values()) > limit:
            self._buffers.clear()
            self._taken.clear()
