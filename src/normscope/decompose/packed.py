"""Products with one matrix, many times, by the faster of the two float32 kernels that PyTorch brings.

Its usual one is MKL's, which keeps AVX-512 for Intel's processors. oneDNN's does not: on a Zen 4 it takes 9/10 of the
time for thousands of rows, once the matrix is in a layout of its own.
"""

from __future__ import annotations

import platform
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MANY = 2**11  # rows, from which on the layout is worth its making


def packed(matrix: Tensor, rows: int) -> Tensor:
    """A matrix (k, d) for `multiplied`: in the kernel's own layout, where that is a gain for so many rows in all."""
    if rows < MANY or matrix.dtype != torch.float32 or matrix.device.type != "cpu" or not has_kernel():
        return matrix
    return torch.ops.mkldnn._reorder_linear_weight(matrix.t(), rows)  # type: ignore[no-any-return]


def multiplied(x: Tensor, matrix: Tensor, into: Tensor, add: bool) -> Tensor:
    """``x matrix``, or ``into + x matrix``, for a matrix that was `packed`. Overwrites `into`, or leaves it and returns
    another tensor."""
    if not matrix.is_mkldnn:
        return into.addmm_(x, matrix) if add else torch.mm(x, matrix, out=into)
    if add:
        return torch.ops.mkldnn._linear_pointwise.binary(x, into, matrix, None, "add")  # type: ignore[no-any-return]
    return torch.ops.mkldnn._linear_pointwise(x, matrix, None, "none", [], "")  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def has_kernel() -> bool:
    """Whether there is oneDNN, MKL is the slower one, and oneDNN does what is expected of it."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512" or _is_intel():
        return False
    make = torch.Generator().manual_seed(0)
    x, matrix, into = (torch.randn(*shape, generator=make) for shape in ((5, 7), (7, 3), (5, 3)))
    try:
        # Operators that PyTorch has for its own compiler and promises nobody.
        operators: Any = torch.ops.mkldnn
        layout = operators._reorder_linear_weight(matrix.t(), len(x))
        found = [multiplied(x, layout, into, add=False), multiplied(x, layout, into, add=True) - into]
    except (AttributeError, RuntimeError, TypeError):
        return False
    return all(torch.allclose(one, x @ matrix, atol=1e-5) for one in found)


def _is_intel() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            return any(line.startswith("vendor_id") and "GenuineIntel" in line for line in file)
    except OSError:  # not Linux
        return platform.system() == "Darwin" or "GenuineIntel" in platform.processor()
