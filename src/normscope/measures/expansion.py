"""Expansion rate of an attention layer's affine map x -> (x W_V + b_V) W_O + b_O (EMNLP 2021, appendix).

The map is linear in [x, 1]: ``[f(x), 1] = [x, 1] M``. Its expansion rate ``||M||_F / sqrt(d + 1)`` is the root mean
square factor by which M changes the length of a random vector: ``E ||z M||^2 = ||M||_F^2`` for z with ``E z^T z = I``.
Row vectors: W_V is (d, k), W_O (k, d), with k = heads x head width.
"""

from __future__ import annotations

import math

from torch import Tensor

from normscope.errors import NormscopeError


def expansion_rate(W_V: Tensor, b_V: Tensor, W_O: Tensor, b_O: Tensor) -> float:
    """The expansion rate of ``M = [[W_V W_O, 0], [b_V W_O + b_O, 1]]``, as the paper defines it."""
    W_V, b_V, W_O, b_O = _expansion_affine_in_float64(W_V, b_V, W_O, b_O)
    squares = _expansion_squared_norm(W_V @ W_O) + _expansion_squared_norm(b_V @ W_O + b_O) + 1.0
    return math.sqrt(squares / (len(W_V) + 1))


def released_code_expansion_rate(W_V: Tensor, b_V: Tensor, W_O: Tensor, b_O: Tensor) -> float | None:
    """The expansion rate of ``M = [[W_V W_O, W_V b_O^T], [b_V W_O, b_V . b_O + 1]]``, as the paper's code computes it.

    The code appends b_O as a column of W_O instead of a row; the paper's table has these values. None if b_O is not
    zero and the heads together are not as wide as the model, so that b_O does not fit.
    """
    W_V, b_V, W_O, b_O = _expansion_affine_in_float64(W_V, b_V, W_O, b_O)
    if bool(b_O.any()):
        if W_O.shape[0] != W_O.shape[1]:
            return None
        column, corner = _expansion_squared_norm(W_V @ b_O), float(b_V @ b_O) + 1.0
    else:
        column, corner = 0.0, 1.0
    squares = _expansion_squared_norm(W_V @ W_O) + column + _expansion_squared_norm(b_V @ W_O) + corner**2
    return math.sqrt(squares / (len(W_V) + 1))


def _expansion_squared_norm(values: Tensor) -> float:
    return float(values.square().sum())


def _expansion_affine_in_float64(
    W_V: Tensor, b_V: Tensor, W_O: Tensor, b_O: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four tensors in float64, after a check that their shapes make up one map from d to d."""
    d, k = W_V.shape if W_V.dim() == 2 else (0, 0)
    if d == 0 or (tuple(W_O.shape), tuple(b_V.shape), tuple(b_O.shape)) != ((k, d), (k,), (d,)):
        shapes = ", ".join(str(tuple(one.shape)) for one in (W_V, b_V, W_O, b_O))
        raise NormscopeError(f"W_V, b_V, W_O and b_O must have the shapes (d, k), (k,), (k, d) and (d,), not {shapes}.")
    return W_V.detach().double(), b_V.detach().double(), W_O.detach().double(), b_O.detach().double()
