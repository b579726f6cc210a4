"""The share of the first token, and maps without it."""

import pytest
import torch

from normscope import Analyzer, NormscopeError
from normscope.measures.first_token import first_token_share, without_first
from tests.helpers.tiny import inputs, tiny

MAP = torch.tensor([[[4.0, 0.0, 0.0], [1.0, 3.0, 0.0], [0.0, 0.0, 0.0], [2.0, 1.0, 1.0]]])


def test_share_is_column_0_of_the_normalised_map() -> None:
    assert torch.equal(first_token_share(MAP), torch.tensor([[1.0, 0.25, 0.0, 0.5]]))
    assert torch.equal(first_token_share(7 * MAP), first_token_share(MAP))


def test_map_without_the_first_token() -> None:
    assert torch.equal(without_first(MAP), MAP[..., 1:])
    expected = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.5, 0.5]]])
    assert torch.equal(without_first(MAP, renormalise=True), expected)


def test_one_column() -> None:
    one = torch.ones(2, 1, 1)
    assert torch.equal(first_token_share(one), torch.ones(2, 1))
    assert without_first(one, renormalise=True).shape == (2, 1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_leading_dimensions_and_dtype(dtype: torch.dtype) -> None:
    maps = torch.rand(2, 4, 5, 6, dtype=dtype)
    share = first_token_share(maps)
    assert (share.shape, share.dtype) == ((2, 4, 5), dtype)
    torch.testing.assert_close(share, maps[..., 0] / maps.sum(-1))
    torch.testing.assert_close(without_first(maps, True).sum(-1), torch.ones(2, 4, 5, dtype=dtype))


def test_first_token_share_of_a_causal_model() -> None:
    model = tiny("gpt2")
    result = Analyzer(model).analyze(inputs("gpt2", model))
    torch.testing.assert_close(result.first_token_share("weights"), result["ATTN-W"][..., 0])  # weights sum to 1
    for scope in result.scopes:
        share = result.first_token_share(scope)
        assert share.shape == (2, 9)
        torch.testing.assert_close(share[:, 0], torch.ones(2, dtype=share.dtype))
        assert result.without_first(scope).shape == (2, 9, 8)
        torch.testing.assert_close(
            result.without_first(scope, renormalise=True).sum(-1)[:, 1:], torch.ones(2, 8).double()
        )
    with pytest.raises(NormscopeError, match="No scope"):
        result.first_token_share("nothing")
