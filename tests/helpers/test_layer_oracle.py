"""The naive reference for every layer type: complete, causal, and equal to results by hand."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from torch import Tensor

from tests.helpers import bert_oracle
from tests.helpers.layer_oracle import oracle
from tests.helpers.oracle_parts import OracleLayer, head_maps, integrated_gradients, maps, mixing
from tests.helpers.tiny import ALTERNATING, CAUSAL, ENCODER_DECODER, FLOAT32_NORMS, IMAGES, OTHER_FAMILIES, inputs, tiny

SINGLE_SCORES = ("gptj",)  # attention scores too: their rounding depends on the processor's matrix products
ENCODERS = ("modernbert", "deberta-v2", *IMAGES)
POST = "ATTN ATTNRES ATTNRESLN ATTNRESLNFF ATTNRESLNFFRES ATTNRESLNFFRESLN"
PRE = "LNATTN LNATTNRES LNATTNRESLN LNATTNRESLNFF LNATTNRESLNFFRES"
SANDWICH = "LNATTN LNATTNLN LNATTNLNRES LNATTNLNRESLN LNATTNLNRESLNFF LNATTNLNRESLNFFLN LNATTNLNRESLNFFLNRES"
POST_CROSS = (
    "ATTN ATTNRES ATTNRESLN XATTN ATTNRESLNXATTNRES ATTNRESLNXATTNRESLN ATTNRESLNXATTNRESLNFF "
    "ATTNRESLNXATTNRESLNFFRES ATTNRESLNXATTNRESLNFFRESLN"
)
PRE_CROSS = (
    "LNATTN LNATTNRES LNATTNRESLN XATTN LNATTNRESLNXATTNRES LNATTNRESLNXATTNRESLN LNATTNRESLNXATTNRESLNFF "
    "LNATTNRESLNXATTNRESLNFFRES"
)
SCOPES = {
    ("opt-post", "decoder"): POST,
    ("deberta-v2", "encoder"): POST,
    ("gpt_neox", "decoder"): "LNATTN LNATTNFFRES",
    ("gptj", "decoder"): "LNATTN LNATTNFFRES",
    ("gemma2", "decoder"): SANDWICH,
    ("gemma3_text", "decoder"): SANDWICH,
    ("bart", "encoder"): POST,
    ("marian", "encoder"): POST,
    ("bart", "decoder"): POST_CROSS,
    ("marian", "decoder"): POST_CROSS,
    ("t5", "decoder"): PRE_CROSS,
    ("t5-gated", "decoder"): PRE_CROSS,
    ("whisper", "decoder"): PRE_CROSS,
}


@cache
def reference(name: str) -> dict[str, list[OracleLayer]]:
    """The layers of the default model and input."""
    model = tiny(name)
    return oracle(model, inputs(name, model))


def assert_complete(layers: list[OracleLayer], tolerance: float) -> None:
    for layer in layers:
        for scope, actual in layer.actual.items():
            error = (layer.vectors[scope].sum(dim=1) + layer.bias[scope] - actual).norm(dim=-1)
            assert float((error / actual.norm(dim=-1)).max()) <= tolerance, scope


def assert_same(name: str, found: dict[str, list[OracleLayer]], expected: dict[str, list[OracleLayer]]) -> None:
    tolerance = 2e-6 if name in SINGLE_SCORES else 1e-9
    for stack, layers in expected.items():
        for one, other in zip(found[stack], layers, strict=True):
            torch.testing.assert_close(one.weights, other.weights, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(one.vectors, other.vectors, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(one.bias, other.bias, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_complete(name: str, length: int) -> None:
    model = tiny(name)
    stacks = oracle(model, inputs(name, model, length))
    expected = {"encoder", "decoder"} if name in ENCODER_DECODER else {"encoder" if name in ENCODERS else "decoder"}
    assert set(stacks) == expected
    for stack, layers in stacks.items():
        assert len(layers) >= 2
        assert_complete(layers, 2e-6 if name in FLOAT32_NORMS else 1e-9)
        scopes = [f"{scope}-N" for scope in SCOPES.get((name, stack), PRE).split()]
        assert all(list(layer.vectors) == scopes for layer in layers)


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_complete_in_float32(name: str) -> None:
    model = tiny(name, dtype=torch.float32)
    for layers in oracle(model, inputs(name, model)).values():
        assert_complete(layers, 1e-5)


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_heads(name: str) -> None:
    """A model with a head has the layers of its base model, and runs."""
    if name in ENCODER_DECODER:
        heads = ["Seq2SeqLM"]
    elif name in IMAGES:
        heads = ["ImageClassification"]
    else:
        heads = ["MaskedLM", "SequenceClassification"] if name in ENCODERS else ["CausalLM"]
    for head in heads:
        model = tiny(name, head)
        encoding = inputs(name, model)
        with torch.no_grad():
            assert model(**encoding).logits.isfinite().all()
        for layers in oracle(model, encoding).values():
            assert_complete(layers, 2e-6 if name in FLOAT32_NORMS else 1e-9)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("modernbert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
        ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": True}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("bart", {"decoder_attention_heads": 3, "decoder_ffn_dim": 17}),
        ("gemma3_text", {"num_hidden_layers": 3}),
        ("gpt_oss", {"swiglu_limit": 7.0}),
        ("dinov2", {"qkv_bias": False}),
    ],
    ids=str,
)
def test_options(name: str, options: dict[str, object]) -> None:
    model = tiny(name, **options)
    for layers in oracle(model, inputs(name, model)).values():
        assert_complete(layers, 2e-6 if name in FLOAT32_NORMS else 1e-9)


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_no_parameter_is_at_its_identity(name: str) -> None:
    model = tiny(name)
    for path, parameter in model.state_dict().items():
        for identity in (0.0, 1.0):
            assert float((parameter - identity).abs().min()) > 0, path
        assert parameter.numel() == 1 or float(parameter.std()) > 0.02, path


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_reproducible(name: str) -> None:
    state = torch.random.get_rng_state()
    one, same, other = tiny(name), tiny(name), tiny(name, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    for path, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(path)), path
        assert not torch.equal(parameter, other.get_parameter(path)), path


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_attention_rows(name: str) -> None:
    for layers in reference(name).values():
        for layer in layers:
            for weights in (layer.weights, layer.cross_weights):
                if weights is None:
                    continue
                sums = weights.sum(dim=-1)
                if name == "gpt_oss":  # the sink takes its share
                    assert float(sums.max()) < 1
                    assert float(sums.min()) < 0.9
                else:
                    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [*CAUSAL, *ENCODER_DECODER])
def test_causal(name: str) -> None:
    for layer in reference(name)["decoder"]:
        for vectors in layer.vectors.values():
            n = len(vectors)
            assert all(float(vectors[i, i + 1 : n].abs().sum()) == 0 for i in range(n))


@pytest.mark.parametrize("name", ["mistral", *ALTERNATING, "modernbert"])
def test_sliding_window(name: str) -> None:
    (layers,) = reference(name).values()
    everywhere = ["sliding_attention"] * len(layers)
    for kind, layer in zip(getattr(tiny(name).config, "layer_types", None) or everywhere, layers, strict=True):
        apart = (torch.arange(9)[:, None] - torch.arange(9)).abs()
        outside = apart > 3  # a causal window of 4 tokens, or 3 to each side
        assert (float(layer.weights[:, outside].sum()) == 0) == (kind == "sliding_attention")


def padded(encoding: dict[str, Tensor], side: str) -> dict[str, Tensor]:
    """Three more tokens on one side of every text."""
    result = {}
    for key, value in encoding.items():
        pad = torch.zeros(1, 3, dtype=value.dtype)
        result[key] = torch.cat((pad, value) if side == "left" else (value, pad), 1) if value.dim() == 2 else value
    return result


@pytest.mark.parametrize("name", [name for name in OTHER_FAMILIES if name not in IMAGES])
def test_right_padding(name: str) -> None:
    model = tiny(name)
    assert_same(name, oracle(model, padded(inputs(name, model), "right")), reference(name))


@pytest.mark.parametrize("name", [name for name in OTHER_FAMILIES if name not in (*IMAGES, "bart", "marian")])
def test_left_padding(name: str) -> None:
    """With position ids if the model needs them; BART and Marian always count from the first token, padding or not."""
    model = tiny(name)
    given = padded(inputs(name, model), "left")
    if name == "whisper":
        given["decoder_position_ids"] = (given["decoder_attention_mask"].cumsum(-1) - 1).clamp_min(0)
    elif name not in ("t5", "t5-gated"):
        given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    assert_same(name, oracle(model, given), reference(name))


def test_agrees_with_the_post_ln_oracle() -> None:
    model = tiny("bert")
    encoding = inputs("bert", model, 7)
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)
    for found, expected in zip(oracle(model, encoding)["encoder"], bert_oracle.oracle(model, encoding), strict=True):
        close(found.vectors, expected.vectors)
        close(found.bias, expected.bias)
        close(found.actual, expected.actual)
        close(maps(found), maps(expected))
        close(mixing(found), mixing(expected))
        close(head_maps(found), head_maps(expected))


def test_weights_by_hand() -> None:
    """The mean over heads A, 0.5 A + 0.5 I, and their mixing ratios, 1 - A_ii and (1 - A_ii) / 2."""
    model = tiny("bert")
    for layer in bert_oracle.oracle(model, inputs("bert", model, 7)):
        average = layer.weights.mean(dim=0)
        others = 1 - average.diagonal()
        torch.testing.assert_close(maps(layer)["ATTN-W"], average)
        torch.testing.assert_close(maps(layer)["ATTNRES-W"], (average + torch.eye(7, dtype=torch.float64)) / 2)
        torch.testing.assert_close(mixing(layer)["ATTN-W"], others)
        torch.testing.assert_close(mixing(layer)["ATTNRES-W"], others / 2)


def test_gated_gradients_by_hand() -> None:
    """ReLU(a) u: for a > 0 the product a u, whose gradients integrate to u / 2 and a / 2; otherwise zero."""
    a = torch.tensor([3.5, -2.0, 0.25], dtype=torch.float64)
    u = torch.tensor([-1.5, 4.0, 8.5], dtype=torch.float64)
    gate, up = integrated_gradients(lambda x, y: x.relu() * y, a, u)
    torch.testing.assert_close(gate, torch.tensor([-0.75, 0.0, 4.25], dtype=torch.float64))
    torch.testing.assert_close(up, torch.tensor([1.75, 0.0, 0.125], dtype=torch.float64))


def test_clamped_gradients_by_hand() -> None:
    """min(a, 1) u at a = 2: the clamp acts from t = 1/2 on, so dF/da integrates to u / 8 and dF/du to 3 / 4."""
    a, u = torch.tensor([2.0], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)
    gate, up = integrated_gradients(lambda x, y: x.clamp(max=1) * y, a, u)
    torch.testing.assert_close(gate, u / 8)
    torch.testing.assert_close(up, torch.tensor([0.75], dtype=torch.float64))


FF_MODULES = {
    "llama": ("LNATTNRESLN", "layers.1.mlp"),
    "phi3": ("LNATTNRESLN", "layers.1.mlp"),
    "gemma2": ("LNATTNLNRESLN", "layers.1.mlp"),
    "modernbert": ("LNATTNRESLN", "layers.1.mlp"),
    "t5-gated": ("LNATTNRESLN", "encoder.block.1.layer.1.DenseReluDense"),
}


@pytest.mark.parametrize("name", FF_MODULES)
def test_feed_forward_against_the_module(name: str) -> None:
    """Without biases the contribution of z is the integral over t of (Jacobian of the module at t x) z."""
    model = tiny(name)
    scope, path = FF_MODULES[name]
    layer = next(iter(oracle(model, inputs(name, model, 5)).values()))[1]
    z, x = layer.vectors[f"{scope}-N"], layer.actual[f"{scope}-N"]
    module = model.get_submodule(path)
    steps = 1000
    expected = torch.zeros_like(z)
    for t in (torch.arange(steps, dtype=torch.float64) + 0.5) / steps:
        at = (t * x)[:, None].repeat(1, len(z), 1)
        expected += torch.func.jvp(module, (at,), (z,))[1].detach() / steps
    torch.testing.assert_close(layer.vectors[f"{scope}FF-N"], expected, rtol=1e-5, atol=1e-5)
    assert all(float(bias.abs().sum()) == 0 for bias in layer.bias.values())


def test_mixture_is_the_sum_of_its_experts() -> None:
    """With every expert chosen and all shares equal, the mixture is a mean of plain gated networks."""
    model = tiny("mixtral", num_experts_per_tok=4)
    for layer in model.layers:
        layer.mlp.gate.weight.data.zero_()
    encoding = inputs("mixtral", model, 5)
    dense = tiny("llama", rms_norm_eps=model.config.rms_norm_eps, intermediate_size=4 * 36)
    state = {path: value for path, value in model.state_dict().items() if ".mlp." not in path}
    for n, layer in enumerate(model.layers):
        gate, up = layer.mlp.experts.gate_up_proj.chunk(2, dim=1)
        state[f"layers.{n}.mlp.gate_proj.weight"] = gate.reshape(-1, 24)
        state[f"layers.{n}.mlp.up_proj.weight"] = up.reshape(-1, 24)
        state[f"layers.{n}.mlp.down_proj.weight"] = torch.cat(tuple(layer.mlp.experts.down_proj), dim=1) / 4
    dense.load_state_dict(state)
    dense.config.rope_parameters = model.config.rope_parameters
    dense.rotary_emb = model.rotary_emb
    for one, other in zip(oracle(model, encoding)["decoder"], oracle(dense, encoding)["decoder"], strict=True):
        torch.testing.assert_close(one.vectors, other.vectors, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt_neox", "gptj"])
def test_parallel_feed_forward_is_the_own_tokens(name: str) -> None:
    for layer in reference(name)["decoder"]:
        difference = layer.vectors["LNATTNFFRES-N"] - layer.vectors["LNATTN-N"]
        own = torch.eye(9, dtype=torch.bool)
        assert float(difference[~own].abs().max()) == 0
        assert float(difference[own].abs().min()) > 0


def test_layer_scale_acts_after_the_scope() -> None:
    model = tiny("dinov2")
    for n, layer in enumerate(reference("dinov2")["encoder"]):
        scale = next(v for k, v in model.named_parameters() if k.endswith(f".{n}.layer_scale1.lambda1")).detach()
        scaled = scale * layer.vectors["LNATTN-N"]
        other = ~torch.eye(len(scaled), dtype=torch.bool)
        torch.testing.assert_close(scaled[other], layer.vectors["LNATTNRES-N"][other])


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_cross_attention(name: str) -> None:
    for layer in reference(name)["decoder"]:
        found, ratios, heads = maps(layer), mixing(layer), head_maps(layer)
        n, columns = found["XATTN-N"].shape
        assert layer.cross_weights is not None
        assert layer.cross_weights.shape == (4, n, columns - n)
        assert all(values.shape == (n, columns) for values in found.values())
        for scope in ("XATTN-W", "XATTN-N"):
            assert float(found[scope][:, :n].abs().max()) == 0
            assert float(found[scope][:, n:].min()) > 0
            assert torch.equal(ratios[scope], torch.ones(n, dtype=torch.float64))
        for scope in ("ATTN-W", next(iter(layer.vectors))):
            assert float(found[scope][:, n:].abs().max()) == 0
        assert all(values.shape == (4, n, columns) for values in heads.values())
        assert set(found) == {*ratios}


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_maps_and_mixing(name: str) -> None:
    for layers in reference(name).values():
        for layer in layers:
            found, ratios = maps(layer), mixing(layer)
            torch.testing.assert_close(found["ATTN-W"], head_maps(layer)["ATTN-W"].mean(dim=0))
            for scope, values in found.items():
                assert values.isfinite().all()
                assert float(ratios[scope].min()) >= 0
                assert float(ratios[scope].max()) <= 1
            residual = [scope for scope in found if scope.endswith("RES-W")]
            assert len(residual) == (0 if name in ("gpt_neox", "gptj") else 1)
