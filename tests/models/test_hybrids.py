"""Families with recurrences against the oracle without descriptions, and what their maps mean."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from normscope import Analysis, Analyzer
from tests.helpers.free_oracle import FreeLayer, Shares, free_oracle
from tests.helpers.tiny import HYBRIDS, inputs, tiny

OUTPUTS = ("linear_attn.out_proj", "self_attn.o_proj", "mixer.out_proj", "mamba.out_proj")
TOLERANCE = 1e-6  # transformers computes recurrences and norms in float32


@cache
def lens_of(name: str) -> Analyzer:
    return Analyzer(tiny(name))


@cache
def case(name: str, length: int = 7) -> tuple[Analysis, list[FreeLayer]]:
    encoding = inputs(name, lens_of(name).model, length)
    (layers,) = free_oracle(lens_of(name).model, encoding).values()
    result = lens_of(name).analyze(encoding)
    assert isinstance(result, Analysis)
    return result, layers


def norms(shares: Shares, item: int = 0) -> Tensor:
    """(n, columns)"""
    parts = shares.parts[:, item] if shares.parts.dim() == 4 else shares.parts
    return parts.transpose(0, 1).norm(dim=-1)


def assert_cells_equal(found: Tensor, expected: Tensor) -> None:
    """Relative to the largest cell of the row: weights that cancel lose digits of float32."""
    error = (found - expected).abs() / expected.amax(-1, keepdim=True)
    assert float(error.max()) < TOLERANCE, float(error.max())


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("name", HYBRIDS)
def test_layer_output(name: str, length: int) -> None:
    result, layers = case(name, length)
    assert result.layers == tuple(range(len(layers)))
    for n, layer in enumerate(layers):
        assert_cells_equal(result["layer"][n], norms(layer.output))
        rest = layer.output.rest[0].norm(dim=-1)
        torch.testing.assert_close(result.remainder("layer")[n], rest, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", HYBRIDS)
def test_token_mixing(name: str) -> None:
    """After the output projection of recurrences and of attentions alike."""
    result, layers = case(name)
    for n, layer in enumerate(layers):
        (shares,) = (layer.modules[path][0] for path in OUTPUTS if path in layer.modules)
        assert_cells_equal(result["attention"][n], norms(shares))


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_scope(name: str) -> None:
    """Every scope's map is that of something that enters or leaves a module of the layer."""
    result, layers = case(name)
    for n, layer in enumerate(layers):
        kept = [shares for some in (layer.modules, layer.inputs) for one in some.values() for shares in one]
        seen = [one for one in map(norms, kept) if one.shape == result["layer"][n].shape]
        for scope in result.scopes:
            cells = result[scope][n]
            if scope.endswith("-N"):
                largest = cells.amax(-1, keepdim=True)
                assert min(float(((one - cells).abs() / largest).max()) for one in seen) < TOLERANCE, (scope, n)
