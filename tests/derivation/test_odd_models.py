"""Architectures written for these tests: each derived and equal to the oracle without descriptions, or refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normscope import Analyzer, NormscopeError, NormscopeWarning
from normscope.derivation.family import describe_model
from normscope.models.description import family_from_json, family_to_json
from normscope.models.loaded import load_model
from normscope.tracing.proof import prove
from tests.helpers.compare import refused
from tests.helpers.free_oracle import free_oracle
from tests.helpers.naive_flow import turned_by_zeroing
from tests.helpers.odd_models import Shape, odd_model

IDS = torch.tensor([[5, 9, 7, 30, 8, 41, 12]])
DERIVED = "ignore:normscope has no family"
pytestmark = pytest.mark.filterwarnings(DERIVED)

SHAPES = {
    "einsum": Shape(),
    "bmm": Shape(attention="bmm", packed="", causal=False),
    "matmul": Shape(attention="matmul", packed="qkv"),
    "fused": Shape(attention="sdpa", packed="kvq"),
    "fused, encoder": Shape(attention="sdpa", causal=False),
    "post-norm": Shape(before=False, end=True, causal=False),
    "norm after the branch": Shape(before=False, after=True),
    "three norms": Shape(after=True, end=True),
    "scaled": Shape(scale=0.22),
    "two projections": Shape(gated="two"),
    "halves": Shape(gated="halves"),
    "swapped": Shape(gated="swapped"),
    "parallel": Shape(parallel=True, gated="two"),
    "parallel, scaled": Shape(parallel=True, scale=0.5, after=True),
    "decoy": Shape(decoy="unused", packed=""),
    "twin": Shape(decoy="twin", packed=""),
    "scaled by index": Shape(multiplier="index"),
    "scaled by an attribute that differs": Shape(multiplier="attribute", after=True),
    "scaled by a parameter": Shape(multiplier="parameter", parallel=True),
    "stream scaled": Shape(multiplier="stream"),
    "values scaled": Shape(values="scaled"),
    "values scaled by head": Shape(values="by head", attention="sdpa"),
    "values are keys": Shape(values="keys", packed=""),
    "values tiled": Shape(values="tiled", causal=False),
    "gate": Shape(gate="sigmoid"),
    "another gate": Shape(gate="silu", attention="bmm"),
}
# Decompositions in which a number of the description is rounded to ten digits.
ROUNDED = ("scaled by index",)


def check(*shapes: Shape, tolerance: float = 1e-9) -> None:
    """Maps of the layer equal to the oracle's, cell by cell."""
    model = odd_model(*shapes)
    lens = Analyzer(model)
    assert lens.family.derived
    result = lens.analyze({"input_ids": IDS})
    assert result.info["derived"] is True
    (layers,) = free_oracle(model, {"input_ids": IDS}).values()
    for n, layer in enumerate(layers):
        parts = layer.output.parts
        expected = (parts[:, 0] if parts.dim() == 4 else parts).norm(dim=-1).t()
        found = result["layer"][n].double()
        assert torch.allclose(found, expected, rtol=tolerance, atol=1e-12 * float(expected.max()))
    assert max(float(one.max()) for one in result.completeness.values()) < 1e-9
    flow = lens.flow({"input_ids": IDS})
    assert flow.maps.shape[0] == len(shapes)
    assert flow.completeness is not None
    assert float(flow.completeness.max()) < 1e-9


@pytest.mark.parametrize("name", SHAPES)
def test_derived_and_equal_to_the_oracle(name: str) -> None:
    check(SHAPES[name], SHAPES[name], SHAPES[name])


def test_layers_that_differ_in_scale() -> None:
    """Layers with the same modules: one number for every layer."""
    shapes = Shape(scale=0.5), Shape(), Shape(scale=0.25)
    check(*shapes)
    (stack,) = describe_model(odd_model(*shapes)).stacks
    assert [block.branches[0].scale for block in stack.blocks] == [(0.5, 1.0, 0.25)] * 2
    assert family_from_json(family_to_json(describe_model(odd_model(*shapes)))).stacks == (stack,)


