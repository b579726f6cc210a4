"""Every family other than BERT and its kin: every scope against the naive oracle, and changes that must not affect the
numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import normscope.engine.batch
import normscope.engine.request
import normscope.engine.run
from normscope import Analysis, Analyzer, NormscopeError
from normscope.decompose import layer as layer_module
from normscope.decompose import state
from normscope.models.versions import installed_version, sdpa_ignores
from tests.helpers import layer_oracle, oracle_parts
from tests.helpers.compare import assert_close, assert_same, assert_same_sides, refused, sides, state_of
from tests.helpers.oracle_parts import OracleLayer
from tests.helpers.tiny import CAUSAL, ENCODER_DECODER, GATED, IMAGES, OTHER_FAMILIES, inputs, tiny

TEXTS = tuple(name for name in OTHER_FAMILIES if name not in (*IMAGES, "whisper"))
# transformers computes nothing of these in float32 when the model is in float64
PURE = ("gpt2", "gptj", "deberta-v2", "bart", "marian", "whisper", "dinov2", "dinov2-swiglu")
BIASED = (  # value biases or norm shifts
    "gpt2", "opt", "opt-post", "gpt_neox", "gpt_neox-sequential", "gptj", "qwen2", "gpt_oss", "deberta-v2", "bart",
    "marian", "whisper", "vit", "deit", "dinov2_with_registers", "dinov2", "dinov2-swiglu",
)  # fmt: skip
LENGTHS = {1: 13, 2: 1, 13: 2, 9: 6}  # of an input -> of its target

Layers = dict[str, list[OracleLayer]]


# Models, results and oracles are made once; tests that change a model make their own with `tiny`.


@cache
def shared(name: str, dtype: torch.dtype = torch.float64) -> Analyzer:
    return Analyzer(tiny(name, dtype=dtype))


def given(name: str, length: int = 9, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return inputs(name, shared(name, dtype).model, length, LENGTHS[length])


@cache
def found(name: str, length: int = 9, dtype: torch.dtype = torch.float64) -> Any:
    return shared(name, dtype).analyze(given(name, length, dtype), heads=True)


@cache
def expected(name: str, length: int = 9, dtype: torch.dtype = torch.float64) -> Layers:
    return layer_oracle.oracle(shared(name, dtype).model, given(name, length, dtype))


def lengths(*wanted: int) -> list[Any]:
    """(family, length): pictures have one length, sounds too (but not their targets)."""
    return [(name, n) for name in OTHER_FAMILIES for n in (wanted if name not in IMAGES else wanted[-1:])]


def pairs(result: Any, layers: Layers) -> Iterator[tuple[Analysis, int, OracleLayer]]:
    """Each layer of the oracle with the analysis of its side and its place there."""
    assert sides(result).keys() == layers.keys()
    for side, analysis in sides(result).items():
        assert analysis.layers == tuple(range(len(layers[side])))
        for n, layer in enumerate(layers[side]):
            yield analysis, n, layer


def tolerance_of(name: str) -> float:
    """The tolerance for results that differ in the order of sums (GPT-J's attention scores are always in float32)."""
    return 1e-11 if name in PURE and name != "gptj" else 1e-6


def assert_exact(result: Any, layers: Layers, limit: float = 1e-12) -> None:
    """Float64: every cell of every scope, mixing ratios, remainders, head-level maps, norms of values; completeness."""
    exact = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-14)
    for analysis, n, layer in pairs(result, layers):
        maps, mixing = oracle_parts.maps(layer), oracle_parts.mixing(layer)
        assert analysis.scopes == tuple(maps)
        assert analysis.mixing_scopes == tuple(scope for scope in maps if not scope.startswith("XATTN"))
        for scope, cells in maps.items():
            exact(analysis[scope][n], cells)
            assert torch.equal(analysis[scope][n] == 0, cells == 0), scope
            if scope in analysis.mixing_scopes:
                exact(analysis.mixing_ratio(scope)[n], mixing[scope], atol=1e-12)
            bias = layer.bias[scope].norm(dim=-1) if scope in layer.bias else torch.zeros(len(cells)).double()
            exact(analysis.remainder(scope)[n], bias, atol=1e-12)
        if analysis.heads:
            heads = oracle_parts.head_maps(layer)
            assert set(analysis.heads) == set(heads)
            for scope, cells in heads.items():
                exact(analysis.heads[scope][n], cells)
            norms = [layer.value_norms] + ([] if layer.cross_value_norms is None else [layer.cross_value_norms])
            assert analysis.value_norms is not None
            exact(analysis.value_norms[n], torch.cat(norms, dim=-1))
    for side, analysis in sides(result).items():
        for scope, error in analysis.completeness.items():
            assert float(error.max()) <= limit, (side, scope)


