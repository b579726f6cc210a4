"""The source of value vectors: packed projections, and projections that do not produce the values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import normscope.models.registry
from normscope import Analyzer, NormscopeError
from normscope.models.modules import value_rows
from tests.helpers.compare import refused
from tests.helpers.odd_families import IDS, LATENT, bloom, bloom_family, latent, latent_family
from tests.helpers.tiny import VALUE_PROJECTIONS, inputs, tiny


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(normscope.models.registry, "_registered", [])
    return normscope.models.registry.register_family


def complete(found: Any, accuracy: float) -> bool:
    return all(float(error.max()) < accuracy for scope, error in found.completeness.items() if scope.endswith("-N"))


def test_probabilities_of_a_packed_projection(register: Any) -> None:
    """The value of each head is the last of its three parts; the norms of alpha v W_O are computed cell by cell."""
    model: Any = bloom()
    register(bloom_family(model))
    lens = Analyzer(model)
    found = lens.analyze(IDS)
    assert complete(found, 1e-9)
    assert complete(lens.analyze(IDS, value_bias="remainder"), 1e-9)
    with torch.no_grad():
        made = model(**IDS, output_attentions=True, output_hidden_states=True)
    for number, layer in enumerate(model.transformer.h):
        x = layer.input_layernorm(made.hidden_states[number])[0]
        packed = layer.self_attention.query_key_value(x).view(7, 4, 3, 6)
        matrix = layer.self_attention.dense.weight.t().view(4, 6, 24)
        expected = torch.zeros(7, 7, 24, dtype=torch.float64)
        for head in range(4):
            alpha = made.attentions[number][0, head]
            expected += alpha[:, :, None] * (packed[:, head, 2] @ matrix[head])[None]
        torch.testing.assert_close(found["LNATTN-N"][number], expected.norm(dim=-1), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rank", [8, 24])  # 24 is the width of the states, so that shapes do not tell
@pytest.mark.parametrize(("value", "packing"), LATENT)
def test_values_that_are_made_in_two_steps(register: Any, value: str, packing: Any, rank: int) -> None:
    model = latent(rank)
    register(latent_family(model, value, packing))  # maps would close, with the values as the model used them
    refused(lambda: Analyzer(model), "computed in more than one step")


def more(module: Any, args: Any, made: Tensor) -> Tensor:
    return made + 0.1


@pytest.mark.parametrize(("name", "path"), [*VALUE_PROJECTIONS, ("bart", "decoder.layers.1.encoder_attn.v_proj")])
def test_a_hook_on_the_value_projection(name: str, path: str) -> None:
    model = tiny(name)
    given = inputs(name, model)
    lens = Analyzer(model)
    lens.analyze(given, value_bias="remainder")
    model.get_submodule(path).register_forward_hook(more)
    lens.analyze(given)
    refused(lambda: lens.analyze(given, value_bias="remainder"), "do not come from", "hook")


@pytest.mark.parametrize(
    ("packing", "shape"), [("alone", (3, 13)), ("tail", (3, 11)), ("interleaved", (3, 35)), ("tail", (3, 0))]
)
def test_a_projection_that_does_not_hold_the_values(packing: str, shape: tuple[int, int]) -> None:
    with pytest.raises(NormscopeError, match="4 heads of width 3"):
        value_rows(torch.zeros(shape), packing, 4, 3)
