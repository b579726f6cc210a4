"""Uniform attention in a derived model, whose attention is outside transformers' interface."""

from __future__ import annotations

import pytest
import torch

from normscope import Analyzer
from normscope.inputs.encode import encode
from normscope.tracing.uniform_attention import run_uniform_attention
from tests.helpers.odd_models import Shape, odd_model


@pytest.mark.filterwarnings("ignore:normscope has no family")
@pytest.mark.parametrize("attention", ["einsum", "sdpa"])
def test_zero_queries_are_uniform(attention: str) -> None:
    """The same as a model whose queries and keys are zero in that layer."""
    shape = Shape(attention=attention, packed="", decoy="unused")
    model = odd_model(shape, shape)
    lens = Analyzer(model)
    (item,) = encode(lens.loaded, {"input_ids": torch.arange(3, 12)})
    found = run_uniform_attention(lens.loaded, item, [1])
    with torch.no_grad():
        for parameter in model.steps[1].mix.ask.parameters():
            parameter.zero_()
    expected = run_uniform_attention(lens.loaded, item, [])
    assert torch.allclose(found, expected)
    assert not torch.allclose(found, run_uniform_attention(lens.loaded, item, [0]))
