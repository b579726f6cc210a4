"""The proof when a model is loaded: its output must follow from what is recorded, or the model is refused at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from normscope import Analysis, Analyzer, NormscopeError, NormscopeWarning
from normscope.checking import check
from normscope.tracing import proof
from normscope.view.document import document_header
from normscope.view.export import analysis_to_export_dict
from tests.helpers import layer_oracle
from tests.helpers.oracle_parts import maps
from tests.helpers.tiny import FAMILIES, inputs, tiny

IDS = torch.tensor([[5, 9, 33, 7, 21, 40, 12]])
GIVEN = {"input_ids": IDS}


def refused(model: Any, *words: str) -> None:
    with pytest.raises(NormscopeError) as caught:
        Analyzer(model)
    assert all(word in str(caught.value) for word in words), caught.value


def assert_like_the_oracle(model: PreTrainedModel, depth: int) -> None:
    """Every map of every layer; the oracle finds the layers by itself."""
    (result,) = Analyzer(model).stream(GIVEN)
    ((_, expected),) = layer_oracle.oracle(model, GIVEN | {"attention_mask": torch.ones_like(IDS)}).items()
    assert result.layers == tuple(range(depth))
    assert len(expected) == depth
    for n, layer in enumerate(expected):
        for scope, values in maps(layer).items():
            torch.testing.assert_close(result[scope][n], values, rtol=2e-6, atol=2e-6)


# Depth: the layer calls that really happen.


@pytest.mark.parametrize(("name", "path"), [("bert", "encoder"), ("llama", ""), ("gpt2", "")])
def test_cut_and_reordered_models_have_their_true_depth(name: str, path: str) -> None:
    """The config still has the old number of layers."""
    options = {"n_layer": 5} if name == "gpt2" else {"num_hidden_layers": 5}
    model = tiny(name, **options)
    holder: Any = model.get_submodule(path)
    key = next(one for one in ("layer", "layers", "h") if hasattr(holder, one))
    layers = getattr(holder, key)
    setattr(holder, key, layers[:3])
    assert_like_the_oracle(model, 3)
    del getattr(holder, key)[1]
    assert_like_the_oracle(model, 2)
    setattr(holder, key, nn.ModuleList([layers[n] for n in (4, 0, 3, 2)]))
    assert_like_the_oracle(model, 4)


def test_a_layer_that_is_called_twice() -> None:
    model: Any = tiny("bert", num_hidden_layers=3)
    first, second, _ = model.encoder.layer
    model.encoder.layer = nn.ModuleList([first, second, first])
    lens = Analyzer(model)
    assert lens.loaded.depths == [3]
    assert lens.loaded.calls.modules[lens.loaded.stacks[0].side] == (first, second, first)
    plain: Any = tiny("bert", num_hidden_layers=3)
    plain.encoder.layer = nn.ModuleList([first, second, copy.deepcopy(first)])
    for scope in lens.analyze(GIVEN).scopes:
        torch.testing.assert_close(lens.analyze(GIVEN)[scope], Analyzer(plain).analyze(GIVEN)[scope])
    flows = [one.flow(GIVEN) for one in (lens, Analyzer(plain))]
    torch.testing.assert_close(flows[0].maps, flows[1].maps)


def test_surgery_after_the_analyzer_was_made() -> None:
    model: Any = tiny("llama", num_hidden_layers=4)
    lens = Analyzer(model)
    result = lens.analyze(GIVEN)
    del model.layers[1]
    assert lens.analyze(GIVEN)["layer"].shape[0] == 3
    with pytest.raises(NormscopeError, match="There is no layer 3"):
        lens.analyze(GIVEN, layers=[3])
    with pytest.raises(NormscopeError, match="layer 3"):
        result.vectors("layer", 3)


def test_a_layer_that_is_skipped_for_some_inputs_is_refused() -> None:
    """Layers that were called before must be called again."""

    class Sometimes(nn.ModuleList):
        def __iter__(self) -> Any:
            layers = list(super().__iter__())
            return iter(layers if seen[0] <= 4 else layers[:1])

    seen = [0]
    model: Any = tiny("bert", num_hidden_layers=3)
    model.encoder.layer = Sometimes(model.encoder.layer).eval()
    model.embeddings.register_forward_hook(lambda module, args, made: seen.__setitem__(0, made.shape[1]))
    lens = Analyzer(model)
    for _ in range(3):  # not only by chance
        with pytest.raises(NormscopeError, match="called 1 layers"):
            lens.analyze(GIVEN)


# Whatever differs.

HOOKED = [
    "layer",
    "attention",
    "attention.self",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "output.dense",
]
HOOKED += ["intermediate.dense", "output.LayerNorm", "intermediate.intermediate_act_fn"]
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda x: x + 0.01,
    "one dimension": lambda x: x + 0.1 * nn.functional.one_hot(torch.tensor(3), x.shape[-1]),
    "scale": lambda x: 1.001 * x,
}


def hooked(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda module, args, made: (change(made[0]), *made[1:]) if isinstance(made, tuple) else change(made)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", HOOKED)
def test_a_hook_that_changes_values_is_refused(path: str, change: str) -> None:
    model: Any = tiny("bert")
    layer = model.encoder.layer[1]
    module = layer if path == "layer" else layer.get_submodule(path)
    handle = module.register_forward_hook(hooked(CHANGES[change]))
    refused(model, "encoder.layer.1", "layer 1")
    handle.remove()
    module.register_forward_hook(lambda *args: None)  # one that only looks
    assert Analyzer(model).analyze(GIVEN)["layer"].isfinite().all()


@pytest.mark.parametrize("path", HOOKED)
def test_a_hook_that_comes_later_is_refused_too(path: str) -> None:
    model: Any = tiny("bert")
    lens = Analyzer(model)
    layer = model.encoder.layer[0]
    module = layer if path == "layer" else layer.get_submodule(path)
    handle = module.register_forward_hook(hooked(CHANGES["constant"]))
    with pytest.raises(NormscopeError, match="layer 0"):
        lens.analyze(GIVEN)
    handle.remove()
    assert lens.analyze(GIVEN)["layer"].isfinite().all()


def test_a_hook_on_all_modules_of_the_process() -> None:
    lens = Analyzer(tiny("bert"))
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, made: made * 1.01 if isinstance(module, nn.Linear) else None
    )
    try:
        with pytest.raises(NormscopeError, match="layer 0"):
            lens.analyze(GIVEN)
    finally:
        handle.remove()


class Wrapped(nn.Module):
    """Calls the module inside, and changes its output."""

    def __init__(self, inside: nn.Module, factor: float) -> None:
        super().__init__()
        self.inside, self.factor = inside, factor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inside(*args, **kwargs) * self.factor

    @property
    def in_features(self) -> int:
        return self.inside.in_features  # type: ignore[no-any-return, union-attr]


def test_a_wrapped_linear_module_is_read_from_what_it_does() -> None:
    model: Any = tiny("bert")
    for layer in model.encoder.layer:
        layer.output.dense = Wrapped(layer.output.dense, 3.0).eval()
    plain: Any = tiny("bert")
    with torch.no_grad():
        for layer in plain.encoder.layer:
            layer.output.dense.weight *= 3
            layer.output.dense.bias *= 3
    found, expected = Analyzer(model).analyze(GIVEN), Analyzer(plain).analyze(GIVEN)
    torch.testing.assert_close(found["layer"], expected["layer"])


def test_a_patched_forward_is_refused() -> None:
    model: Any = tiny("llama")
    mlp = model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * 1.01
    refused(model, "layers.1", "residual sum")
    mlp.forward = own
    Analyzer(model)


def attention_of(change: float) -> Callable[..., Any]:
    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        causal = mask is None and getattr(module, "is_causal", False) and q.shape[2] > 1
        made = nn.functional.scaled_dot_product_attention(
            q * change, k, v, mask, is_causal=causal, scale=options["scaling"]
        )
        return made.transpose(1, 2).contiguous(), None

    return attend


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_custom_attention(name: str) -> None:
    """One that computes the same is accepted; any other is refused, also if it is set later."""
    AttentionMaskInterface.register("same", sdpa_mask)
    AttentionMaskInterface.register("other", sdpa_mask)
    AttentionInterface.register("same", attention_of(1.0))
    AttentionInterface.register("other", attention_of(1.01))
    model = tiny(name)
    model.set_attn_implementation("same")
    lens = Analyzer(model)
    expected = Analyzer(tiny(name)).analyze(GIVEN)
    torch.testing.assert_close(lens.analyze(GIVEN)["layer"], expected["layer"], rtol=1e-6, atol=1e-6)
    model.set_attn_implementation("other")
    refused(model, "begins to differ", "layer 0")
    with pytest.raises(NormscopeError, match="begins to differ"):
        lens.analyze(GIVEN)
    model.set_attn_implementation("same")
    AttentionInterface.register("same", attention_of(1.01))  # under a name that was proved
    with pytest.raises(NormscopeError, match="begins to differ"):
        lens.analyze(GIVEN)


def test_a_decoder_made_to_look_ahead_is_refused() -> None:
    """Some embedding models switch the causal mask off: sdpa then looks everywhere and ignores mask functions."""
    model: Any = tiny("llama")
    lens = Analyzer(model)
    for layer in model.layers:
        layer.self_attn.is_causal = False
    refused(model, "layer 0")
    with pytest.raises(NormscopeError, match="layer 0"):
        lens.analyze(GIVEN)


def test_autocast_is_refused() -> None:
    model = tiny("bert", dtype=torch.float32)
    lens = Analyzer(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for attempt in (lambda: Analyzer(tiny("bert")), lambda: lens.analyze(GIVEN), lambda: lens.flow(GIVEN)):
            with pytest.raises(NormscopeError, match=r"torch\.autocast is on"):
                attempt()
        with torch.autocast("cpu", enabled=False):
            lens.analyze(GIVEN)


@pytest.mark.parametrize("how", ["whole", "in place", "by layer"])
def test_compiled_models_run_as_they_were_written(how: str) -> None:
    model: Any = tiny("bert")
    expected = Analyzer(tiny("bert")).analyze(GIVEN)
    if how == "whole":
        given = torch.compile(model)
    else:
        given = model
        for module in [model] if how == "in place" else model.encoder.layer:
            module.compile()
    torch.testing.assert_close(Analyzer(given).analyze(GIVEN)["layer"], expected["layer"])


def test_data_parallel_is_looked_into() -> None:
    model = tiny("bert")
    assert Analyzer(nn.DataParallel(model)).model is model


def test_a_proof_is_made_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    compare = proof.compare_proof_passes

    def counted(*given: Any) -> Any:
        nonlocal count
        count += 1
        return compare(*given)

    monkeypatch.setattr(proof, "compare_proof_passes", counted)
    model = tiny("bert")
    for _ in range(3):
        Analyzer(model).analyze(GIVEN)
    assert count == 1
    list(Analyzer(model).stream([GIVEN, GIVEN]))
    assert count == 1
    Analyzer(tiny("bert"))
    assert count == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_proved_and_left_alone(name: str) -> None:
    model = tiny(name, dtype=torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hooks = [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in model.modules()]
    random = torch.random.get_rng_state()
    lens = Analyzer(model)
    assert torch.equal(random, torch.random.get_rng_state())
    assert hooks == [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in model.modules()]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(heads == 4 for heads in lens.loaded.head_counts)


# Mixed precision, embeddings with adapters, outputs as tuples.


def test_a_part_in_half_precision_is_copied() -> None:
    """Single-precision embeddings over half-precision layers."""

    class Cast(nn.Module):
        def __init__(self, inside: nn.Module, layers: nn.Module) -> None:
            super().__init__()
            self.inside, self.layers = inside, layers
            self.word_embeddings = inside.word_embeddings

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return self.inside(*args, **kwargs).to(next(self.layers.parameters()).dtype)  # type: ignore[no-any-return]

    model: Any = tiny("bert", dtype=torch.float32)
    model.encoder.half()
    model.embeddings = Cast(model.embeddings, model.encoder).eval()
    with pytest.warns(UserWarning, match="A part of the model is in float16"):
        lens = Analyzer(model)
    result = lens.analyze(GIVEN)
    assert max(float(error.max()) for error in result.completeness.values()) < 1e-5
    assert {p.dtype for p in model.encoder.parameters()} == {torch.float16}


@pytest.mark.parametrize("size", [1e-3, 1e-1])
def test_small_completeness_errors_warn(size: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A warning with advice above 1e-4, a refusal above 1e-2."""
    monkeypatch.setattr(proof, "CLOSE", 1.0)
    model: Any = tiny("bert")
    model.encoder.layer[1].output.dense.register_forward_hook(lambda module, args, made: made * (1 + size))
    lens = Analyzer(model)
    if size > 1e-2:
        with pytest.raises(NormscopeError, match="ATTNRESLNFF-N, layer 1"):
            lens.analyze(GIVEN)
    else:
        with pytest.warns(NormscopeWarning, match=r"ATTNRESLNFF-N, layer 1 .* float32"):
            result = lens.analyze(GIVEN)
        assert "dtype=torch.float64" in result.warnings[0]
        path = result.save(tmp_path / "x.safetensors")
        assert Analysis.load(path).warnings == result.warnings
        assert analysis_to_export_dict(result)["info"]["warnings"] == list(result.warnings)
        assert document_header(result)["warnings"] == list(result.warnings)