def test_a_factor_has_the_name_of_a_number_that_the_layers_keep() -> None:
    (stack,) = describe_model(odd_model(*[Shape(multiplier="attribute")] * 3)).stacks
    assert [block.branches[0].scale for block in stack.blocks] == ["loud"] * 2


def test_layers_of_the_same_modules_that_use_them_differently() -> None:
    """Only the first of such layers is watched, until the proof fails."""
    with pytest.raises(NormscopeError, match="does not match its family"):
        prove(load_model(odd_model(*[SHAPES["scaled by index"]] * 2), None, None, describe_model))
    refused(lambda: Analyzer(odd_model(*[Shape(odd="other branch")] * 2)), "different components in different orders")
    refused(lambda: Analyzer(odd_model(*[Shape(odd="other values")] * 2)), "use them differently")


@pytest.mark.parametrize("name", ["values are keys", "values tiled", "values scaled by head"])
def test_value_zeroing(name: str) -> None:
    """The values alone are zeroed, even if the same columns are keys."""
    model = odd_model(SHAPES[name])
    given = {"input_ids": IDS[:, :5]}
    found = Analyzer(model).flow(given, method="value_zeroing").map
    expected = torch.stack([turned_by_zeroing(model, model.steps[0], given, j) for j in range(5)], 1)
    assert torch.allclose(found, expected / expected.sum(-1, keepdim=True))


def test_parallel_and_sequential_in_one_stack() -> None:
    refused(lambda: Analyzer(odd_model(Shape(), Shape(parallel=True))), "different components in different orders")


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ("tanh values", ("steps.0 (OddLayer)", "values of mix are not the output of a linear module")),
        ("squared", ("steps.0", "no linear module reads the mixed values")),
        ("product", ("steps.0", "not a sum of its input")),
        ("recurrence", ("no layers that can be described",)),
    ],
)
def test_refused_with_what_is_not_explained(odd: str, words: tuple[str, ...]) -> None:
    refused(lambda: Analyzer(odd_model(Shape(odd=odd), Shape(odd=odd))), *words)


def test_two_attentions_in_a_layer() -> None:
    words = "no layers that can be described", "those at steps.* mix tokens 2 times each, not once"
    refused(lambda: Analyzer(odd_model(Shape(odd="two attentions"))), *words)


def test_layers_that_skip_depending_on_the_data() -> None:
    refused(lambda: Analyzer(odd_model(*[Shape(odd="skips")] * 6)), "no layers that can be described")


def test_weights_shared_between_the_branches() -> None:
    refused(lambda: Analyzer(odd_model(*[Shape(odd="one norm")] * 2)), "first was called on", "exactly once")


def test_a_layer_that_calls_another_model() -> None:
    refused(lambda: Analyzer(odd_model(*[Shape(odd="calls a model")] * 2)), "mix tokens 2 times each")


def test_a_description_that_closes_on_one_input_only() -> None:
    """The layers use other weights for short inputs."""
    model = odd_model(*[Shape(odd="by length")] * 2)
    assert describe_model(model).derived
    refused(lambda: Analyzer(model))


def test_dropout() -> None:
    refused(lambda: Analyzer(odd_model(Shape()).train()), "training mode")


def test_one_line_says_so() -> None:
    with pytest.warns(NormscopeWarning, match="no family for OddModel: its layers were described by watching it"):
        Analyzer(odd_model(Shape()))


def test_no_derivation_on_request() -> None:
    refused(lambda: Analyzer(odd_model(Shape()), derive=False), "'odd'", "does not know")


shapes = st.builds(
    Shape,
    attention=st.sampled_from(["einsum", "bmm", "matmul", "sdpa"]),
    packed=st.sampled_from(["", "qkv", "vqk", "kvq"]),
    before=st.booleans(),
    after=st.booleans(),
    end=st.booleans(),
    scale=st.sampled_from([1.0, 0.3, 1.7]),
    gated=st.sampled_from(["", "two", "halves", "swapped"]),
    decoy=st.sampled_from(["", "unused", "twin"]),
    causal=st.booleans(),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(shapes)
def test_any_combination(shape: Shape) -> None:
    check(shape)
