"""The expansion rate of an affine map, against explicit matrices and random vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from normscope import NormscopeError
from normscope.measures.expansion import expansion_rate, released_code_expansion_rate


def affine(d: int, k: int, seed: int = 0, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A random W_V, b_V, W_O, b_O."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scale = 1.0 if bias else 0.0
    return draw(d, k), scale * draw(k), draw(k, d), scale * draw(d)


def papers_matrix(W_V: Tensor, b_V: Tensor, W_O: Tensor, b_O: Tensor) -> np.ndarray:
    """As the product of two maps of [x, 1], each with its bias as the last row."""
    d, k = W_V.shape
    value = np.block([[W_V.numpy(), np.zeros((d, 1))], [b_V.numpy()[None], np.ones((1, 1))]])
    output = np.block([[W_O.numpy(), np.zeros((k, 1))], [b_O.numpy()[None], np.ones((1, 1))]])
    return value @ output


def codes_matrix(W_V: Tensor, b_V: Tensor, W_O: Tensor, b_O: Tensor) -> np.ndarray:
    """The same, but with b_O as the last column."""
    d, k = W_V.shape
    value = np.block([[W_V.numpy(), np.zeros((d, 1))], [b_V.numpy()[None], np.ones((1, 1))]])
    output = np.block([[W_O.numpy(), b_O.numpy()[:, None]], [np.zeros((1, k)), np.ones((1, 1))]])
    return value @ output


def rate(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix) / np.sqrt(len(matrix)))


@pytest.mark.parametrize(("d", "k"), [(6, 6), (5, 8), (9, 4), (1, 1)])
def test_the_papers_matrix(d: int, k: int) -> None:
    given = affine(d, k)
    assert expansion_rate(*given) == pytest.approx(rate(papers_matrix(*given)), rel=1e-12)


@pytest.mark.parametrize("d", [1, 2, 7])
def test_the_matrix_of_the_released_code(d: int) -> None:
    given = affine(d, d, seed=d)
    found = released_code_expansion_rate(*given)
    assert found == pytest.approx(rate(codes_matrix(*given)), rel=1e-12)
    assert found != pytest.approx(expansion_rate(*given), rel=1e-3)


def test_the_matrix_does_what_the_layer_does() -> None:
    W_V, b_V, W_O, b_O = affine(5, 8)
    x = torch.randn(3, 5, dtype=torch.float64)
    made = np.concatenate([x.numpy(), np.ones((3, 1))], axis=1) @ papers_matrix(W_V, b_V, W_O, b_O)
    np.testing.assert_allclose(made[:, :-1], ((x @ W_V + b_V) @ W_O + b_O).numpy())
    np.testing.assert_allclose(made[:, -1], 1.0)


def test_the_rate_is_the_root_mean_square_amplification() -> None:
    """Of random vectors [x, 1]: by their exact second moments, and by drawing a million of them."""
    given = affine(4, 4, seed=1)
    matrix = papers_matrix(*given)
    generator = np.random.default_rng(0)
    x = np.concatenate([generator.standard_normal((1_000_000, 4)), np.ones((1_000_000, 1))], axis=1)
    drawn = np.sqrt(np.square(x @ matrix).sum(1).mean() / np.square(x).sum(1).mean())
    assert expansion_rate(*given) == pytest.approx(drawn, rel=5e-3)
    signs = np.stack(np.meshgrid(*[[-1.0, 1.0]] * 4), -1).reshape(-1, 4)  # E x^T x = I, exactly
    x = np.concatenate([signs, np.ones((16, 1))], axis=1)
    assert expansion_rate(*given) == pytest.approx(np.sqrt(np.square(x @ matrix).sum(1).mean() / 5), rel=1e-12)


def test_known_answers() -> None:
    eye, zero = torch.eye(3), torch.zeros(3)
    assert expansion_rate(eye, zero, eye, zero) == released_code_expansion_rate(eye, zero, eye, zero) == 1.0
    assert expansion_rate(eye, zero, 0 * eye, zero) == pytest.approx(0.5)
    one = torch.tensor([0.0, 2.0, 0.0])
    assert expansion_rate(eye, one, eye, one) == pytest.approx(np.sqrt((3 + 16 + 1) / 4))
    assert released_code_expansion_rate(eye, one, eye, one) == pytest.approx(np.sqrt((3 + 4 + 4 + 25) / 4))


def test_without_biases_both_agree() -> None:
    given = affine(5, 8, bias=False)
    assert released_code_expansion_rate(*given) == pytest.approx(expansion_rate(*given), rel=1e-12)


def test_a_bias_that_does_not_fit() -> None:
    assert released_code_expansion_rate(*affine(5, 8)) is None


def test_bad_shapes() -> None:
    W_V, b_V, W_O, b_O = affine(5, 8)
    with pytest.raises(NormscopeError, match=r"\(8, 5\)"):
        expansion_rate(W_O, b_V, W_V, b_O)
    with pytest.raises(NormscopeError, match="shapes"):
        released_code_expansion_rate(b_V, b_V, W_V, b_O)
