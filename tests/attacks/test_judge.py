"""The judge itself: it agrees with the naive oracle on an unmodified model, and it detects attacks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.attacks import attending  # noqa: F401  (registers its functions)
from tests.attacks.changes import Change
from tests.attacks.comparing import maps_of
from tests.attacks.families import build, family_stacks, heads, inputs, scope_names
from tests.attacks.flowing import flow_maps
from tests.attacks.hooked import After, Before
from tests.attacks.judge import Part, Verdict, judge, plain
from tests.helpers import bert_oracle, layer_oracle, oracle_parts
from tests.helpers.detached import Detached
from tests.helpers.tiny import BERT_FAMILIES, FAMILIES, tiny


def judged(name: str, model: Any, encoding: dict[str, Any]) -> Verdict:
    return judge(model, name, encoding, plain(model, encoding))


def naive(name: str, model: Any, encoding: dict[str, Any]) -> dict[str, list[Any]]:
    if name in BERT_FAMILIES:
        return {"encoder": list(bert_oracle.oracle(model, encoding))}
    return {side: list(layers) for side, layers in layer_oracle.oracle(model, encoding).items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_naive_oracle_without_its_loops(name: str) -> None:
    model = build(name, None, torch.float64, 0)
    encoding = inputs(name, model, None, 6, 4, 0)
    expected = naive(name, model, encoding)
    verdict = judged(name, model, encoding)
    assert verdict.error_in() < 1e-6
    for side, layers in expected.items():
        for found, layer in zip(verdict.layers[side], layers, strict=True):
            assert found.own is not None
            assert found.prefix == 0
            torch.testing.assert_close(found.own.vectors, layer.vectors, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(found.own.bias, layer.bias, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(maps_of(found.own, 0), oracle_parts.maps(layer), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(
                oracle_parts.head_maps(found.own), oracle_parts.head_maps(layer), rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_and_float32(name: str) -> None:
    for head in heads(name):
        model = build(name, head, torch.float32, 0)
        verdict = judged(name, model, inputs(name, model, head, 5, 3, 1))
        assert verdict.error_in() < 1e-5, head


@pytest.mark.parametrize("name", [name for name in FAMILIES if len(family_stacks(name)) == 1])
def test_scope_names(name: str) -> None:
    model = build(name, None, torch.float64, 0)
    verdict = judged(name, model, inputs(name, model, None, 4, 3, 0))
    ((layer, *_),) = verdict.layers.values()
    assert layer.own is not None
    assert list(maps_of(layer.own, 0)) == scope_names(family_stacks(name)[next(iter(verdict.layers))])


# --- it sees what was done to a model --------------------------------------------------------------------------------


def bert(**options: Any) -> tuple[Any, dict[str, Any]]:
    model = tiny("bert", num_hidden_layers=3, **options)
    return model, inputs("bert", model, None, 5, 3, 0)


def attacked(change: Callable[[Any], Any]) -> Verdict:
    """The verdict on BERT's base model after a change."""
    model, encoding = bert()
    change(model)
    output = plain(model, encoding)
    return judge(copy.deepcopy(model), "bert", encoding, output)


def test_layers_are_the_calls_that_happen() -> None:
    def cut(model: Any) -> None:
        model.encoder.layer = model.encoder.layer[:2]

    def repeat(model: Any) -> None:
        model.encoder.layer = nn.ModuleList([*model.encoder.layer, model.encoder.layer[0]])

    assert [len(attacked(change).layers["encoder"]) for change in (lambda _: None, cut, repeat)] == [3, 2, 4]
    found = attacked(repeat).layers["encoder"]
    assert not torch.equal(found[0].x, found[3].x)
    assert all(layer.own is not None for layer in found)


@pytest.mark.parametrize("path", ["", "attention", "attention.output", "intermediate", "output"])
@pytest.mark.parametrize("before", [False, True])
def test_a_hook_that_changes_values_inside_a_layer_leaves_no_answer(path: str, before: bool) -> None:
    """Before the layer it does no harm: the layer's input is taken as given."""

    def hook(model: Any) -> None:
        module = model.encoder.layer[1].get_submodule(path)
        if before:
            module.register_forward_pre_hook(Before(Change("scale")), with_kwargs=True)
        else:
            module.register_forward_hook(After(Change("scale")))

    verdict = attacked(hook)
    answered = [n for n in range(3) if verdict.error_in(Part(layers=[n])) < 1e-9]
    assert answered == ([0, 1, 2] if before and not path else [0, 2])


def test_linear_modules_are_read_by_what_they_do() -> None:
    def scale(model: Any) -> None:
        for path in ("attention.self.value", "attention.output.dense", "intermediate.dense", "output.dense"):
            model.encoder.layer[1].get_submodule(path).register_forward_hook(After(Change("scale")))

    verdict = attacked(scale)
    assert verdict.error_in() < 1e-9
    model, encoding = bert()
    for path in ("attention.self.value", "attention.output.dense", "intermediate.dense", "output.dense"):
        for parameter in model.encoder.layer[1].get_submodule(path).parameters():
            parameter.data *= 1.25
    expected = naive("bert", model, encoding)["encoder"][1]
    found = verdict.layers["encoder"][1].own
    assert found is not None
    torch.testing.assert_close(found.vectors, expected.vectors, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.bias, expected.bias, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("path", ["attention.self.value", "attention.self"])
def test_values_of_other_tokens(path: str) -> None:
    """Sums close, but vectors would be attributed to the wrong tokens."""

    def roll(model: Any) -> None:
        model.encoder.layer[1].get_submodule(path).register_forward_pre_hook(Before(Change("roll")), with_kwargs=True)

    verdict = attacked(roll)
    assert "mix" in verdict.layers["encoder"][1].reason
    assert not verdict.layers["encoder"][0].reason


def test_attention_of_another_implementation() -> None:
    for kind, same in (("attack_same", True), ("attack_sharper", False), ("attack_shifted", False)):
        error = attacked(lambda model, kind=kind: model.set_attn_implementation(kind)).error
        assert (error < 1e-9) is same, kind


def test_norms_are_read_by_what_they_do() -> None:
    for kind in (nn.LayerNorm, nn.RMSNorm, nn.Identity):

        def replace(model: Any, kind: Any = kind) -> None:
            model.encoder.layer[1].output.LayerNorm = kind(24).double() if kind is not nn.Identity else nn.Identity()

        assert attacked(replace).error_in() < 1e-9, kind
    verdict = attacked(lambda model: setattr(model.encoder.layer[1].output, "LayerNorm", nn.Tanh()))
    assert verdict.error_in(Part(layers=[1])) == float("inf")
    assert verdict.error_in(Part(layers=[1], scopes=["ATTNRESLNFFRES-N"])) < 1e-9


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart", "t5"])
def test_flows_against_autograd(name: str) -> None:
    """||x_i<-k|| from the Jacobian of the frozen model."""
    model = build(name, None, torch.float64, 0)
    encoding = inputs(name, model, None, 4, 3, 0)
    reference = Detached(model, encoding)
    maps, error = flow_maps(judged(name, model, encoding), 1e-5)
    assert error < 1e-6
    order = [side for side in ("decoder", "encoder") if side in reference.states]
    vectors = reference.vectors(order[0], order).norm(dim=-1)
    torch.testing.assert_close(maps[-1].detach(), vectors, rtol=1e-5, atol=1e-6)
