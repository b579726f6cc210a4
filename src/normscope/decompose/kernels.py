"""Many products with the same matrix, using the faster of PyTorch's two float32 kernels.

By default PyTorch uses MKL, which uses AVX-512 on Intel processors only. oneDNN uses it everywhere: on a Zen 4, it
takes 90% of the time for thousands of rows once the matrix is reordered.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

PACKED_ROWS = 2**11  # with fewer rows, reordering costs more than it saves


def pack_kernel_matrix(matrix: Tensor, rows: int) -> Tensor:
    """A matrix (k, d) reordered for oneDNN, for `multiply_packed_kernel`; the matrix itself if oneDNN is not faster."""
    if matrix.dtype != torch.float32 or matrix.device.type != "cpu" or not has_packed_kernel():
        return matrix
    return torch.ops.mkldnn._reorder_linear_weight(matrix.t(), rows)  # type: ignore[no-any-return]


def multiply_packed_kernel(x: Tensor, matrix: Tensor, into: Tensor, add: bool) -> Tensor:
    """``x matrix``, or ``into + x matrix``, as a new tensor. The matrix must be reordered by `pack_kernel_matrix`."""
    if add:
        return torch.ops.mkldnn._linear_pointwise.binary(x, into, matrix, None, "add")  # type: ignore[no-any-return]
    return torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def has_packed_kernel() -> bool:
    """Whether oneDNN is available, faster than MKL on this processor, and gives correct products."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512" or _is_intel():
        return False
    make = torch.Generator().manual_seed(0)
    x, matrix, into = (torch.randn(*shape, generator=make) for shape in ((5, 7), (7, 3), (5, 3)))
    try:
        # Private torch.compile operators; no stability guarantee.
        operators: Any = torch.ops.mkldnn
        layout = operators._reorder_linear_weight(matrix.t(), len(x))
        found = [
            multiply_packed_kernel(x, layout, into, add=False),
            multiply_packed_kernel(x, layout, into, add=True) - into,
        ]
    except (AttributeError, RuntimeError, TypeError):
        return False
    return all(torch.allclose(one, x @ matrix, atol=1e-5) for one in found)


def _is_intel() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            return any(line.startswith("vendor_id") and "GenuineIntel" in line for line in file)
    except OSError:  # not Linux
        return platform.system() == "Darwin" or "GenuineIntel" in platform.processor()
