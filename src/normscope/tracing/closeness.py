"""Elementwise comparison of tensors within the rounding error of their dtype.

The tolerance of each element is relative to the size of the numbers from which it was computed, not to the largest
element of the tensor. This finds one wrong logit among fifty thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan

import torch
from torch import Tensor

ELEMENT = {torch.float32: 1e-5, torch.float64: 1e-9}  # for elementwise functions, sums and means
PRODUCT = {torch.float32: 2e-6, torch.float64: 1e-12}  # relative to ||x|| ||w||, the size of a scalar product
PIECE = 2**22  # elements compared at a time

Guess = Callable[[slice], tuple[Tensor, Tensor]]  # rows -> their expected values, and the size of each element


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    """float64 if all these dtypes are, float32 otherwise."""
    return torch.float64 if all(dtype == torch.float64 for dtype in dtypes) else torch.float32


def closeness_misfit(guess: Guess, actual: Tensor, tolerance: float) -> float:
    """``max |guess - actual| / (tolerance * size)`` over the elements of (rows, width); at most 1 if the two are equal.

    Compares the first row, then blocks of rows, and stops at the first difference. NaN counts as a difference.
    """
    worst = 0.0
    step = max(1, PIECE // max(1, actual.shape[-1]))
    for start in (0, *range(1, len(actual), step)):
        rows = slice(start, start + (step if start else 1))
        found, size = guess(rows)
        if found.shape != actual[rows].shape:
            return inf
        allowed = (tolerance * size).add_(torch.finfo(found.dtype).tiny)
        largest = float(((found - actual[rows]).abs_() / allowed).max()) if found.numel() else 0.0
        worst = max(worst, inf if isnan(largest) else largest)
        if worst > 1:
            break
    return worst


def is_close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """True if two tensors (rows, width) are equal within the rounding error of `dtype`."""
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) or closeness_misfit(lambda rows: (a[rows], b[rows].abs()), b, ELEMENT[dtype]) <= 1


def is_close_to_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, tolerance: float | None = None
) -> bool:
    """True if ``x W + b`` equals `output`, for x (rows, d) and W (d, d')."""
    if weight.shape != (x.shape[-1], output.shape[-1]) or len(x) != len(output):
        return False
    found = x @ weight if bias is None else torch.addmm(bias, x, weight)
    if torch.equal(found, output):  # the same kernel gives the same rounding
        return True
    allowed = PRODUCT[coarser(x.dtype, output.dtype)] if tolerance is None else tolerance
    columns: Tensor = torch.linalg.vector_norm(weight, dim=0)
    return (
        closeness_misfit(lambda rows: (found[rows], _product_closeness_scale(x[rows], columns, bias)), output, allowed)
        <= 1
    )


def _product_closeness_scale(x: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    """(rows, d'): the size of the terms of ``x W + b``, ``||x_i|| (||w_k|| + |b_k|) + |b_k|``; `columns` are the
    ||w_k||.

    The bias occurs twice because a weight found by calling a module (`linear_map`) has the rounding error of its bias.
    """
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return lengths * columns if bias is None else lengths * (columns + bias.abs()) + bias.abs()


def closeness_rows(x: Tensor) -> Tensor:
    """(rows, width): the last dimension stays, all others become rows."""
    return x.reshape(-1, x.shape[-1])
