"""Relative change, cosine distance and cross-entropy, against numpy and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine
from scipy.special import log_softmax

from normscope.measures.change import cosine_distance, cross_entropy, relative_change


def test_relative_change() -> None:
    before = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    after = torch.tensor([[3.0, 4.0], [1.0, 2.0], [0.0, 0.0], [0.0, 1.0]])
    found = relative_change(before, after)
    assert found.tolist() == [0.0, 2.0, 0.0, float("inf")]
    assert relative_change(2 * before, 2 * after).tolist() == found.tolist()


def test_cosine_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    before, after = torch.randn(2, 3, 5, 7, generator=generator)
    found = cosine_distance(before, after)
    assert found.shape == (3, 5)
    expected = [[cosine(a, b) for a, b in zip(one, two, strict=True)] for one, two in zip(before, after, strict=True)]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)
    torch.testing.assert_close(cosine_distance(5 * before, before), torch.zeros(3, 5).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(cosine_distance(before, -before), torch.full((3, 5), 2.0).double())
    some, none = torch.tensor([1.0, 0.0]), torch.zeros(2)
    assert (float(cosine_distance(none, none)), float(cosine_distance(some, none))) == (0.0, 1.0)


def test_nearly_equal_vectors_keep_their_distance() -> None:
    before = torch.tensor([1.0, 0.0], dtype=torch.float64)
    after = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    assert float(cosine_distance(before, after)) == pytest.approx(5e-19, rel=1e-6)


def test_cross_entropy() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0))
    positions, targets = torch.tensor([4, 0]), torch.tensor([7, 10])
    found = cross_entropy(logits, targets, positions)
    expected = -log_softmax(logits.double().numpy(), axis=-1)[[4, 0], [7, 10]]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    assert cross_entropy(logits, targets[:0], positions[:0]).shape == (0,)
    assert float(cross_entropy(torch.zeros(1, 8), torch.tensor([3]), torch.tensor([0]))) == pytest.approx(np.log(8))
