"""Layers that do not compute what their family describes: a flow through them is refused, with the layer's name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normscope.models.registry
from normscope import Analyzer
from normscope.models.modules import layer_modules
from normscope.models.scopes import layer_steps
from normscope.models.spec import Attention, Experts, FeedForward, Norm
from normscope.tracing import proof
from tests.helpers.compare import refused, relative
from tests.helpers.detached import Detached
from tests.helpers.flow_cases import LANGUAGE, encoding, open_case
from tests.helpers.odd_families import IDS, bloom, bloom_family
from tests.helpers.tiny import FAMILIES, GATED, VALUE_PROJECTIONS, tiny


@pytest.fixture(autouse=True)
def the_door_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the proof on a short input: a flow must find on its own input what the proof could not see."""
    monkeypatch.setattr(proof, "CLOSE", float("inf"))


def one_more(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., -1] += 0.01
    return x


def more(x: Tensor) -> Tensor:
    return x + 0.01


def after(module: nn.Module, args: Any, made: Any) -> Any:
    return (more(made[0]), *made[1:]) if isinstance(made, tuple) else more(made)


def ahead(module: nn.Module, args: Any, kwargs: Any) -> Any:
    if args:
        return (one_more(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": one_more(kwargs["hidden_states"])}


def parts(lens: Analyzer, number: int) -> list[str]:
    """The submodules of a layer whose outputs its description uses."""
    found: list[str] = []
    for step in layer_steps(lens.loaded.stacks[number].blocks):
        part = step.part
        if isinstance(part, Norm):
            found.append(part.path)
        elif isinstance(part, Attention):
            found += [part.value, part.output]
        elif isinstance(part, FeedForward):
            found += [part.into, part.out]
        elif isinstance(part, Experts):
            found.append(part.module)
    return list(dict.fromkeys(found))


def named(lens: Analyzer, module: nn.Module) -> str:
    (name,) = (name for name, one in lens.model.named_modules() if one is module)
    return f"{name} ({type(module).__name__})"


@pytest.mark.parametrize(("name", "head"), LANGUAGE)
def test_a_hook_on_any_part_of_a_layer(name: str, head: str) -> None:
    lens, given, _, _ = open_case(name, head)
    for number, stack in enumerate(lens.loaded.stacks):
        layer = layer_modules(lens.loaded.base, stack)[-1]
        for path in parts(lens, number):
            handle = layer.get_submodule(path).register_forward_hook(after)
            try:
                message = refused(lambda: lens.flow(given, target=1, position=0), "does not compute what the family")
            finally:
                handle.remove()
            assert named(lens, layer) in message
            assert f"of the {stack.side}" in message


@pytest.mark.parametrize("name", FAMILIES)
def test_between_two_layers(name: str) -> None:
    lens, given, _, _ = open_case(name)
    for stack in lens.loaded.stacks:
        layers = layer_modules(lens.loaded.base, stack)
        handle = layers[-1].register_forward_pre_hook(ahead, with_kwargs=True)
        try:
            message = refused(lambda: lens.flow(given), "its input is not the output of layer", named(lens, layers[-1]))
        finally:
            handle.remove()
        assert f"of the {stack.side}" in message


@pytest.mark.parametrize("name", ["bert", "gpt2", "gemma2", "bart", "dinov2"])
def test_after_the_last_layer(name: str) -> None:
    """Changes of the output of the layer module itself."""
    lens, given, _, _ = open_case(name)
    layer = layer_modules(lens.loaded.base, lens.loaded.stacks[-1])[-1]
    handle = layer.register_forward_hook(after)
    try:
        refused(lambda: lens.flow(given), "Layer 1 (counted from 0)")
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "bart", "vit"])
def test_before_the_first_layer_all_is_allowed(name: str) -> None:
    lens, given, _, _ = open_case(name)
    handles = [
        layer_modules(lens.loaded.base, stack)[0].register_forward_pre_hook(ahead, with_kwargs=True)
        for stack in lens.loaded.stacks
    ]
    try:
        found = lens.flow(given, gate="frozen" if name in GATED else "ig")
        reference = Detached(lens.model, given, name in GATED)
    finally:
        for handle in handles:
            handle.remove()
    order = [side for side in ("decoder", "encoder") if side in reference.states]
    assert relative(found.map, reference.vectors(order[0], order).norm(dim=-1)) <= 1e-5


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_between_encoder_and_decoder(name: str) -> None:
    model: Any = tiny(name, "Seq2SeqLM")

    def hook(module: nn.Module, args: Any, made: Any) -> Any:
        made = copy.copy(made)
        made.last_hidden_state = one_more(made.last_hidden_state)
        return made

    model.get_encoder().register_forward_hook(hook)
    lens, given = Analyzer(model), encoding(name, model)
    refused(lambda: lens.flow(given), "Layer 0", "of the decoder", "the values of")


def test_a_hook_on_the_norm_after_an_encoder() -> None:
    model: Any = tiny("t5", "Seq2SeqLM")
    model.encoder.final_layer_norm.register_forward_hook(after)
    lens, given = Analyzer(model), encoding("t5", model)
    refused(lambda: lens.flow(given), "encoder.final_layer_norm (T5LayerNorm) does not output")


@pytest.mark.parametrize("gate", ["ig", "frozen", "tangent"])
def test_refused_with_every_gate(gate: str) -> None:
    model: Any = tiny("llama", "CausalLM")
    lens, given = Analyzer(model), encoding("llama", model)
    lens.flow(given, gate=gate)
    model.model.layers[1].mlp.down_proj.register_forward_hook(after)
    refused(lambda: lens.flow(given, gate=gate), "model.layers.1 (LlamaDecoderLayer)", "feed-forward")


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(normscope.models.registry, "_registered", [])
    return normscope.models.registry.register_family


@pytest.mark.parametrize(("name", "path"), VALUE_PROJECTIONS)
def test_value_zeroing_with_a_hook_on_the_values(name: str, path: str) -> None:
    model = tiny(name, None)
    model.get_submodule(path).register_forward_hook(after)
    lens, given = Analyzer(model), encoding(name, model)
    refused(lambda: lens.flow(given, method="value_zeroing"), "Layer 1", "the values of", "hook")


def test_a_packed_projection_outside_the_interface(register: Any) -> None:
    model = bloom()
    register(bloom_family(model))
    lens = Analyzer(model)
    found = lens.flow(IDS, target=3)
    assert found.to is not None
    assert found.to.completeness <= 1e-9
    assert found.completeness is not None
    assert float(found.completeness.max()) <= 1e-9
    zeroed = lens.flow(IDS, method="value_zeroing").map
    assert float(zeroed.triu(1).max()) <= 1e-9  # causal
    torch.testing.assert_close(zeroed.sum(-1), torch.ones(7, dtype=torch.float64))