@pytest.mark.parametrize(
    ("name", "head"), [("bert", "SequenceClassification"), ("bert", "MaskedLM"), ("t5", "Seq2SeqLM")]
)
def test_a_model_that_returns_tuples(name: str, head: str) -> None:
    model = tiny(name, head)
    model.config.return_dict = False
    given = GIVEN | {"decoder_input_ids": IDS[:, :4]} if name == "t5" else GIVEN
    if head == "MaskedLM":
        assert Analyzer(model).flow(given, target=1, position=2).to.completeness < 1e-6  # type: ignore[union-attr]
        return
    assert Analyzer(model).flow(given, target=1).to.completeness < 1e-6  # type: ignore[union-attr]


# Packed sequences, and texts longer than a model was made for.


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma3_text", "gpt_neox", "mixtral"])
def test_packed_sequences_do_not_see_one_another(name: str) -> None:
    """Positions that restart, and no mask: the model attends block by block."""
    model = tiny(name)
    packed = {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}
    lens = Analyzer(model)
    result = lens.analyze(packed, heads=True)
    assert float(result["ATTN-W"][:, 3:, :3].abs().max()) == 0
    for part in (slice(0, 3), slice(3, 7)):
        alone = lens.analyze({"input_ids": IDS[:, part]})
        for scope in alone.scopes:
            torch.testing.assert_close(result[scope][:, part, part], alone[scope], rtol=1e-5, atol=1e-6)
    streamed = list(lens.stream([packed, GIVEN, {key: value[:, :5] for key, value in packed.items()}]))
    torch.testing.assert_close(streamed[0]["layer"], result["layer"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(streamed[1]["layer"], lens.analyze(GIVEN)["layer"], rtol=1e-6, atol=1e-6)
    # With a mask the model does not look for blocks.
    whole = lens.analyze(packed | {"attention_mask": torch.ones_like(IDS)})
    assert float(whole["ATTN-W"][0, 3:, :3].max()) > 0


def test_computed_positions_do_not_end() -> None:
    long = {"input_ids": torch.arange(3, 15)[None]}
    with pytest.warns(NormscopeWarning, match="12 tokens, more than the 8"):
        result = Analyzer(tiny("llama", max_position_embeddings=8)).analyze(long)
    assert len(result.warnings) == 1
    assert "12 tokens, more than the 8" in result.warnings[0]
    with pytest.warns(NormscopeWarning, match="12 tokens, more than the 8"):
        flow = Analyzer(tiny("llama", max_position_embeddings=8)).flow(long)
    assert flow.warnings == result.warnings
    expected = Analyzer(tiny("llama")).analyze(long)
    assert expected.warnings == ()
    torch.testing.assert_close(result["layer"], expected["layer"])
    assert Analyzer(tiny("llama", max_position_embeddings=8)).analyze(long, truncation=True)["layer"].shape[1] == 8
    with pytest.raises(NormscopeError, match="positions for 8"):
        Analyzer(tiny("bert", max_position_embeddings=8)).analyze(long)


def test_a_vision_model_with_tokens_that_are_not_known_is_refused() -> None:
    model: Any = tiny("vit")
    own = model.embeddings.forward
    model.embeddings.forward = lambda *args, **kwargs: torch.cat([own(*args, **kwargs)] * 2, dim=1)
    refused(model, "reads 20 tokens", "input has 10")


def test_special_tokens_of_vision_models_are_named() -> None:
    for name, expected in (
        ("deit", ["[CLS]", "[DIST]", "1,1"]),
        ("dinov2_with_registers", ["[CLS]", "[REG1]", "[REG2]"]),
    ):
        model = tiny(name)
        result = Analyzer(model).analyze(inputs(name, model))
        assert list(result.tokens[:3]) == expected


# `check` in full.


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "vit"])
def test_check_looks_at_every_kind_of_input(name: str) -> None:
    report = check(Analyzer(tiny(name)))
    kinds = ["alone", "padded right", "padded left", "holes in the mask", "long"]
    assert list(report.passes) == (kinds[:1] if name == "vit" else kinds)
    assert report.ok


