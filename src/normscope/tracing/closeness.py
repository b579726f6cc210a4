"""When two tensors count as equal: in every element, within the rounding of the type that computed them.

A difference is compared with a size of its own for each element: how large the numbers were that the element was
computed from. That finds one wrong logit among fifty thousand, which the largest value of all would hide.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, isnan

import torch
from torch import Tensor

ELEMENT = {torch.float32: 1e-5, torch.float64: 1e-9}  # of an elementwise function, a sum or a mean
PRODUCT = {torch.float32: 2e-6, torch.float64: 1e-12}  # of ||x|| ||w||, the size of a scalar product
PIECE = 2**22  # elements that are compared at a time

Guess = Callable[[slice], tuple[Tensor, Tensor]]  # some rows -> what is expected there, and the size of each element


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    """The one of these types that rounds the most, at least float32."""
    return torch.float64 if all(dtype == torch.float64 for dtype in dtypes) else torch.float32


def misfit(guess: Guess, actual: Tensor, tolerance: float) -> float:
    """``max |guess - actual| / (tolerance * size)`` over the elements of (rows, width): the two are equal up to 1.

    It goes through the first row and then some at a time, and ends where one differs. NaN equals nothing.
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


def equal(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors (rows, width) are the same but for the rounding of `dtype`."""
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) or misfit(lambda rows: (a[rows], b[rows].abs()), b, ELEMENT[dtype]) <= 1


def is_product(x: Tensor, weight: Tensor, bias: Tensor | None, made: Tensor, tolerance: float | None = None) -> bool:
    """Whether ``x W + b`` is what was made, for x (rows, d) and W (d, d')."""
    if weight.shape != (x.shape[-1], made.shape[-1]) or len(x) != len(made):
        return False
    found = x @ weight if bias is None else torch.addmm(bias, x, weight)
    if torch.equal(found, made):  # the same kernel rounds the same way
        return True
    allowed = PRODUCT[coarser(x.dtype, made.dtype)] if tolerance is None else tolerance
    columns: Tensor = torch.linalg.vector_norm(weight, dim=0)
    return misfit(lambda rows: (found[rows], _product_size(x[rows], columns, bias)), made, allowed) <= 1


def _product_size(x: Tensor, columns: Tensor, bias: Tensor | None) -> Tensor:
    """(rows, d'): what ``x W + b`` is computed from, ``||x_i|| (||w_k|| + |b_k|) + |b_k|``; `columns` are the ||w_k||.

    The bias is there twice, as a weight that is read from what a module does was computed from it.
    """
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return lengths * columns if bias is None else lengths * (columns + bias.abs()) + bias.abs()


def rows_of(x: Tensor) -> Tensor:
    """(rows, width): all vectors of a tensor, one row where there is only one."""
    return x.reshape(-1, x.shape[-1])