# --- against the oracle ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "length"), lengths(1, 2, 13, 9))
def test_float64(name: str, length: int) -> None:
    assert_exact(found(name, length), expected(name, length), 1e-12 if name in PURE else 1e-6)


@pytest.mark.parametrize(("name", "length"), lengths(1, 13))
def test_float32_on_the_same_trace(name: str, length: int) -> None:
    for analysis, n, layer in pairs(found(name, length, torch.float32), expected(name, length, torch.float32)):
        for scope, cells in oracle_parts.maps(layer).items():
            assert analysis[scope].dtype == torch.float32
            apart = (analysis[scope][n].double() - cells).abs()
            assert float((apart / cells.amax(-1, keepdim=True)).max()) < 2e-6, scope
            seen = cells > 1e-30
            assert float((apart[seen] / cells[seen]).max()) < 1e-4, scope
            assert float(analysis.completeness[scope][n]) < 1e-5, scope


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_float32_end_to_end(name: str) -> None:
    """The whole float32 run, forward pass included, against the float64 model."""
    length = 9 if name in IMAGES else 13
    for analysis, n, layer in pairs(found(name, length, torch.float32), expected(name, length)):
        for scope, cells in oracle_parts.maps(layer).items():
            apart = (analysis[scope][n].double() - cells).abs() / cells.amax(-1, keepdim=True)
            assert float(apart.max()) < 1e-4, scope


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_vectors(name: str) -> None:
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    for analysis, n, layer in pairs(found(name), expected(name)):
        if n != len(analysis.layers) - 1:
            continue
        for scope, vectors in layer.vectors.items():
            parts = analysis.parts(scope, n)
            close(parts.contributions, vectors)
            close(parts.bias, layer.bias[scope])
            close(parts.actual, layer.actual[scope])
            close(parts.contributions.norm(dim=-1), analysis[scope][n])
        close(analysis.vectors("layer", n, rows=[-1, 0]), vectors[[-1, 0]])


@pytest.mark.parametrize("name", [name for name in OTHER_FAMILIES if name not in ("qwen3", "gemma3_text", "marian")])
@pytest.mark.parametrize("rows", [[-1], [0, -1]], ids=str)
def test_some_rows(name: str, rows: list[int]) -> None:
    """Rows are the decoder's in an encoder-decoder; the encoder is whole."""
    some, whole = shared(name).analyze(given(name), heads=True, rows=rows), found(name)
    (*encoder, last) = sides(whole)
    for side in encoder:
        assert_same(sides(some)[side], sides(whole)[side], 1e-12)
    one, other = sides(some)[last], sides(whole)[last]
    assert one.rows == tuple(other.rows[n] for n in rows)
    assert one.columns == other.columns
    for scope in other.scopes:
        assert_close(one[scope], other[scope][:, rows], 1e-12)
        if scope in other.mixing_scopes:
            assert_close(one.mixing_ratio(scope), other.mixing_ratio(scope)[:, rows], 1e-12)
        torch.testing.assert_close(one.remainder(scope), other.remainder(scope)[:, rows], rtol=1e-12, atol=1e-12)
        assert float(one.completeness[scope].max()) <= (1e-12 if name in PURE else 1e-6)
    for scope in other.heads:
        assert_close(one.heads[scope], other.heads[scope][:, :, rows], 1e-12)
    torch.testing.assert_close(one.vectors("layer", 0), other.vectors("layer", 0)[rows], rtol=1e-12, atol=1e-12)


VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("opt", {"enable_bias": False}),
    ("opt", {"activation_function": "gelu"}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"hidden_act": "mish"}),  # no closed form
    ("llama", {"hidden_act": "relu"}),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 4}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2", {"n_inner": None}),
    ("gpt_neox", {"attention_bias": False}),
    ("gemma2", {"attn_logit_softcapping": 2.0}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("modernbert", {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("mixtral", {"num_experts_per_tok": 4}),
    ("gpt_oss", {"swiglu_limit": 7.0}),
    ("bart", {"encoder_layers": 1, "decoder_layers": 3, "scale_embedding": True}),
    ("bart", {"decoder_ffn_dim": 20, "activation_function": "relu"}),
    ("marian", {"activation_function": "swish"}),
    ("t5-gated", {"feed_forward_proj": "gated-silu"}),
    ("t5", {"feed_forward_proj": "gelu_new", "d_kv": 6}),
    ("vit", {"qkv_bias": False, "hidden_act": "quick_gelu"}),
    ("deberta-v2", {"relative_attention": False}),
    ("deberta-v2", {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}),
)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_variants(name: str, options: dict[str, Any]) -> None:
    model = tiny(name, **options)
    encoding = inputs(name, model)
    assert_exact(Analyzer(model).analyze(encoding, heads=True), layer_oracle.oracle(model, encoding), 1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deberta-v2", {"conv_kernel_size": 3}),
        ("gpt2", {"add_cross_attention": True}),
    ],
    ids=str,
)
def test_variants_that_are_refused(name: str, options: dict[str, Any]) -> None:
    ((attribute, value),) = options.items()
    refused(lambda: Analyzer(tiny(name, **options)), f"{attribute}={value!r}", "cannot be decomposed")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj", "mistral", "mixtral", "gpt_oss", "modernbert", "bart", "t5"])
def test_holes(name: str) -> None:
    """Tokens masked inside the input are neither rows nor columns; positions stay."""
    encoding = given(name)
    encoding["attention_mask"][0, [3, 5]] = 0
    if name in ENCODER_DECODER:
        encoding["decoder_attention_mask"][0, 2] = 0
    result = shared(name).analyze(encoding, heads=True)
    (first, *rest) = sides(result).values()
    assert [label.position for label in first.rows] == [0, 1, 2, 4, 6, 7, 8]
    assert all([label.position for label in one.rows] == [0, 1, 3, 4, 5] for one in rest)
    assert_exact(result, layer_oracle.oracle(shared(name).model, encoding), 1e-12 if name in PURE else 1e-6)


# --- nothing depends on padding, batches, heads, backends ------------------------------------------------------------


def padded(encoding: dict[str, Tensor], side: str) -> dict[str, Tensor]:
    """Three masked tokens on one side of every sequence."""
    result = {}
    for key, tensor in encoding.items():
        pad = torch.full((1, 3), 0 if key.endswith("mask") else 7) if tensor.dim() == 2 else tensor[:, :0]
        result[key] = torch.cat((pad, tensor) if side == "left" else (tensor, pad), 1)
    return result


@pytest.mark.parametrize("name", [*TEXTS, "whisper"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_gone(name: str, side: str) -> None:
    assert_same_sides(shared(name).analyze(padded(given(name), side), heads=True), found(name), 1e-12)


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_batches(name: str) -> None:
    """Several lengths, more than one batch; each result equals that of the input alone."""
    lens = shared(name)
    wanted = [(5, 3), (9, 6), (1, 8), (9, 1), (6, 6), (12, 2), (2, 2)]
    many = [inputs(name, lens.model, *sizes, seed=seed) for seed, sizes in enumerate(wanted)]
    together = list(lens.stream(many, batch_size=3, heads=True))
    assert len(together) == len(many)
    for one, result in zip(many, together, strict=True):
        assert_same_sides(result, lens.analyze(one, heads=True), tolerance_of(name))
    for one, result in zip(many, lens.stream(many, batch_size=16, rows=[-1], scopes="layer"), strict=True):
        assert_same_sides(result, lens.analyze(one, rows=[-1], scopes="layer"), tolerance_of(name))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "mixtral", "vit"])
def test_a_batch_given_as_one_encoding(name: str) -> None:
    lens = shared(name)
    ones = [inputs(name, lens.model, seed=seed) for seed in range(3)]
    batch = {key: torch.cat([one[key] for one in ones]) for key in ones[0]}
    for one, result in zip(ones, lens.stream(batch), strict=True):
        assert_same_sides(result, lens.analyze(one), tolerance_of(name))
    with pytest.raises(NormscopeError, match="3 inputs"):
        lens.analyze(batch)


TASKS = (
    *((name, "CausalLM") for name in CAUSAL),
    *((name, "Seq2SeqLM") for name in ENCODER_DECODER),
    *((name, "ImageClassification") for name in IMAGES),
    *((name, "MaskedLM") for name in ("modernbert", "deberta-v2")),
    *(
        (name, "SequenceClassification")
        for name in ("gpt2", "opt", "llama", "gemma2", "modernbert", "deberta-v2", "bart", "t5", "mixtral")
    ),
)


@pytest.mark.parametrize(("name", "head"), TASKS)
def test_task_heads(name: str, head: str) -> None:
    model = tiny(name, head)
    encoding = inputs(name, model)
    result = Analyzer(model).analyze(encoding, heads=True)
    assert_same_sides(result, Analyzer(model.base_model).analyze(encoding, heads=True), 0)
    assert_exact(result, layer_oracle.oracle(model, encoding), 1e-12 if name in PURE else 1e-6)


def disturbed(model: PreTrainedModel) -> dict[str, Any]:
    """`state_of`, and the attention implementation of each part of the model."""
    configs = [vars(module)["config"] for module in model.modules() if "config" in vars(module)]
    return state_of(model) | {
        "implementations": [config._attn_implementation for config in configs],
        "configs": [id(config) for config in configs],
        "experts": [getattr(config, "_experts_implementation", None) for config in configs],
    }


@pytest.mark.parametrize("name", OTHER_FAMILIES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations(name: str, implementation: str) -> None:
    """The same maps with every implementation, and the model is left unchanged, sub-configs included."""
    model = tiny(name)
    if implementation == "sdpa" and sdpa_ignores(model.config, installed_version()):
        pytest.skip("refused")
    try:
        model.set_attn_implementation(implementation)
    except ValueError as error:
        pytest.skip(str(error).splitlines()[0])
    encoding = inputs(name, model)
    with torch.no_grad():
        put_out = model(**encoding)[0]
    before = disturbed(model)
    result = Analyzer(model).analyze(encoding, heads=True)
    list(sides(result).values())[-1].vectors("layer", 0)
    assert disturbed(model) == before
    assert_same_sides(result, found(name), tolerance_of(name))
    with torch.no_grad():
        assert torch.equal(model(**encoding)[0], put_out)


@pytest.mark.parametrize("name", ["llama", "gptj", "bart", "t5", "whisper", "gpt_oss", "dinov2"])
def test_left_as_found_after_an_exception(name: str) -> None:
    model = tiny(name)
    encoding = inputs(name, model)
    before = disturbed(model)

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    lens = Analyzer(model)
    with pytest.raises(KeyboardInterrupt):
        lens.analyze(encoding, progress=interrupt)
    assert disturbed(model) == before
    assert_same_sides(lens.analyze(encoding, heads=True), found(name), 1e-12)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_implementations_of_experts(name: str) -> None:
    """In float32 the default is a grouped product, in float64 it must be set to eager."""
    model = tiny(name, dtype=torch.float32)
    encoding = inputs(name, model)
    first = Analyzer(model).analyze(encoding)
    model.set_experts_implementation("eager")
    before = disturbed(model)
    assert_same_sides(Analyzer(model).analyze(encoding), first, 1e-5)
    assert disturbed(model) == before


def test_model_in_training_mode() -> None:
    model = tiny("llama").train()
    with pytest.raises(NormscopeError, match="training mode"):
        Analyzer(model).analyze(inputs("llama", model))
    assert model.training


# --- who can see whom ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CAUSAL, *ENCODER_DECODER])
def test_the_future_is_exactly_zero(name: str) -> None:
    length = 9 if name in ENCODER_DECODER else 13
    decoder = sides(found(name, length))["decoder"]
    n = len(decoder.rows)
    ahead = torch.ones(n, n).triu(1).bool()
    for scope in decoder.scopes:
        cells = decoder[scope][:, :, :n]
        assert not cells[:, ahead].any(), scope
        assert bool((cells.diagonal(dim1=1, dim2=2) > 0).all()) or scope.startswith("XATTN"), scope
    for scope in decoder.heads:
        assert not decoder.heads[scope][..., :n][..., ahead].any(), scope


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "modernbert"])
def test_sliding_windows(name: str) -> None:
    """Exactly zero outside the window at every scope; not inside, nor in layers without a window."""
    model, result = shared(name).model, found(name, 13)
    apart = torch.arange(13)[:, None] - torch.arange(13)
    local = {"mistral": (0, 1), "modernbert": (1, 2)}.get(name, (0,))
    window = model.config.local_attention // 2 + 1 if name == "modernbert" else model.config.sliding_window
    far = apart.abs() >= window if name == "modernbert" else apart >= window
    near = apart.abs() < window if name == "modernbert" else (apart >= 0) & (apart < window)
    assert far.any()
    for scope in result.scopes:
        for n in result.layers:
            assert bool((result[scope][n][near] > 0).all())
            assert bool((result[scope][n][far] == 0).all()) == (n in local), (scope, n)


