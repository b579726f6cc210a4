"""The model's own vectors, maps over some dimensions, parameters, and uniform attention, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normscope import Analyzer, NormscopeError
from normscope.engine import probing
from normscope.inputs.encode import encode
from normscope.inputs.item import Item
from normscope.models.modules import layer_modules
from normscope.models.scopes import scope_aliases
from normscope.tracing.uniform_attention import run_uniform_attention
from tests.helpers.compare import state_of
from tests.helpers.tiny import ENCODER_DECODER, IMAGES, OTHER_FAMILIES, inputs, tiny

KIN = ("bert", "roberta", "electra", "distilbert", "albert", "mpnet")
TEXTS = tuple(name for name in OTHER_FAMILIES if name not in (*IMAGES, *ENCODER_DECODER))
ALONE = (*KIN, *TEXTS)


def opened(name: str) -> tuple[Analyzer, dict[str, Tensor], Item]:
    """A model, its input, and the input as an item."""
    lens = Analyzer(tiny(name))
    given = inputs(name, lens.model)
    (item,) = encode(lens.loaded, given)
    return lens, given, item


@pytest.mark.parametrize("name", ALONE)
def test_outputs_are_the_models_own_vectors(name: str) -> None:
    lens, given, item = opened(name)
    result = lens.analyze(given)
    scopes = [scope for scope in result.scopes if scope.endswith("-N")]
    found = probing.probe_scope_outputs(lens.loaded, item, scopes)
    assert list(found) == scopes
    for scope in scopes:
        for layer in result.layers:
            torch.testing.assert_close(found[scope][layer], result.parts(scope, layer).actual, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ALONE)
def test_inputs_of_the_attention_are_what_its_value_projection_reads(name: str) -> None:
    lens, given, item = opened(name)
    part = next(branch.op for block in lens.loaded.stacks[0].blocks for branch in block.branches)
    seen: list[Tensor] = []
    handles = [
        module.get_submodule(part.value).register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))  # type: ignore[union-attr]
        for module in dict.fromkeys(layer_modules(lens.loaded.base, lens.loaded.stacks[0]))
    ]
    with torch.no_grad():
        lens.loaded.base(**given)
    for handle in handles:
        handle.remove()
    # The recorded pass uses eager attention, the plain one may not; both round their softmax to float32.
    found = probing.probe_attention_inputs(lens.loaded, item)
    torch.testing.assert_close(found, torch.stack(seen), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in ALONE if name not in ("gptj", "gpt_neox")])
def test_a_map_within_some_dimensions(name: str) -> None:
    lens, given, item = opened(name)
    result = lens.analyze(given, scopes=["ff"])
    dims = {layer: torch.tensor([layer, 3, 7, 20]) for layer in result.layers}
    found = probing.probe_map_within(lens.loaded, item, dims)
    for layer in result.layers:
        vectors = result.vectors("ff", layer)[..., dims[layer]]
        torch.testing.assert_close(found[layer], vectors.norm(dim=-1), rtol=1e-9, atol=1e-12)
    everything = {layer: torch.arange(24 if name not in KIN else vectors_width(lens)) for layer in result.layers}
    torch.testing.assert_close(
        probing.probe_map_within(lens.loaded, item, everything), result["ff"], rtol=1e-9, atol=1e-12
    )


def vectors_width(lens: Analyzer) -> int:
    config: Any = lens.loaded.base.config
    return int(getattr(config, "hidden_size", None) or config.dim)


@pytest.mark.parametrize("name", ALONE)
def test_the_affine_map_of_the_values(name: str) -> None:
    """A single token attends to itself alone: the output of attention is the affine map of its input."""
    lens, _, _ = opened(name)
    if "gpt_oss" in name:
        pytest.skip("a part of its weight goes to no token")
    (item,) = encode(lens.loaded, {"input_ids": torch.tensor([[7]])})
    out = probing.probe_scope_outputs(lens.loaded, item, ["attention"])["attention"]
    seen: list[Tensor] = []
    stack = lens.loaded.stacks[0]
    part = next(branch.op for block in stack.blocks for branch in block.branches)
    handles = []
    for module in layer_modules(lens.loaded.base, stack):
        value = module.get_submodule(part.value)  # type: ignore[union-attr]
        handles.append(value.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
    lens.loaded.base(input_ids=torch.tensor([[7]]))
    for handle in handles:
        handle.remove()
    for layer, x in enumerate(seen):
        value, value_bias, matrix, bias = probing.probe_attention_maps(lens.loaded, layer)
        expected = (x[0, 0].double() @ value + value_bias) @ matrix + bias
        torch.testing.assert_close(out[layer, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ALONE if name != "gpt_oss"])
@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1)])
def test_uniform_attention(name: str, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the model's own eager attention with a uniform softmax."""
    lens, given, item = opened(name)
    before = state_of(lens.model)
    found = run_uniform_attention(lens.loaded, item, layers)
    assert state_of(lens.model) == before
    plain = run_uniform_attention(lens.loaded, item, ())
    assert not torch.allclose(found, plain, rtol=1e-3)
    lens.loaded.base.set_attn_implementation("eager")
    softmax = torch.softmax
    count = -1

    def even(scores: Tensor, dim: int = -1, **options: Any) -> Tensor:
        nonlocal count
        if scores.dim() != 4:  # a router
            return softmax(scores, dim, **options)
        count += 1
        if count not in layers:
            return softmax(scores, dim, **options)
        weights = (scores > -1e30).to(scores.dtype)
        return weights / weights.sum(-1, keepdim=True)

    monkeypatch.setattr(torch.nn.functional, "softmax", even)
    monkeypatch.setattr(torch, "softmax", even)
    with torch.no_grad():
        expected = lens.loaded.base(**given).last_hidden_state[0]
    assert count == lens.depth - 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)  # some compute in float32


