"""Many products with one matrix, by the faster of PyTorch's two float32 kernels.

By default PyTorch uses MKL, which reserves AVX-512 for Intel processors. oneDNN does not: on a Zen 4 it takes 9/10 of
the time for thousands of rows, once the matrix is reordered.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MANY = 2**11  # rows that repay the reordering


def pack_matrix(matrix: Tensor, rows: int) -> Tensor:
    """A matrix (k, d) for `multiply_packed`, reordered for oneDNN; the matrix itself where that brings nothing."""
    if matrix.dtype != torch.float32 or matrix.device.type != "cpu" or not has_kernel():
        return matrix
    return torch.ops.mkldnn._reorder_linear_weight(matrix.t(), rows)  # type: ignore[no-any-return]


def multiply_packed(x: Tensor, matrix: Tensor, into: Tensor, add: bool) -> Tensor:
    """``x matrix``, or ``into + x matrix``, for a matrix that oneDNN has reordered. Returns a new tensor."""
    if add:
        return torch.ops.mkldnn._linear_pointwise.binary(x, into, matrix, None, "add")  # type: ignore[no-any-return]
    return torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def has_kernel() -> bool:
    """Whether oneDNN is available, faster than MKL on this processor, and correct."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512" or _is_intel():
        return False
    make = torch.Generator().manual_seed(0)
    x, matrix, into = (torch.randn(*shape, generator=make) for shape in ((5, 7), (7, 3), (5, 3)))
    try:
        # Private torch.compile operators; no stability guarantee.
        operators: Any = torch.ops.mkldnn
        layout = operators._reorder_linear_weight(matrix.t(), len(x))
        found = [multiply_packed(x, layout, into, add=False), multiply_packed(x, layout, into, add=True) - into]
    except (AttributeError, RuntimeError, TypeError):
        return False
    return all(torch.allclose(one, x @ matrix, atol=1e-5) for one in found)


def _is_intel() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            return any(line.startswith("vendor_id") and "GenuineIntel" in line for line in file)
    except OSError:  # not Linux
        return platform.system() == "Darwin" or "GenuineIntel" in platform.processor()