def test_encoder_decoder_columns() -> None:
    """The decoder's own tokens, then the encoder's; before the cross-attention the latter have no share, and the
    cross-attention alone has none of the former."""
    for name in ENCODER_DECODER:
        result = found(name)
        own = len(result.decoder.rows)
        assert [label.side for label in result.decoder.columns[:own]] == ["decoder"] * own
        assert result.decoder.columns[own:] == result.encoder.rows
        reads = False
        for scope in result.decoder.scopes:
            reads |= scope == "XATTN-W"
            assert bool((result.cross(scope) > 0).all()) == bool(result.cross(scope).any()) == reads, scope
            assert bool(result.decoder[scope][..., :own].any()) == (not scope.startswith("XATTN")), scope
        assert float((result.cross("XATTN-W").sum(-1) - 1).abs().max()) < 1e-6


@pytest.mark.parametrize("scopes", ["cross-attention", ["XATTN-W"], "layer", ["weights", "XATTN-N"]], ids=str)
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_scopes_of_one_side(name: str, scopes: Any) -> None:
    some, whole = shared(name).analyze(given(name), scopes=scopes, layers=[1]), found(name)
    assert (some.encoder is None) == (scopes in ("cross-attention", ["XATTN-W"]))
    for side, analysis in sides(some).items():
        assert analysis.layers == (1,)
        for scope in analysis.scopes:
            assert_close(analysis[scope][0], sides(whole)[side][scope][1], 1e-12)


