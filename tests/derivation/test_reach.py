"""Layers with factors, norms and parameters inside their operations: equal to the oracle without descriptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normscope import Analyzer
from normscope.flow.attention_blocks import attention_blocks
from normscope.flow.freeze import freeze_model
from normscope.inputs.encode import encode
from normscope.models.description import family_to_python
from tests.helpers.compare import refused
from tests.helpers.free_oracle import free_oracle
from tests.helpers.naive_flow import turned_by_zeroing
from tests.helpers.zoo import inputs_for, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:normscope has no family")
# Type -> what its layers have, and the agreement with the oracle (1e-6 where transformers computes in float32).
TYPES = {
    "afmoe": ("gate=AttentionGate(", 1e-6),
    "bitnet": ("inner_norm=Norm(", 1e-6),
    "deberta": ("value_shift=", 1e-6),
    "doge": ('skip="', 1e-6),
    "gemma4_unified_text": ("value_norm=Norm(", 1e-6),
    "gpt_neox_japanese": ("output_bias=", 1e-9),
    "granite_swa": ("sink_scores=", 1e-6),
    "laguna": ('function="softplus"', 1e-6),
    "llama4_text": ('router="', 1e-6),
    "mimo_v2_flash": ("value_scale=", 1e-6),
}


def float64(name: str) -> Any:
    model = tiny_model(name, dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("name", TYPES)
def test_maps_equal_the_oracle(name: str) -> None:
    part, tolerance = TYPES[name]
    model = float64(name)
    lens = Analyzer(model)
    assert part in family_to_python(lens.family)
    given = inputs_for(model, 7)
    result = lens.analyze(given)
    expected = next(layers for layers in free_oracle(model, given).values() if len(layers) > 1)
    worst = 0.0
    for n, layer in enumerate(expected):
        parts = layer.output.parts
        norms = (parts[:, 0] if parts.dim() == 4 else parts).norm(dim=-1).t()
        worst = max(worst, float(((result["layer"][n].double() - norms).abs() / norms.amax(-1, keepdim=True)).max()))
    assert worst <= tolerance


@pytest.mark.parametrize("name", ["afmoe", "bitnet", "doge", "gemma4_unified_text"])
def test_methods_across_layers(name: str) -> None:
    """Contributions to attention blocks add up, and so do the scores of a logit; these models have no biases."""
    model = float64(name)
    lens = Analyzer(model)
    given = inputs_for(model, 6)
    (item,) = encode(lens.loaded, given)
    for blocks in attention_blocks(freeze_model(lens.loaded, item).stacks[0]):
        for block in blocks:
            total = torch.cat([T.sum(1) for _, T in block.contributions()])
            assert torch.allclose(total, block.y, rtol=1e-5, atol=1e-6 * float(block.y.abs().max()))
    for method in ("exact", "decompx", "alti_logit", "gradient_x_input"):
        if method == "alti_logit" and name in ("doge", "gemma4_unified_text"):
            refused(lambda: lens.flow(given, method="alti_logit", target=7), "multiply the stream")
            continue
        flow = lens.flow(given, method=method, target=7)
        assert bool(flow.scores.isfinite().all())
        if method != "gradient_x_input":
            assert float(flow.scores.sum()) + flow.remainder == pytest.approx(flow.value, rel=1e-5)


@pytest.mark.parametrize("name", ["afmoe", "deberta", "gemma4_unified_text"])
def test_value_zeroing(name: str) -> None:
    """The first layer with the values of a token zeroed before they are mixed, under the model's own attention."""
    model = float64(name)
    lens = Analyzer(model)
    given = inputs_for(model, 5)
    found = lens.flow(given, method="value_zeroing").maps[0].double()
    layer = lens.loaded.calls.modules[lens.loaded.stacks[0].side][0]
    expected = torch.stack([turned_by_zeroing(model, layer, given, j) for j in range(5)], 1)
    expected = expected / expected.sum(-1, keepdim=True).clamp_min(1e-300)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["afmoe", "bitnet"])
def test_rows_layers_and_padding(name: str) -> None:
    """Parts of an analysis, and inputs in a padded batch, give the same numbers."""
    model = float64(name)
    lens = Analyzer(model)
    first, second = inputs_for(model, 7), inputs_for(model, 4, seed=1)
    whole = lens.analyze(first, value_bias="remainder")
    some = lens.analyze(first, rows=[2, 5], layers=[1], value_bias="remainder")
    batched = list(lens.stream([first, second], batch_size=2, value_bias="remainder"))
    for scope in whole.scopes:
        assert torch.allclose(some[scope][0], whole[scope][1][[2, 5]], rtol=1e-6, atol=1e-9)
        assert torch.allclose(batched[0][scope], whole[scope], rtol=1e-5, atol=1e-8)
    refused(lambda: lens.analyze(first, heads=True), "heads is not supported", "Leave heads out")


def test_shapley_values_through_a_gate() -> None:
    model = float64("laguna")
    lens = Analyzer(model)
    result = lens.analyze(inputs_for(model, 4), layers=[0], gate="shapley-exact")
    assert max(float(one.max()) for one in result.completeness.values()) < 1e-6
    refused(lambda: Analyzer(float64("bitnet")).analyze(inputs_for(model, 4), gate="shapley"), "a norm inside")


def test_a_factor_without_a_formula() -> None:
    """A factor on the mixed values that no named formula gives is not held."""
    model = tiny_model("afmoe")
    cls = type(model.model.layers[0].self_attn)
    scaled = type("Scaled", (cls,), {"forward": lambda self, *args, **kwargs: _cubed(self, cls, args, kwargs)})
    for layer in model.model.layers:
        layer.self_attn.__class__ = scaled
    refused(lambda: Analyzer(model), "no linear module reads the mixed values")


def _cubed(module: Any, cls: Any, args: Any, kwargs: Any) -> Any:
    """The attention with its gate to the third power."""
    handle = module.gate_proj.register_forward_hook(lambda m, given, made: torch.logit(made.sigmoid() ** 3))
    try:
        return cls.forward(module, *args, **kwargs)
    finally:
        handle.remove()
