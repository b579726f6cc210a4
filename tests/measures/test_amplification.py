"""FF-amp of maps made by hand."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from normscope import NormscopeError
from normscope.measures.amplification import amplification, draw_p_values, map_shares

BEFORE = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
AFTER = torch.tensor([[5.0, 5.0], [1.0, 0.0]])


def test_by_output() -> None:
    """Rows: (1/4, 3/4) becomes (1/2, 1/2); (1/2, 1/2) becomes (1, 0)."""
    expected = torch.tensor([[0.25, -0.25], [0.5, -0.5]], dtype=torch.float64)
    torch.testing.assert_close(amplification(BEFORE, AFTER), expected)


def test_by_input() -> None:
    """Columns: (1/3, 2/3) becomes (5/6, 1/6); (3/5, 2/5) becomes (1, 0)."""
    expected = torch.tensor([[0.5, 0.4], [-0.5, -0.4]], dtype=torch.float64)
    torch.testing.assert_close(amplification(BEFORE, AFTER, "input"), expected)


@pytest.mark.parametrize(("axis", "summed"), [("output", -1), ("input", -2)])
def test_gains_and_losses_cancel(axis: str, summed: int) -> None:
    maps = torch.rand(2, 3, 7, 7, generator=torch.Generator().manual_seed(0))
    found = amplification(maps[0], maps[1], axis)  # type: ignore[arg-type]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.sum(summed), torch.zeros(3, 7, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(amplification(maps[0], 9 * maps[1], axis), found)  # type: ignore[arg-type]


def test_zero_maps_stay_zero() -> None:
    assert torch.equal(map_shares(torch.zeros(2, 2)), torch.zeros(2, 2, dtype=torch.float64))


def test_bad_maps() -> None:
    with pytest.raises(NormscopeError, match="shape"):
        amplification(BEFORE, AFTER[:1])
    with pytest.raises(NormscopeError, match="'output' or 'input'"):
        map_shares(BEFORE, "rows")  # type: ignore[arg-type]


def test_p_values_of_drawn_members_against_scipy() -> None:
    for found, drawn, members, total in ((3, 10, 12, 60), (0, 10, 12, 60), (10, 10, 30, 40), (7, 100, 900, 50_000)):
        chance = stats.hypergeom(total, members, drawn)
        more, fewer = draw_p_values(found, drawn, members, total)
        assert more == pytest.approx(chance.sf(found - 1), rel=1e-9)
        assert fewer == pytest.approx(chance.cdf(found), rel=1e-9)
    assert draw_p_values(5, 10, 5, 10) == (1.0, 1.0)  # everything is drawn
    assert draw_p_values(0, 0, 0, 0) == (1.0, 1.0)
    with pytest.raises(NormscopeError, match="Cannot find 3 of 2"):
        draw_p_values(3, 5, 2, 10)
