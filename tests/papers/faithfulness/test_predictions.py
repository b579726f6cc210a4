"""Predictions without some tokens, against the model itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from normscope import Analyzer, NormscopeError
from normscope.inputs.encode import encode
from normscope.papers.faithfulness import predictions as predictions_module
from normscope.papers.faithfulness.contexts import Context, prediction_contexts
from normscope.papers.faithfulness.predictions import (
    Erased,
    Replacement,
    erased_logits,
    erased_predictions,
    replacement_token,
)
from normscope.papers.faithfulness.settings import Settings
from tests.helpers.tiny import tiny
from tests.helpers.toys import causal, classifier, masked, toy_tokenizer

SETS = [frozenset(), frozenset([1]), frozenset([3, 9]), frozenset([9, 8, 2]), frozenset(range(1, 10))]
UNKNOWN = Replacement(1, "[UNK]")


def context(lens: Analyzer) -> Context:
    return prediction_contexts(lens, encode(lens.loaded, "the cats sat on the big red mat")[0], None, "a", Settings())[
        0
    ]


def by_hand(lens: Analyzer, ids: list[int], at: int | None) -> Tensor:
    """(classes,): one plain forward pass."""
    with torch.no_grad():
        logits: Tensor = lens.model(input_ids=torch.tensor([ids])).logits[0]
    return logits if at is None else logits[at]


@pytest.mark.parametrize("lens", [classifier(), causal(), masked()], ids=["class", "next", "masked"])
@pytest.mark.parametrize("erasure", ["mask", "delete"])
def test_against_the_model(lens: Analyzer, erasure: str) -> None:
    one = context(lens)
    sets = [some & set(one.removable) for some in SETS]
    erased = [Erased(erasure, some) for some in sets]
    ids = one.item.tensors["input_ids"].tolist()
    found = list(erased_logits(lens, one, erased, UNKNOWN))
    target = 2
    probabilities = erased_predictions(lens, one, target, [*erased, erased[1]], UNKNOWN)
    for some, which, logits in zip(sets, erased, found, strict=True):
        if erasure == "mask":
            given = [1 if n in some else id for n, id in enumerate(ids)]
            at = one.position
        else:
            kept = [n for n in range(len(ids)) if n not in some]
            given = [ids[n] for n in kept]
            at = (
                one.position
                if one.position is None
                else (len(kept) - 1 if lens is causal() else kept.index(one.position))
            )
        expected = by_hand(lens, given, at)
        torch.testing.assert_close(logits, expected.double(), rtol=1e-6, atol=1e-6)
        assert probabilities[which].probability == pytest.approx(float(expected.softmax(-1)[target]), abs=1e-6)
        assert probabilities[which].choice == int(expected.argmax())


def test_small_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for lens in (causal(), masked()):
        one = context(lens)
        erased = [Erased(erasure, some & set(one.removable)) for erasure in ("mask", "delete") for some in SETS]
        before = list(erased_logits(lens, one, erased, UNKNOWN))
        monkeypatch.setattr(predictions_module, "BATCH", 2)
        monkeypatch.setattr(predictions_module, "LOGITS", 1)
        for a, b in zip(before, erased_logits(lens, one, erased, UNKNOWN), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_nothing_left_is_one_neutral_token() -> None:
    lens = causal()
    item = encode(lens.loaded, {"input_ids": [7, 8, 9, 10]})[0]  # without special tokens
    one = prediction_contexts(lens, item, None, "a", Settings())[0]
    assert one.removable == (0, 1, 2, 3)
    (logits,) = erased_logits(lens, one, [Erased("delete", frozenset(range(4)))], UNKNOWN)
    torch.testing.assert_close(logits, by_hand(lens, [1], 0).double(), rtol=1e-6, atol=1e-6)


def test_a_causal_model_that_classifies() -> None:
    """It finds the end of a text by its padding token, [PAD] with the id 0: it must not stand for a removed token."""
    tokenizer = copy.deepcopy(toy_tokenizer())
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    for pad in (0, None):
        lens = Analyzer(tiny("gpt2", "SequenceClassification", pad_token_id=pad, num_labels=3), tokenizer)
        one = context(lens)
        ids = one.item.tensors["input_ids"].tolist()
        sets = [some & set(one.removable) for some in SETS]
        for some, logits in zip(
            sets, erased_logits(lens, one, [Erased("mask", s) for s in sets], UNKNOWN), strict=True
        ):
            expected = by_hand(lens, [1 if n in some else id for n, id in enumerate(ids)], None)
            torch.testing.assert_close(logits, expected.double(), rtol=1e-6, atol=1e-6)
        if pad == 0:
            with pytest.raises(NormscopeError, match="marks the end of the text"):
                replacement_token(lens, "[PAD]")
        assert replacement_token(lens).token == "[UNK]"


def test_the_token_that_stands_for_nothing() -> None:
    assert replacement_token(classifier()).token == "[MASK]"
    assert replacement_token(causal()).token == "[UNK]"  # its tokenizer has a mask token, but it was never shown one
    assert replacement_token(causal(), "cat") == Replacement(7, "cat")
    with pytest.raises(NormscopeError, match="replacement token 'zebra' is not in the vocabulary"):
        replacement_token(causal(), "zebra")
    tokenizer = copy.deepcopy(toy_tokenizer())
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.eos_token = tokenizer.unk_token  # as GPT-2 has it
    assert replacement_token(Analyzer(tiny("gpt2", "CausalLM"), tokenizer)).token == "[PAD]"
