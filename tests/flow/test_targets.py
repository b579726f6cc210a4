"""Targets of a flow, and targets that a model does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope import Analyzer
from normscope.inputs.encode import encode
from tests.helpers.compare import refused, state_of
from tests.helpers.flow_cases import encoding, open_case
from tests.helpers.tiny import tiny
from tests.helpers.toys import masked, named_classifier, speaker, translator

TEXT = "the cat sat on a"


def test_the_same_target_in_several_words() -> None:
    lens = named_classifier()
    texts = [lens.flow("the cat", target=target) for target in (1, -2, "good", "GOOD", "1")]
    for found in texts:
        assert found.value == texts[0].value
        assert "'good'" in found.to.target  # type: ignore[union-attr]
    top = lens.flow("the cat", target="top")
    assert top.value == max(lens.flow("the cat", target=n).value for n in range(3))


def test_a_causal_model_is_read_at_its_last_token() -> None:
    lens = speaker()
    word = lens.flow(TEXT, target="mat")
    assert lens.tokenizer is not None
    token = lens.flow(TEXT, target=lens.tokenizer.get_vocab()["mat"], position=-1)
    torch.testing.assert_close(word.scores, token.scores)
    assert word.to is not None
    assert word.to.target.startswith("logit of 'mat' at position")


def test_a_masked_model_is_read_at_its_mask() -> None:
    lens = masked()
    (item,) = encode(lens.loaded, "the [MASK] sat")
    place = item.sides["encoder"].names.index("[MASK]")
    found = lens.flow("the [MASK] sat", target=9)
    torch.testing.assert_close(found.scores, lens.flow("the [MASK] sat", target=9, position=place).scores)
    refused(lambda: lens.flow("the cat sat", target=9), "position=")


def test_an_encoder_decoder_takes_a_pair() -> None:
    lens = translator()
    found = lens.flow(("the cat sat", "le chat"), target="sur")
    sides = [label.side for label in found.columns]
    assert sides == sorted(sides)  # the decoder's tokens, then the encoder's
    assert len(found.rows) == sides.count("decoder")


def test_a_softcap_is_held() -> None:
    """Gemma 2's logits are ``c tanh(a / c)``: the shares of a, scaled by one factor, sum to the capped logit."""
    model = tiny("gemma2", "CausalLM", final_logit_softcapping=0.5)  # so low that it acts
    lens, given = Analyzer(model), encoding("gemma2", model)
    capped = lens.flow(given, target=3)
    model.config.final_logit_softcapping = None
    plain = Analyzer(model).flow(given, target=3)
    assert abs(capped.value) < 0.5 < abs(plain.value)
    torch.testing.assert_close(capped.scores, plain.scores * capped.value / plain.value, rtol=1e-5, atol=1e-8)
    assert capped.to is not None
    assert capped.to.completeness < 1e-6
    assert "softcap 0.5 held at its ratio" in capped.to.target


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        (3, ("no logit 3", "0 to 2")),
        (-4, ("no logit -4",)),
        ("goood", ("no class", "good")),
        (1.5, ("float",)),
        (True, ("bool",)),
        ((0, 1, 2), ("not 3",)),
        ((), ("not 0",)),
        ((1, 1), ("the same",)),
        ((1, "good"), ("the same",)),
        ([1], ("list",)),
    ],
)
def test_a_missing_class(target: Any, parts: tuple[str, ...]) -> None:
    refused(lambda: named_classifier().flow("the cat", target=target), *parts)


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("zebra", ("'zebra'", "not in the vocabulary")),
        (50, ("no logit 50", "0 to 49")),
    ],
)
def test_a_word_that_is_not_in_the_vocabulary(target: Any, parts: tuple[str, ...]) -> None:
    refused(lambda: speaker().flow(TEXT, target=target), *parts)


def test_a_text_of_several_tokens_has_no_logit_at_one_position() -> None:
    refused(lambda: speaker().flow(TEXT, target="the cat", position=2), "is split into", "the", "cat")
    refused(lambda: masked().flow("the [MASK] sat", target="the cat"), "is split into", "the", "cat")


@pytest.mark.parametrize("position", [6, -7, 100])
def test_a_position_past_the_end(position: int) -> None:
    refused(lambda: speaker().flow(TEXT, target=3, position=position), f"no position {position}")


@pytest.mark.parametrize("position", [1.0, "1", True])
def test_a_position_that_is_not_an_integer(position: Any) -> None:
    refused(lambda: speaker().flow(TEXT, target=3, position=position), "A position is an integer")


def test_a_position_without_a_target() -> None:
    refused(lambda: speaker().flow(TEXT, position=1), "give a target")


@pytest.mark.parametrize("name", ["bert", "llama", "bart"])
def test_a_model_without_a_head(name: str) -> None:
    lens, given, _, _ = open_case(name)
    refused(lambda: lens.flow(given, target=1), "has no head", "AutoModelFor")
    assert lens.flow(given).maps.isfinite().all()


def test_a_word_without_a_tokenizer() -> None:
    lens, given, _, _ = open_case("llama", "CausalLM")
    refused(lambda: lens.flow(given, target="cat"), "no tokenizer")


class Odd(nn.Module):
    """Neither a linear map, nor a norm, nor an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1)[..., :2]


def test_a_head_that_is_not_understood() -> None:
    model: Any = tiny("bert", "SequenceClassification")
    model.classifier = Odd().eval()
    lens, given = Analyzer(model), encoding("bert", model)
    before = state_of(model)
    refused(lambda: lens.flow(given, target=1), "cannot be decomposed", "Leave the target out")
    assert state_of(model) == before
    assert lens.flow(given).maps.isfinite().all()


def test_a_flow_without_a_target_has_no_scores() -> None:
    lens, given, _, _ = open_case("bert", "MaskedLM")
    found = lens.flow(given)
    refused(lambda: found.scores, "no target")
    refused(lambda: found.value, "no target")
    refused(lambda: found.remainder, "no target")
    assert found.map.shape == (7, 7)


def test_training_mode_and_gates_are_refused_as_elsewhere() -> None:
    model = tiny("bert", "MaskedLM")
    lens, given = Analyzer(model), encoding("bert", model)
    refused(lambda: lens.flow(given, gate="shap"), "Unknown gate")
    model.train()
    refused(lambda: lens.flow(given), "training mode")
