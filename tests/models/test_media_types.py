"""Encoders of pictures and of sound, and of the texts that go with pictures: each type is described, as derivation
would describe it, proved, and equal to the oracle without descriptions; pairs of them are refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from normscope import Analysis, Analyzer
from normscope.derivation.family import describe_model
from normscope.derivation.prove import CLOSE, prove_description
from normscope.models.registry import FAMILIES, REFUSED, SIDE_BY_SIDE
from normscope.models.spec import Branch
from normscope.models.versions import minor_version
from tests.helpers.compare import refused
from tests.helpers.free_oracle import FreeLayer, Shares, free_oracle
from tests.helpers.tiny import IMAGES
from tests.helpers.zoo import TEXT_HALVES, inputs_for, tiny_model

MEDIA = {kind for family in FAMILIES if family.input != "text" for kind in family.model_types}
TYPES = sorted({*MEDIA, *TEXT_HALVES} - {*IMAGES, "whisper"})  # the others are in test_families
INSTALLED = minor_version(transformers.__version__)
# Derivation names the dropout of an eager attention outside of the interface, which the one with sdpa does not call.
DIFFERENT = ("data2vec-vision", "beit") if INSTALLED < (5, 9) else ("data2vec-vision",)
STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer"}
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("wav2vec2", STABLE),
    ("hubert", STABLE),
    ("hubert", {"feat_proj_layer_norm": False, "conv_pos_batch_norm": True}),
    ("wav2vec2", {"adapter_attn_dim": 8}),  # has layers in the pre-LN model only
    ("clip_vision_model", {"hidden_act": "gelu"}),
    ("dinov3_vit", {"use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 3}),
    ("dinov3_vit", {"key_bias": True, "mlp_bias": False, "value_bias": False, "proj_bias": False}),
    ("beit", {"layer_scale_init_value": 0.0}),
    ("beit", {"use_relative_position_bias": True, "use_absolute_position_embeddings": True}),
    ("beit", {"use_shared_relative_position_bias": True, "use_mean_pooling": False}),
    ("data2vec-vision", {"layer_scale_init_value": 0.0}),
    ("data2vec-vision", {"use_relative_position_bias": True}),
)
REFUSALS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("wav2vec2", {"add_adapter": True}, "merge frames"),
    ("data2vec-audio", {"add_adapter": True}, "merge frames"),
    ("wav2vec2", STABLE | {"adapter_attn_dim": 8}, "follows the feed-forward"),
)
PAIRS = {
    "clip": "CLIPModel",
    "siglip": "SiglipModel",
    "siglip2": "Siglip2Model",
    "chinese_clip": "ChineseCLIPModel",
    "metaclip_2": "MetaClip2Model",
    "altclip": "AltCLIPModel",
    "xclip": "XCLIPModel",
    "groupvit": "GroupViTModel",
    "clap": "ClapModel",
    "vision-text-dual-encoder": "VisionTextDualEncoderModel",
}


@cache
def model_of(name: str) -> Any:
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return tiny_model(name, dtype=torch.float64)


@cache
def lens_of(name: str) -> Analyzer:
    return Analyzer(model_of(name))


def assert_equal_to_the_oracle(lens: Analyzer, seed: int = 0) -> None:
    """Every cell of the layer's scope and its remainder, and of the attention after its output projection."""
    encoding = inputs_for(lens.model, 7, seed)
    result = lens.analyze(encoding)
    assert isinstance(result, Analysis)
    layers = free_oracle(lens.model, encoding)[lens.family.stacks[0].layers.removesuffix(".*")]
    assert result.layers == tuple(range(len(layers)))
    attention = next(scope for scope in result.scopes if scope in ("ATTN-N", "LNATTN-N"))
    for n, layer in enumerate(layers):
        close(result["layer"][n], vectors(layer.output).norm(dim=-1))
        close(result.remainder(result.scopes[-1])[n], layer.output.rest[0].norm(dim=-1))
        close(result[attention][n], vectors(output_of_attention(lens, layer)).norm(dim=-1))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


