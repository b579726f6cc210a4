"""BERT and its kin: every family, every scope, against the naive float64 oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normscope import Analysis, Analyzer
from tests.helpers.bert_oracle import oracle
from tests.helpers.compare import assert_close_to_oracle
from tests.helpers.oracle_parts import OracleLayer, head_maps, maps, mixing
from tests.helpers.tiny import BERT_FAMILIES, tiny
from tests.helpers.toys import some_encoding

ACTIVATIONS = (
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "silu",
    "swish",
    "tanh",
    "sigmoid",
    "mish",
)


def assert_exact(result: Analysis, layers: list[OracleLayer], relative: float = 1e-9) -> None:
    """Float64: every cell of every map, the mixing ratio, the remainder and the head-level maps."""
    assert len(layers) == len(result.layers)
    for n, layer in enumerate(layers):
        expected, ratios = maps(layer), mixing(layer)
        for scope in result.scopes:
            torch.testing.assert_close(result[scope][n], expected[scope], rtol=relative, atol=1e-14)
            torch.testing.assert_close(result.mixing_ratio(scope)[n], ratios[scope], rtol=relative, atol=1e-12)
            if scope.endswith("-N"):
                remainder = layer.bias[scope].norm(dim=-1)
                torch.testing.assert_close(result.remainder(scope)[n], remainder, rtol=relative, atol=1e-12)
        for scope, expected_heads in head_maps(layer).items():
            if result.heads:
                torch.testing.assert_close(result.heads[scope][n], expected_heads, rtol=relative, atol=1e-14)
        if result.value_norms is not None:
            torch.testing.assert_close(result.value_norms[n], layer.value_norms, rtol=relative, atol=1e-14)
    for scope, error in result.completeness.items():
        assert float(error.max()) < 1e-12, scope


@pytest.mark.parametrize("family", BERT_FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 13])
def test_families_float64(family: str, length: int) -> None:
    model = tiny(family)
    result = Analyzer(model).analyze(some_encoding(length), heads=True)
    assert_exact(result, oracle(model, some_encoding(length)))


@pytest.mark.parametrize("family", BERT_FAMILIES)
@pytest.mark.parametrize("length", [1, 13])
def test_families_float32(family: str, length: int) -> None:
    model = tiny(family, dtype=torch.float32)
    assert_close_to_oracle(Analyzer(model).analyze(some_encoding(length)), oracle(model, some_encoding(length)))


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_sharp_attention_float32(family: str) -> None:
    """Scores as large as in real models amplify any difference between two passes."""
    model = tiny(family, dtype=torch.float32, num_hidden_layers=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.split(".")[-2] in ("query", "q", "q_lin"):
                parameter *= 30
    assert_close_to_oracle(Analyzer(model).analyze(some_encoding(13)), oracle(model, some_encoding(13)))


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_float32_end_to_end(family: str) -> None:
    """The whole float32 run, forward pass included, against the float64 model."""
    single = Analyzer(tiny(family, dtype=torch.float32)).analyze(some_encoding(11))
    for n, layer in enumerate(oracle(tiny(family), some_encoding(11))):
        for scope, expected in maps(layer).items():
            apart = (single[scope][n].double() - expected).abs() / expected.amax(-1, keepdim=True)
            assert float(apart.max()) < 1e-4, scope


@pytest.mark.parametrize("head", ["MaskedLM", "SequenceClassification", "TokenClassification"])
@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_task_heads(family: str, head: str) -> None:
    model = tiny(family, head)
    assert_exact(Analyzer(model).analyze(some_encoding(7)), oracle(model, some_encoding(7)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_activations(family: str, activation: str) -> None:
    model = tiny(family, hidden_act=activation)
    assert_exact(Analyzer(model).analyze(some_encoding(6)), oracle(model, some_encoding(6)))


@pytest.mark.parametrize(
    "options",
    [
        {"num_attention_heads": 1},
        {"hidden_size": 30, "num_attention_heads": 5, "intermediate_size": 17},
        {"num_hidden_layers": 1, "intermediate_size": 1},
        {"chunk_size_feed_forward": 1},
    ],
    ids=str,
)
def test_odd_sizes(options: dict[str, int]) -> None:
    model = tiny("bert", **options)
    assert_exact(Analyzer(model).analyze(some_encoding(7), heads=True), oracle(model, some_encoding(7)))


@pytest.mark.parametrize(
    "options", [{"num_hidden_groups": 2}, {"inner_group_num": 2}, {"num_hidden_layers": 5}], ids=str
)
def test_albert_shared_layers(options: dict[str, int]) -> None:
    model = tiny("albert", **options)
    result = Analyzer(model).analyze(some_encoding(5))
    assert_exact(result, oracle(model, some_encoding(5)))
    assert len(result.layers) == model.config.num_hidden_layers * model.config.inner_group_num


@pytest.mark.parametrize("family", BERT_FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(family: str, side: str) -> None:
    model = tiny(family)
    whole = some_encoding(9)
    pad = torch.full((1, 4), int(model.config.pad_token_id))
    parts = (pad, whole["input_ids"]) if side == "left" else (whole["input_ids"], pad)
    masks = (torch.zeros_like(pad), whole["attention_mask"])
    padded = {
        "input_ids": torch.cat(parts, 1),
        "attention_mask": torch.cat(masks if side == "left" else masks[::-1], 1),
    }
    assert_exact(Analyzer(model).analyze(padded), oracle(model, whole))


def test_pair_with_token_types_and_holes() -> None:
    model = tiny("bert")
    given = some_encoding(12)
    given["token_type_ids"] = torch.tensor([[0] * 5 + [1] * 7])
    given["attention_mask"][0, [3, 8]] = 0
    result = Analyzer(model).analyze(given, heads=True)
    assert [label.position for label in result.columns] == [0, 1, 2, 4, 5, 6, 7, 9, 10, 11]
    assert_exact(result, oracle(model, given))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    heads=st.integers(1, 4),
    head_width=st.integers(1, 5),
    hidden=st.integers(1, 20),
    length=st.integers(1, 11),
    seed=st.integers(0, 1000),
)
def test_any_shape(heads: int, head_width: int, hidden: int, length: int, seed: int) -> None:
    model = tiny(
        "bert", seed=seed, hidden_size=heads * head_width, num_attention_heads=heads, intermediate_size=hidden,
        num_hidden_layers=1, layer_norm_eps=1e-5,
    )  # fmt: skip
    result = Analyzer(model).analyze(some_encoding(length, seed))
    for n, layer in enumerate(oracle(model, some_encoding(length, seed))):
        for scope, expected in maps(layer).items():
            # one head or one dimension makes exact zeros, which no relative error describes
            top = float(expected.max())
            torch.testing.assert_close(result[scope][n], expected, rtol=1e-9, atol=1e-12 * max(top, 1e-3))


@pytest.mark.parametrize("scope", ["ATTN-N", "ATTNRES-N", "ATTNRESLN-N", "ATTNRESLNFF-N", "ATTNRESLNFFRES-N", "layer"])
def test_vectors(scope: str) -> None:
    model = tiny("bert")
    result = Analyzer(model).analyze(some_encoding(8))
    name = result.resolve(scope)
    for layer, expected in enumerate(oracle(model, some_encoding(8))):
        torch.testing.assert_close(result.vectors(scope, layer), expected.vectors[name], rtol=1e-9, atol=1e-12)
        few = result.vectors(scope, layer, rows=[0, -1])
        torch.testing.assert_close(few, expected.vectors[name][[0, -1]], rtol=1e-9, atol=1e-12)
        parts = result.parts(scope, layer)
        torch.testing.assert_close(parts.contributions.sum(1) + parts.bias, expected.actual[name])


def test_value_bias_to_the_remainder() -> None:
    model = tiny("bert")
    token = Analyzer(model).analyze(some_encoding(8))
    other = Analyzer(model).analyze(some_encoding(8), value_bias="remainder")
    assert float(other.completeness["ATTNRESLNFFRESLN-N"].max()) < 1e-12
    assert not torch.allclose(token["ATTN-N"], other["ATTN-N"])
    assert float((other.remainder("ATTN-N") - token.remainder("ATTN-N")).abs().min()) > 1e-6
    # without a value bias the two readings agree
    for name, parameter in model.named_parameters():
        if name.endswith("self.value.bias"):
            parameter.data.zero_()
    token, other = (Analyzer(model).analyze(some_encoding(8), value_bias=b) for b in ("token", "remainder"))
    torch.testing.assert_close(token["layer"], other["layer"])


def test_tangent_gate_is_not_complete_and_says_so() -> None:
    result = Analyzer(tiny("bert")).analyze(some_encoding(8), gate="tangent")
    assert float(result.completeness["ATTNRESLNFF-N"].max()) > 1e-3
    assert result.info["complete"] is False
    assert float(result.completeness["ATTNRESLN-N"].max()) < 1e-12