def test_check_finds_what_only_long_inputs_show() -> None:
    AttentionMaskInterface.register("short-sighted", sdpa_mask)
    plain, other = attention_of(1.0), attention_of(1.01)
    AttentionInterface.register(
        "short-sighted",
        lambda module, q, *args, **options: (plain if q.shape[2] < 60 else other)(module, q, *args, **options),
    )
    model = tiny("bert", max_position_embeddings=100)
    model.set_attn_implementation("short-sighted")
    report = check(Analyzer(model))
    assert not report.ok
    assert set(report.refusals) == {"long"}


def test_another_description_is_proved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    import normscope
    from normscope.models import registry
    from normscope.models.encoders import BERT

    monkeypatch.setattr(registry, "_registered", [])
    model = tiny("bert")
    Analyzer(model)
    blocks = BERT.stacks[0].blocks
    wrong = (replace(blocks[0], after=replace(blocks[0].after, kind="rms")), blocks[1])  # type: ignore[type-var]
    normscope.register_family(replace(BERT, stacks=(replace(BERT.stacks[0], blocks=wrong),)))
    refused(model, "attention.output.LayerNorm")


def test_inputs_that_are_changed_on_the_way_to_the_layers_are_refused() -> None:
    model = tiny("bert", "SequenceClassification")
    lens = Analyzer(model)

    def other(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"input_ids": kwargs["input_ids"].flip(-1)}

    model.register_forward_pre_hook(other, with_kwargs=True)
    refused(model, "other input_ids than it was given")
    with pytest.raises(NormscopeError, match="other input_ids"):
        lens.analyze(GIVEN)


