"""Tensors that are equal, and one element that is not."""

import pytest
import torch
from torch import Tensor

from normscope.tracing import recorded
from normscope.tracing.recorded import closeness_misfit, coarser, is_close, is_close_to_product

DTYPES = (torch.float32, torch.float64)


def vectors(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_small_element_among_many(dtype: torch.dtype) -> None:
    a = vectors(3, 50_000, dtype=dtype)
    a[1, 7] = 1e-3
    a[2, 0] = 1e6  # beside which the difference is nothing
    b = a.clone()
    assert is_close(a, b, dtype)
    b[1, 7] *= 1.001
    assert not is_close(a, b, dtype)
    b = a * (1 + torch.finfo(dtype).eps)
    assert is_close(a, b, dtype)


def test_shapes_and_nan() -> None:
    a = vectors(3, 4)
    assert not is_close(a, a[:2], torch.float64)
    assert not is_close(a, a[:, :3], torch.float64)
    b = a.clone()
    b[2, 3] = float("nan")
    assert not is_close(b, b, torch.float64)
    assert is_close(a[:0], a[:0], torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_in_which_all_cancels(dtype: torch.dtype) -> None:
    """The last digits of a sum near zero are rounding errors of its larger terms."""
    x, weight = vectors(5, 300, dtype=dtype), vectors(300, 7)
    weight -= x.double().t() @ torch.linalg.pinv(x.double().t()) @ weight  # so that x W is zero
    weight = weight.to(dtype)
    made = (x.double() @ weight.double()).to(dtype)
    assert float(made.abs().max()) < 1e-4
    assert is_close_to_product(x, weight, None, made)
    made[3, 2] += 1e-2
    assert not is_close_to_product(x, weight, None, made)
    assert not is_close_to_product(x, weight, torch.full((7,), 1e-2, dtype=dtype), made)
    assert not is_close_to_product(x[:, :299], weight, None, made)


def test_pieces_are_all_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "PIECE", 8)
    a = vectors(11, 4)
    for row in range(11):
        b = a.clone()
        b[row, 2] += 1
        assert closeness_misfit(lambda rows: (a[rows], a[rows].abs()), b, 1e-9) > 1
    assert closeness_misfit(lambda rows: (a[rows], a[rows].abs()), a, 1e-9) == 0


def test_the_type_that_rounds_the_most() -> None:
    assert coarser(torch.float64, torch.float64) == torch.float64
    assert coarser(torch.float64, torch.float32) == torch.float32
    assert coarser(torch.bfloat16) == torch.float32
