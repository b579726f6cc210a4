"""ALTI-Logit against plain loops: each layer's attention through the final norm and the unembedding, and ALTI."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.compare import relative
from tests.helpers.flow_cases import ONE_SIDED, POST_NORM, heads, open_case, place, tolerance
from tests.helpers.layer_oracle import norm_of
from tests.helpers.naive_flow import inputs_of_layers, layer_map, naive

PRE_NORM = tuple(name for name in ONE_SIDED if name not in POST_NORM)
FINAL = {"gpt2": "transformer.ln_f", "llama": "model.norm", "gemma2": "model.norm"}
ADDED = {"gemma2": ("LNATTNLN-N", "LNATTNLNRESLNFFLN-N")}  # what the two blocks add, each after its norm


@pytest.mark.parametrize("name", FINAL)
def test_against_its_definition(name: str) -> None:
    lens, given, _, _ = open_case(name, "CausalLM")
    layers = naive(name, "CausalLM")["decoder"]
    entered = inputs_of_layers(name)
    model: Any = lens.model
    norm = norm_of(model.get_submodule(FINAL[name]))
    unembedding = model.lm_head.weight.detach()
    attends, feeds = ADDED.get(name, ("LNATTN-N", "LNATTNRESLNFF-N"))
    assert norm is not None
    position, word = 5, 11
    last = list(layers[-1].actual.values())[-1][position]
    centre = last.mean() if norm.centred else 0.0
    s = (((last - centre) ** 2).mean() + norm.eps).sqrt()

    def logit(update: Tensor) -> float:
        """The share of an update of the last token's state in the logit, with the final norm's deviation frozen."""
        scaled = norm.gamma * (update - update.mean() if norm.centred else update) / s  # type: ignore[union-attr]
        return float(scaled.detach() @ unembedding[word])

    n = len(entered[0])
    rolled = torch.eye(n, dtype=torch.float64)  # from what enters a layer to the input
    attention, stays = torch.zeros(n, dtype=torch.float64), logit(entered[0][position])
    for layer, x in zip(layers, entered, strict=True):
        for j in range(n):
            share = logit(layer.vectors[attends][position, j])
            for k in range(n):
                attention[k] += share * rolled[j, k]
        stays += logit(layer.actual[feeds][position])
        rolled = layer_map(layer, x) @ rolled
    if name == "gemma2":  # 30 tanh(a / 30), held
        whole = logit(last)
        held = 30 * math.tanh(whole / 30) / whole
        attention, stays = held * attention, held * stays
    published = lens.flow(given, method="alti_logit:attention", target=word, position=position)
    assert relative(published.scores, attention) <= (1e-9 if name == "gpt2" else 1e-5)
    attention[position] += stays
    full = lens.flow(given, method="alti_logit", target=word, position=position)
    assert relative(full.scores, attention) <= (1e-9 if name == "gpt2" else 1e-5)


@pytest.mark.parametrize("option", ["", ":all", ":attention"])
@pytest.mark.parametrize("name", PRE_NORM)
def test_scores_and_remainder_sum_to_the_logit(name: str, option: str) -> None:
    """With every head: the sum over layers telescopes, and ALTI only moves shares between tokens."""
    for head in heads(name):
        lens, given, _, frozen = open_case(name, head)
        found = lens.flow(given, method=f"alti_logit{option}", target=1, position=place(frozen))
        assert found.to is not None
        assert found.to.completeness <= tolerance(name)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_alti_logit_of_a_single_token(name: str) -> None:
    lens, given, _, _ = open_case(name, "CausalLM")
    one = {key: value[:, :1] for key, value in given.items()}
    found = lens.flow(one, method="alti_logit", target=3)
    assert float(found.scores[0]) + found.remainder == pytest.approx(found.value, rel=1e-6)