def test_layers_of_stacks_of_unequal_depth() -> None:
    """T5's decoder here has three layers, its encoder two."""
    lens = shared("t5")
    assert lens.depth == 3
    some = lens.analyze(given("t5"), layers=[2])
    assert some.decoder.layers == (2,)
    assert_close(some.decoder["layer"][0], found("t5").decoder["layer"][2], 1e-12)
    assert some.encoder is None or some.encoder.layers == ()
    both = lens.analyze(given("t5"), layers=[1, 2])
    assert both.encoder.layers == (1,)
    assert both.decoder.layers == (1, 2)


# --- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_frozen_gate(name: str) -> None:
    """Complete; for a plain feed-forward it is the closed form itself, and nothing before the feed-forward changes."""
    call = partial(shared(name).analyze, given(name), gate="frozen", heads=True)
    if name == "gpt_oss":
        with pytest.raises(NormscopeError, match="frozen"):
            call()
        return
    result = call()
    for side, analysis in sides(result).items():
        other = sides(found(name))[side]
        assert analysis.info["gate"] == "frozen"
        assert analysis.info["complete"] is True
        for scope, error in analysis.completeness.items():
            assert float(error.max()) <= (1e-12 if name in PURE else 1e-6), scope
            if "FF" in scope and name in GATED:
                assert not torch.allclose(analysis[scope], other[scope], rtol=1e-3)
            else:
                assert_close(analysis[scope], other[scope], 1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "t5-gated", "gpt2", "mixtral", "gemma2", "gptj"])