def test_uniform_attention_of_an_encoder_with_a_position_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = Analyzer(tiny("t5"))
    (item,) = encode(lens.loaded, inputs("t5", lens.model, 9, 6))
    found = run_uniform_attention(lens.loaded, item, (0, 1))
    assert found.shape[0] == 9
    assert not torch.allclose(found, run_uniform_attention(lens.loaded, item, ()))


def test_gains() -> None:
    lens, _, _ = opened("bert")
    found = probing.probe_norm_gains(lens.loaded, "layer")
    for layer, module in enumerate(lens.loaded.base.encoder.layer):  # type: ignore[union-attr, arg-type]
        torch.testing.assert_close(found[layer], module.output.LayerNorm.weight.detach())
    lens, _, _ = opened("llama")
    with pytest.raises(NormscopeError, match="is not the output of a norm"):
        probing.probe_norm_gains(lens.loaded, "layer")
    assert scope_aliases(lens.loaded.stacks[0].blocks)["layer"].endswith("RES-N")


@pytest.mark.parametrize(
    "options", [{"inner_group_num": 2}, {"num_hidden_groups": 2}, {"num_hidden_layers": 5}], ids=str
)
def test_shared_layers_in_the_order_of_their_calls(options: dict[str, int]) -> None:
    model = tiny("albert", **options)
    called: list[Any] = []
    stack = Analyzer(model).loaded.stacks[0]
    handles = [
        one.register_forward_hook(lambda module, *_: called.append(module)) for one in layer_modules(model, stack)
    ]
    with torch.no_grad():
        model(input_ids=torch.arange(5, 12)[None])
    for handle in handles:
        handle.remove()
    loaded = Analyzer(model).loaded
    assert list(loaded.calls.modules[loaded.stacks[0].side]) == called
    expected = [module.full_layer_layer_norm.weight.detach() for module in called]
    torch.testing.assert_close(probing.probe_norm_gains(Analyzer(model).loaded, "layer"), torch.stack(expected))
