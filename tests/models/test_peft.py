"""Models with LoRA adapters, and in half precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from normscope import Analysis, Analyzer
from tests.helpers.tiny import tiny

peft = pytest.importorskip("peft")

HALVES = (torch.float16, torch.bfloat16)
TARGETS = {
    "bert": ["query", "key", "value", "dense"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],  # Conv1D
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
ENCODING = {"input_ids": torch.randint(3, 50, (1, 9), generator=torch.Generator().manual_seed(0))}


def base(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny(name, dtype=dtype)


def adapted(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A tiny model with adapters on every linear module of its layers, none of them zero."""
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        lora_dropout=0.1,
        target_modules=TARGETS[name],
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(base(name, dtype), config).to(dtype).eval()


def state(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model: torch.nn.Module, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name].dtype == old.dtype and torch.equal(after[name], old) for name, old in before.items())


def assert_alike(one: Analysis, two: Analysis, tolerance: float) -> None:
    """Maps and remainders."""
    assert one.scopes == two.scopes
    for scope in one.scopes:
        torch.testing.assert_close(one[scope], two[scope], rtol=tolerance, atol=tolerance)
        if scope.endswith("-N"):
            torch.testing.assert_close(one.remainder(scope), two.remainder(scope), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
@pytest.mark.parametrize("value_bias", ["token", "remainder"])
@pytest.mark.parametrize("name", TARGETS)
def test_adapters_are_decomposed_as_if_merged(name: str, value_bias: str, options: dict[str, Any]) -> None:
    model = adapted(name, **options)
    before = state(model)
    found = Analyzer(model).analyze(ENCODING, value_bias=value_bias)
    assert_same_state(model, before)
    assert max(float(error.max()) for error in found.completeness.values()) < 1e-6
    merged = copy.deepcopy(model).merge_and_unload()
    assert_alike(found, Analyzer(merged).analyze(ENCODING, value_bias=value_bias), 1e-6)
    # The adapters matter: without them the maps are others.
    plain = Analyzer(base(name)).analyze(ENCODING, value_bias=value_bias)
    assert not torch.allclose(found[found.scopes[-1]], plain[found.scopes[-1]], rtol=1e-2)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning:peft")
@pytest.mark.parametrize("value_bias", ["token", "remainder"])
def test_norms_that_were_tuned(value_bias: str) -> None:
    """Their beta passes through W_V; with value_bias="remainder" the result belongs to no token."""
    config = peft.LNTuningConfig(target_modules=["ln_1", "ln_2"])
    model = peft.get_peft_model(base("gpt2"), config).eval()
    noise = torch.Generator().manual_seed(2)  # so that the tuned parameters differ from their initial values
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=noise).to(parameter)
    found = Analyzer(model).analyze(ENCODING, value_bias=value_bias)
    merged = copy.deepcopy(model).merge_and_unload()
    assert_alike(found, Analyzer(merged).analyze(ENCODING, value_bias=value_bias), 1e-9)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_vectors_of_an_adapted_model_add_up(name: str) -> None:
    found = Analyzer(adapted(name)).analyze(ENCODING)
    for scope in (scope for scope in found.scopes if scope.endswith("-N")):
        parts = found.parts(scope, 1)
        total = parts.contributions.sum(1) + parts.bias
        torch.testing.assert_close(total, parts.actual, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(parts.contributions.norm(dim=-1), found[scope][1], rtol=1e-6, atol=1e-6)


def test_a_disabled_adapter_is_not_part_of_the_model() -> None:
    model = adapted("llama")
    with model.disable_adapter():
        found = Analyzer(model).analyze(ENCODING)
    assert_alike(found, Analyzer(base("llama")).analyze(ENCODING), 1e-12)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["bert", "llama", "mixtral", "gemma2"])
def test_half_precision_is_copied_to_float32_with_a_warning(name: str, dtype: torch.dtype) -> None:
    # Nothing runs in half precision, the model's own forward pass included.
    model = base(name, dtype)
    before = state(model)
    kept = [id(parameter) for parameter in model.parameters()]
    with pytest.warns(UserWarning, match=f"in {str(dtype).removeprefix('torch.')}: a float32 copy"):
        lens = Analyzer(model)
    found = lens.analyze(ENCODING)
    assert lens.model is not model
    assert found[found.scopes[-1]].dtype == torch.float32
    assert model.dtype == dtype
    assert [id(parameter) for parameter in model.parameters()] == kept
    assert_same_state(model, before)
    assert_alike(found, Analyzer(copy.deepcopy(model).float()).analyze(ENCODING), 0)


def test_a_float32_model_is_not_copied() -> None:
    model = base("llama", torch.float32)
    assert Analyzer(model).model is model  # and a warning would be an error here


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_with_adapters(dtype: torch.dtype) -> None:
    model = adapted("llama", dtype)
    with pytest.warns(UserWarning, match="a float32 copy"):
        found = Analyzer(model).analyze(ENCODING)
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    merged = copy.deepcopy(model).float().merge_and_unload()
    assert_alike(found, Analyzer(merged).analyze(ENCODING), 1e-4)