def vectors(shares: Shares) -> Tensor:
    """(n, columns, d) of the first input."""
    return (shares.parts[:, 0] if shares.parts.dim() == 4 else shares.parts).transpose(0, 1)


def output_of_attention(lens: Analyzer, layer: FreeLayer) -> Shares:
    branch: Branch = lens.family.stacks[0].blocks[0].branches[0]
    (found,) = layer.modules[branch.op.output]  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("name", TYPES)
def test_described_and_proved(name: str) -> None:
    lens = lens_of(name)
    assert not lens.family.derived
    assert prove_description(lens.loaded) <= CLOSE
    assert (describe_model(model_of(name)).stacks == lens.family.stacks) is (name not in DIFFERENT)


@pytest.mark.parametrize("name", TYPES)
def test_maps_equal_the_oracle(name: str) -> None:
    assert_equal_to_the_oracle(lens_of(name))


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_variants(name: str, options: dict[str, Any]) -> None:
    model = tiny_model(name, dtype=torch.float64, **options)
    lens = Analyzer(model)
    assert not lens.family.derived
    assert prove_description(lens.loaded) <= CLOSE
    assert (describe_model(model).stacks == lens.family.stacks) is (name not in DIFFERENT)
    assert_equal_to_the_oracle(lens, seed=1)


def test_attentions_of_its_own_are_read_alike() -> None:
    """Data2Vec's eager attention and its sdpa attention, neither of which uses the interface."""
    eager = model_of("data2vec-vision")
    model = transformers.Data2VecVisionModel._from_config(eager.config, attn_implementation="sdpa").double().eval()
    model.load_state_dict(eager.state_dict())
    lens, encoding = Analyzer(model), inputs_for(eager)
    assert model.config._attn_implementation == "sdpa"
    assert not lens.family.derived
    assert describe_model(model).stacks == lens.family.stacks
    found, expected = lens.analyze(encoding), lens_of("data2vec-vision").analyze(encoding)
    for scope in expected.scopes:
        close(found[scope], expected[scope])


@pytest.mark.parametrize(("name", "options", "words"), REFUSALS, ids=str)
def test_settings_that_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    name_of_setting = list(options)[-1]
    setting = f"{name_of_setting}={options[name_of_setting]}"
    refused(lambda: Analyzer(tiny_model(name, **options)), setting, words)


@pytest.mark.parametrize("name", TEXT_HALVES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_texts_is_gone(name: str, side: str) -> None:
    lens = lens_of(name)
    encoding = inputs_for(lens.model, 7)
    encoding["attention_mask"] = torch.ones_like(encoding["input_ids"])
    before = (3, 0) if side == "left" else (0, 3)
    padded = {
        key: torch.nn.functional.pad(one, before, value=0 if key.endswith("mask") else 7)
        for key, one in encoding.items()
    }
    found, expected = lens.analyze(padded), lens.analyze(encoding)
    for scope in expected.scopes:
        close(found[scope], expected[scope])


@pytest.mark.parametrize("name", PAIRS)
def test_two_models_side_by_side_are_refused(name: str) -> None:
    assert REFUSED[name] == SIDE_BY_SIDE
    if name == "vision-text-dual-encoder" and INSTALLED < (5, 6):
        pytest.skip("its config needs the configs of both halves")
    model = tiny_model(name, PAIRS[name])
    other = "audio_model" if name == "clap" else "vision_model"
    refused(lambda: Analyzer(model), "two models side by side", f"model.text_model or model.{other}.")


@pytest.mark.skipif(INSTALLED < (5, 6), reason="the halves inside a pair are no models of their own")
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_the_halves_of_a_pair_are_taken(name: str) -> None:
    model = tiny_model(name, PAIRS[name], dtype=torch.float64)
    for half in (model.text_model, model.vision_model):
        lens = Analyzer(half)
        assert not lens.family.derived
        assert_equal_to_the_oracle(lens)


def test_a_head_on_one_half_of_a_pair_names_that_half() -> None:
    model = tiny_model("clip", "CLIPForImageClassification")
    refused(lambda: Analyzer(model), "two models side by side", "Pass one alone: model.vision_model.")
