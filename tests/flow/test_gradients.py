"""Gradient x input against central differences; integrated gradients against a plain sum."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope import Analyzer
from normscope.flow import gradients
from normscope.inputs.encode import forward_inputs
from tests.helpers.compare import relative
from tests.helpers.detached import layer_names
from tests.helpers.flow_cases import encoding, open_case, place
from tests.helpers.tiny import tiny


def scaled(name: str, head: str, side: str, token: int, factor: float, row: int) -> float:
    """A logit with one token's input to the first layer of a side multiplied by a factor."""
    lens, given, _, _ = open_case(name, head)
    first = lens.loaded.base.get_submodule(layer_names(lens.model)[side][0])
    done = False

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal done
        if done:
            return None
        done = True
        x = (args[0] if args else kwargs["hidden_states"]).clone()
        x[:, token] *= factor
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    handle = first.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad():
            logits = lens.model(**given).logits[0]
    finally:
        handle.remove()
    return float(logits.reshape(-1, logits.shape[-1])[row, 1])


@pytest.mark.parametrize(
    ("name", "head"),
    [("bert", "MaskedLM"), ("albert", "SequenceClassification"), ("gpt2", "CausalLM"), ("bart", "Seq2SeqLM"),
     ("dinov2", "ImageClassification")],
)  # fmt: skip
def test_gradient_x_input(name: str, head: str) -> None:
    lens, given, _, frozen = open_case(name, head)
    row = place(frozen)
    found = lens.flow(given, method="gradient_x_input", target=1, position=row)
    h = 1e-5
    expected = [
        (scaled(name, head, label.side, label.position, 1 + h, row)
         - scaled(name, head, label.side, label.position, 1 - h, row)) / (2 * h)
        for label in found.columns
    ]  # fmt: skip
    assert relative(found.scores, torch.tensor(expected, dtype=torch.float64)) <= 1e-6
    assert found.remainder != found.remainder  # nan: not a decomposition


@pytest.mark.parametrize(
    ("name", "head", "error"),
    [("bert", "MaskedLM", 1e-9), ("gpt2", "CausalLM", 1e-6), ("bart", "Seq2SeqLM", 1e-6),
     ("dinov2", "ImageClassification", 1e-2), ("llama", "CausalLM", 5e-2)],
)  # fmt: skip
def test_integrated_gradients_are_complete(name: str, head: str, error: float) -> None:
    """Up to the resolution of the steps: the norm of a vector near zero changes sharply."""
    lens, given, _, frozen = open_case(name, head)
    found = lens.flow(given, method="integrated_gradients", target=1, position=place(frozen))
    assert found.to is not None
    assert found.to.completeness <= error
    fewer = lens.flow(given, method="integrated_gradients:10", target=1, position=place(frozen))
    assert fewer.to is not None
    assert fewer.to.completeness > found.to.completeness
    assert fewer.remainder == found.remainder  # the target at the baseline


def test_integrated_gradients_by_a_plain_sum() -> None:
    """Against the middle of 400 equal steps of the path."""
    lens, given, _, _ = open_case("bert", "MaskedLM")
    found = lens.flow(given, method="integrated_gradients", target=1, position=3)
    ((_, names),) = layer_names(lens.model).items()
    first = lens.loaded.base.get_submodule(names[0])
    states: list[Tensor] = []

    def hook(module: nn.Module, args: Any) -> Any:
        states.append((args[0] * t).detach().requires_grad_())
        return (states[-1], *args[1:])

    total = torch.zeros(7, dtype=torch.float64)
    handle = first.register_forward_pre_hook(hook)
    for step in range(400):
        t = (step + 0.5) / 400
        (slope,) = torch.autograd.grad(lens.model(**given).logits[0, 3, 1], states[-1:])
        total += (slope * states[-1] / t)[0].sum(-1).detach() / 400
    handle.remove()
    assert relative(found.scores, total) <= 1e-4


@pytest.mark.parametrize(
    ("name", "head"),
    [("bert", "TokenClassification"), ("gpt2", "CausalLM"), ("t5", "Seq2SeqLM"), ("dinov2", "ImageClassification"),
     ("llama", "SequenceClassification"), ("gpt_oss", "CausalLM")],
)  # fmt: skip
def test_steps_in_batches_of_any_size(name: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps in one batch, one in a pass, and a few."""
    lens, given, _, frozen = open_case(name, head)
    method = "integrated_gradients:9"
    whole = lens.flow(given, method=method, target=1, position=place(frozen))
    for tokens in (1, 30):
        monkeypatch.setattr(gradients, "PASS_TOKENS", tokens)
        found = lens.flow(given, method=method, target=1, position=place(frozen))
        assert relative(found.scores, whole.scores) <= 1e-6
        assert found.remainder == pytest.approx(whole.remainder, rel=1e-6, abs=1e-9)


def test_a_small_budget_runs_one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lens, given, _, _ = open_case("gpt2", "CausalLM")
    sizes: list[int] = []

    def encode(loaded: Any, items: list[Any]) -> dict[str, Any]:
        sizes.append(len(items))
        return forward_inputs(loaded, items)

    monkeypatch.setattr(gradients, "forward_inputs", encode)
    expected = lens.flow(given, method="integrated_gradients:4", target=1)
    assert sizes == [2, 4]  # the first is the check that batches work
    sizes.clear()
    found = Analyzer(lens.model, memory_budget=1).flow(given, method="integrated_gradients:4", target=1)
    assert sizes == [2, 1, 1, 1, 1]
    assert relative(found.scores, expected.scores) <= 1e-9


def test_a_classifier_that_refuses_batches() -> None:
    """GPT-2 needs a padding token to find the last token of each of several inputs."""
    model = tiny("gpt2", "SequenceClassification")
    lens, given = Analyzer(model), encoding("gpt2", model)
    expected = lens.flow(given, method="integrated_gradients:5", target=1)
    other = copy.deepcopy(model)
    other.config.pad_token_id = None
    with pytest.raises(ValueError, match="padding token"):
        other(input_ids=given["input_ids"].repeat(2, 1))
    found = Analyzer(other).flow(given, method="integrated_gradients:5", target=1)
    assert relative(found.scores, expected.scores) <= 1e-9


def test_a_hook_that_mixes_the_items_of_a_batch() -> None:
    """A model that someone else has hooked runs one step at a time."""
    model = tiny("gpt2", "CausalLM")
    lens, given = Analyzer(model), encoding("gpt2", model)
    expected = lens.flow(given, method="integrated_gradients:5", target=1)
    handle = model.transformer.h[1].register_forward_hook(lambda module, args, made: 2 * made - made.mean(0))
    try:
        found = Analyzer(model).flow(given, method="integrated_gradients:5", target=1)
    finally:
        handle.remove()
    assert relative(found.scores, expected.scores) <= 1e-9