def test_tangent_gate_is_not_complete_and_says_so(name: str) -> None:
    result = shared(name).analyze(given(name), gate="tangent")
    for side, analysis in sides(result).items():
        other = sides(found(name))[side]
        assert analysis.info["complete"] is False
        for scope, error in analysis.completeness.items():
            if "FF" in scope:
                assert float(error.max()) > 1e-3, scope
            else:
                assert float(error.max()) <= (1e-12 if name in PURE else 1e-6), scope
                assert_close(analysis[scope], other[scope], 1e-12)


@pytest.mark.parametrize("name", ["llama", "gemma2", "dinov2-swiglu", "t5-gated"])
@pytest.mark.parametrize("gate", ["frozen", "tangent"])
def test_gates_by_hand(name: str, gate: str) -> None:
    """(g(a) * (c W_up)) W_down, and with the slope also (g'(a) * u * (c W_gate)) W_down, of the vectors before."""
    result = shared(name).analyze(given(name), gate=gate)
    stacks = layer_oracle.describe(shared(name).model.config)
    side, analysis = next(iter(sides(result).items()))
    layer = next(m for path, m in shared(name).loaded.base.named_modules() if re.fullmatch(stacks[side].layers, path))
    ff: Any = stacks[side].blocks[-1].branches[0].op
    if ff.fused:
        pytest.skip("one projection for both in this version of transformers")
    (gate_weight, gate_bias), (up_weight, up_bias) = (layer_oracle.linear(layer.get_submodule(p)) for p in ff.inputs)
    out, out_bias = layer_oracle.linear(layer.get_submodule(ff.output))
    function: Callable[[Tensor], Tensor] = layer.get_submodule(ff.activation)
    scope = analysis.resolve("ff")
    parts = analysis.parts(scope.removesuffix("FF-N") + "-N", 0)
    made = analysis.parts(scope, 0)
    a, u = parts.actual @ gate_weight + gate_bias, parts.actual @ up_weight + up_bias
    a = a.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(function(a).sum(), a)
    a, u = a.detach(), u.detach()
    on_gate, on_up = (slope * u if gate == "tangent" else torch.zeros_like(u)), function(a)

    def through(vectors: Tensor, share: float) -> Tensor:
        first = vectors @ gate_weight + share * gate_bias
        second = vectors @ up_weight + share * up_bias
        if vectors.dim() == 3:
            return (on_gate[:, None] * first + on_up[:, None] * second) @ out
        return (on_gate * first + on_up * second) @ out + share * out_bias

    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9 if name in PURE else 1e-6)
    close(made.contributions, through(parts.contributions, 0).detach())
    close(made.bias, through(parts.bias, 1).detach())
    close(analysis[scope][0], made.contributions.norm(dim=-1))