def test_an_attention_without_a_mask_function_is_refused() -> None:
    """transformers makes no mask for it: holes in a mask would have an effect here but not in the model."""
    AttentionInterface.register("maskless", attention_of(1.0))
    model = tiny("bert")
    model.set_attn_implementation("maskless")
    refused(model, "maskless", "no mask function")


def test_a_head_that_does_not_call_the_base_model_as_a_whole() -> None:
    """OPT's calls the decoder inside it."""
    model = tiny("opt", "CausalLM")
    lens = Analyzer(model)

    def other(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"input_ids": kwargs["input_ids"].flip(-1)}

    model.register_forward_pre_hook(other, with_kwargs=True)
    with pytest.raises(NormscopeError, match="begins to differ"):
        lens.analyze(GIVEN)


def test_a_hook_that_only_long_inputs_meet() -> None:
    """A post-LN layer outputs the result of its last norm; the proof's input is too short to show that it does not."""
    model: Any = tiny("bert")
    model.encoder.layer[1].register_forward_hook(lambda module, args, made: made + 0.1 if made.shape[1] > 5 else None)
    lens = Analyzer(model)
    with pytest.raises(NormscopeError, match=r"Layer 1 .* does not output what output\.LayerNorm"):
        lens.analyze(GIVEN)


def test_values_that_others_mix_are_refused() -> None:
    model: Any = tiny("llama")
    lens = Analyzer(model)
    model.layers[1].self_attn.v_proj.register_forward_hook(lambda module, args, made: made.roll(1, 1))
    with pytest.raises(NormscopeError, match=r"v_proj of layer 1 .* other tokens"):
        lens.analyze(GIVEN)


def test_hooked_models_are_not_batched() -> None:
    """A hook that counts tokens from the end would count the padding of a batch."""
    model: Any = tiny("llama")

    def last(module: nn.Module, args: Any, made: Tensor) -> Tensor:
        made = made.clone()
        made[:, -1] += 1
        return made

    model.embed_tokens.register_forward_hook(last)
    lens = Analyzer(model)
    inputs = [{"input_ids": IDS[:, :4]}, GIVEN]
    for one, together in zip(inputs, lens.stream(inputs), strict=True):
        torch.testing.assert_close(together["layer"], lens.analyze(one)["layer"])
