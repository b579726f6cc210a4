"""Softmax attention in the layout of the decomposition is what the families' own eager attention computes."""

from importlib import import_module

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import eager_attention_forward

from normscope import Analyzer, plain_attention, trace
from tests.tiny import tiny


def some(items: int, heads: int, rows: int, columns: int) -> tuple[Tensor, ...]:
    """Queries, keys and values as models make them: (b, n, H, d_h) with two dimensions exchanged."""
    make = torch.Generator().manual_seed(0)
    lengths = (rows, columns, columns)
    return tuple(torch.randn(items, n, heads, 4, generator=make, dtype=torch.float64).transpose(1, 2) for n in lengths)


@pytest.mark.parametrize("masked", [None, (1, 1), (3, 1), (1, 4), (3, 4)])
@pytest.mark.parametrize("scores", [2**20, 1, 80])
@pytest.mark.parametrize("items", [1, 3])
def test_the_same_as_eager(
    items: int, scores: int, masked: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_attention, "SCORES", scores)  # all heads at once, one by one, or three and one
    query, key, value = some(items, 4, 5, 7)
    mask = None
    if masked is not None:
        mask = torch.zeros(min(items, masked[0]), masked[1], 5, 7, dtype=torch.float64)
        mask[..., 2:4] = torch.finfo(torch.float32).min
        mask += torch.arange(masked[1])[:, None, None]
    weights = torch.empty(items, 7, 4, 5, dtype=torch.float64)
    found = plain_attention.attend(query, key, value, mask, 0.4, weights)
    output, probabilities = eager_attention_forward(nn.Identity().eval(), query, key, value, mask, scaling=0.4)
    torch.testing.assert_close(found, output, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(weights.permute(0, 2, 3, 1), probabilities, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("family", "expected"),
    [("bert", True), ("roberta", True), ("electra", True), ("albert", True), ("llama", False), ("gemma2", False)],
)
def test_which_families_have_it(family: str, expected: bool) -> None:
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    assert plain_attention.is_plain(module.eager_attention_forward) == expected


def test_an_attention_that_does_something_else_is_not_plain() -> None:
    def eager_attention_forward(*args: object, **kwargs: object) -> None: ...

    assert not plain_attention.is_plain(eager_attention_forward)


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_item_by_item(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = Analyzer(tiny("bert"))
    ids = [torch.arange(5, 5 + n) for n in (9, 4, 7)]
    pads = [(9 - len(one), 0) if side == "left" else (0, 9 - len(one)) for one in ids]
    batch = {
        "input_ids": torch.stack([nn.functional.pad(one, pad) for one, pad in zip(ids, pads, strict=True)]),
        "attention_mask": torch.stack(
            [nn.functional.pad(torch.ones_like(one), pad) for one, pad in zip(ids, pads, strict=True)]
        ),
    }
    together = list(lens.stream(batch, batch_size=3))
    monkeypatch.setattr(trace, "MANY", 0)
    for one, other in zip(lens.stream(batch, batch_size=3), together, strict=True):
        for scope in one.scopes:
            torch.testing.assert_close(one[scope], other[scope], rtol=1e-9, atol=1e-12)
            assert float(one.completeness[scope].max()) < 1e-12