def constant(name: str, layer: Any, op: Any, pre: str | None, heads: int) -> Tensor:
    """(H, d): the contribution of the value bias and of the shift of the norm before it to f^h of every token."""
    weight, bias = layer_oracle.linear(layer.get_submodule(op.value))
    norm = layer_oracle.norm_of(layer.get_submodule(pre)) if pre is not None and not op.cross else None
    values = bias if norm is None else norm.beta @ weight + bias
    out, _ = layer_oracle.linear(layer.get_submodule(op.output))
    width = len(out) // heads
    if op.layout == "tail":
        values = values[-((len(values) - len(out)) // 2) :]
    elif op.layout == "heads":
        values = values.reshape(heads, 3, width)[:, 2].flatten()
    groups = len(out) // len(values)
    each = values.reshape(-1, width).repeat_interleave(groups, 0)
    return torch.einsum("hk,hkd->hd", each, out.reshape(heads, width, -1)).detach()


@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_value_bias_to_the_remainder(name: str) -> None:
    """Complete everywhere; attention has less of exactly the constants, and without constants nothing changes."""
    result = shared(name).analyze(given(name), value_bias="remainder")
    token, layers, stacks = found(name), expected(name), layer_oracle.describe(shared(name).model.config)
    for side, analysis in sides(result).items():
        for scope, error in analysis.completeness.items():
            assert float(error.max()) <= (1e-12 if name in PURE else 1e-6), scope
        if name not in BIASED:
            for scope in analysis.scopes:
                assert_close(analysis[scope], sides(token)[side][scope], 1e-12)
            continue
        assert not torch.allclose(analysis["layer"], sides(token)[side]["layer"], rtol=1e-3)
        modules = [m for path, m in shared(name).loaded.base.named_modules() if re.fullmatch(stacks[side].layers, path)]
        for block in stacks[side].blocks:
            branch = block.branches[0]
            op: Any = branch.op
            if not isinstance(op, layer_oracle.Attention):
                continue
            scope = analysis.resolve("cross-attention" if op.cross else "attention")
            layer = layers[side][0]
            weights = layer.cross_weights if op.cross else layer.weights
            assert weights is not None
            less = constant(name, modules[0], op, branch.pre, len(weights))
            columns = slice(-weights.shape[2], None) if op.cross else slice(0, weights.shape[2])
            vectors = layer.vectors[scope].clone()
            vectors[:, columns] -= torch.einsum("hij,hd->ijd", weights, less)
            torch.testing.assert_close(analysis.vectors(scope, 0), vectors, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(analysis[scope][0], vectors.norm(dim=-1), rtol=1e-9, atol=1e-14)


# --- in pieces -------------------------------------------------------------------------------------------------------

PIECES = ("llama", "gpt2", "bart", "gemma2", "gptj", "mixtral", "t5-gated")


@pytest.fixture(params=["vectors", "blocks", "groups", "scores"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces so small that even tiny models need several."""
    if request.param == "vectors":
        monkeypatch.setattr(state, "VECTOR_LIMIT", 500)
    elif request.param == "blocks":
        monkeypatch.setattr(
            normscope.engine.request, "LayerOptions", partial(layer_module.LayerOptions, block_bytes=20000)
        )
    elif request.param == "groups":
        monkeypatch.setattr(normscope.engine.batch, "GROUP_TOKENS", 20)
    else:
        monkeypatch.setattr(normscope.tracing.trace, "SCORES", 50)
        monkeypatch.setattr(normscope.decompose.feed_forward, "HIDDEN", 7)
        monkeypatch.setattr(normscope.decompose.gram, "PRODUCT_CELLS", 50)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", PIECES)
def test_small_pieces(name: str) -> None:
    lens = shared(name)
    result = lens.analyze(given(name, 13), heads=True)
    assert_same_sides(result, found(name, 13), tolerance_of(name))
    assert_exact(result, expected(name, 13), 1e-12 if name in PURE else 1e-6)
    last, whole = list(sides(result).values())[-1], list(sides(found(name, 13)).values())[-1]
    some = list(sides(lens.analyze(given(name, 13), rows=[0, -1])).values())[-1]
    for scope in last.scopes:
        assert_close(some[scope], whole[scope][:, [0, -1]], tolerance_of(name))
    for scope in ("attention", "attention-block", "layer"):
        vectors = expected(name, 13)[last.info["side"]][1].vectors[last.resolve(scope)]
        torch.testing.assert_close(last.vectors(scope, 1), vectors, rtol=1e-9, atol=1e-12)
    many = [given(name, length) for length in (13, 2, 9)]
    for one, together in zip((13, 2, 9), lens.stream(many, heads=True), strict=True):
        assert_same_sides(together, found(name, one), tolerance_of(name))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_small_pieces_in_float32(name: str) -> None:
    result = shared(name, torch.float32).analyze(given(name, 13, torch.float32), heads=True)
    assert_same_sides(result, found(name, 13, torch.float32), 2e-6)
