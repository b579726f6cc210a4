"""Shared comparisons: analyses with each other and with an oracle, a model before and after."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from normscope import Analysis, NormscopeError
from normscope.labels import Label
from tests.helpers.oracle_parts import OracleLayer, maps
from tests.helpers.tiny import tiny


def assert_same(found: Analysis, expected: Analysis, tolerance: float = 1e-9) -> None:
    """Equal labels, and every number equal up to `tolerance` times the largest of its row."""
    assert found.scopes == expected.scopes
    assert found.layers == expected.layers
    assert found.tokens == expected.tokens
    assert [label.token for label in found.columns] == [label.token for label in expected.columns]
    assert found.mixing_scopes == expected.mixing_scopes
    for scope in expected.mixing_scopes:
        torch.testing.assert_close(
            found.mixing_ratio(scope), expected.mixing_ratio(scope), rtol=tolerance, atol=tolerance
        )
    for scope in expected.scopes:
        assert_close(found[scope], expected[scope], tolerance)
        torch.testing.assert_close(found.remainder(scope), expected.remainder(scope), rtol=tolerance, atol=tolerance)
    assert list(found.heads) == list(expected.heads)
    for scope in expected.heads:
        assert_close(found.heads[scope], expected.heads[scope], tolerance)


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    apart = (found - expected).abs() / expected.amax(-1, keepdim=True)
    assert float(apart.max()) <= tolerance


def refused(call: Callable[[], Any], *parts: str) -> str:
    """The message of the NormscopeError that `call` raises, which contains all `parts` and is not just a word."""
    with pytest.raises(NormscopeError) as caught:
        call()
    assert type(caught.value) is NormscopeError
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert len(message) > 15
    return message


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that an analysis might disturb."""
    return {
        "config": copy.deepcopy(vars(model.config)),
        "json": json.dumps(model.config.to_dict(), default=str, sort_keys=True),
        "attention": model.config._attn_implementation,
        "hooks": [
            (
                len(m._forward_hooks),
                len(m._forward_pre_hooks),
                len(m._forward_hooks_with_kwargs),
                len(m._backward_hooks),
            )
            for m in model.modules()
        ],
        "training": [m.training for m in model.modules()],
        "parameters": [(n, p.requires_grad, p.data_ptr(), p.detach().tolist()) for n, p in model.named_parameters()],
        "gradients": [p.grad is None for p in model.parameters()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }


def with_implementation(family: str, attention: str) -> PreTrainedModel:
    model = tiny(family)
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        pytest.skip(str(error).splitlines()[0])
    return model


def sides(result: Any) -> dict[str, Analysis]:
    return {result.info["side"]: result} if isinstance(result, Analysis) else result.sides


def assert_same_sides(one: Any, other: Any, tolerance: float) -> None:
    assert sides(one).keys() == sides(other).keys()
    for side, analysis in sides(one).items():
        assert_same(analysis, sides(other)[side], tolerance)


def assert_equal(found: Analysis, expected: Analysis) -> None:
    """Every field, bit by bit."""
    for name in ("scopes", "rows", "columns", "tokens", "layers", "head_indices", "word_ids"):
        assert getattr(found, name) == getattr(expected, name), name
        assert type(getattr(found, name)) is type(getattr(expected, name)), name
    assert all(isinstance(label, Label) for label in (*found.rows, *found.columns))
    assert dict(found.info) == dict(expected.info)
    assert dict(found.aliases) == dict(expected.aliases)
    for scope in expected.scopes:
        for part, tensor in vars(expected.measured[scope]).items():
            other = getattr(found.measured[scope], part)
            assert (other is None) == (tensor is None)
            if tensor is not None:
                assert other.dtype == tensor.dtype
                assert torch.equal(other, tensor)
    assert dict.keys(found.heads) == dict.keys(expected.heads)
    for scope in expected.heads:
        assert torch.equal(found.heads[scope], expected.heads[scope])
    assert (found.value_norms is None) == (expected.value_norms is None)
    if expected.value_norms is not None:
        assert found.value_norms is not None
        assert torch.equal(found.value_norms, expected.value_norms)


def assert_close_to_oracle(result: Analysis, layers: list[OracleLayer]) -> None:
    """Float32 against the float64 oracle on the same trace: the tolerances of the project."""
    for n, layer in enumerate(layers):
        for scope, expected in maps(layer).items():
            found = result[scope][n].double()
            apart = (found - expected).abs()
            assert float((apart / expected.amax(-1, keepdim=True)).max()) < 2e-6, scope
            seen = expected > 1e-30
            assert float((apart[seen] / expected[seen]).max()) < 1e-4, scope
    for scope, error in result.completeness.items():
        assert float(error.max()) < 1e-5, scope


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())
