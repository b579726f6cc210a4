"""Predictions and their contexts, and refused models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normscope import Analyzer, NormscopeError
from normscope.inputs.encode import encode
from normscope.inputs.item import Item
from normscope.papers.faithfulness.contexts import (
    named_generator,
    prediction_contexts,
    prediction_task,
)
from normscope.papers.faithfulness.settings import Settings, settings_from_plain
from tests.helpers.tiny import tiny
from tests.helpers.toys import causal, classifier, masked, toy_tokenizer

TEXT = "the cats sat on the big red mat"  # [CLS] the cat ##s sat on the big red mat [SEP]


def item(lens: Analyzer, text: str = TEXT) -> Item:
    (found,) = encode(lens.loaded, text)
    return found


def test_tasks() -> None:
    assert [prediction_task(lens) for lens in (classifier(), causal(), masked())] == [
        "class",
        "next",
        "masked",
    ]


def test_models_that_predict_nothing_are_refused() -> None:
    for lens, reason in (
        (Analyzer(tiny("bert"), toy_tokenizer()), "no head"),
        (Analyzer(tiny("bert", "SequenceClassification")), "tokenizer"),
        (Analyzer(tiny("bert", "SequenceClassification", num_labels=1), toy_tokenizer()), "single output"),
        (Analyzer(tiny("bert", "TokenClassification"), toy_tokenizer()), "no head that predicts a class"),
        (Analyzer(tiny("marian", "Seq2SeqLM"), toy_tokenizer()), "encoder or decoder that reads text"),
        (Analyzer(tiny("vit", "ImageClassification")), "reads text"),
    ):
        with pytest.raises(NormscopeError, match=reason):
            prediction_task(lens)


def test_a_class() -> None:
    (found,) = prediction_contexts(classifier(), item(classifier()), "LABEL_2", "a", Settings())
    assert found.position is None
    assert found.removable == tuple(range(1, 10))  # not [CLS] and [SEP]
    assert found.given == 2
    for label, given in (("1", 1), ("label_0", 0), ("7", None), ("nonsense", None), (None, None)):
        assert prediction_contexts(classifier(), item(classifier()), label, "a", Settings())[0].given == given
    with pytest.raises(NormscopeError, match="has no label that the model knows"):
        prediction_contexts(classifier(), item(classifier()), None, "a", Settings(target="given"))


def test_the_next_token() -> None:
    lens = causal()
    ids = item(lens).tensors["input_ids"].tolist()
    (found,) = prediction_contexts(lens, item(lens), None, "a", Settings())
    assert found.position == 9  # the last word: after it comes [SEP]
    assert found.item.tensors["input_ids"].tolist() == ids[:10]
    assert found.item.sides["decoder"].names[-1] == "mat"
    assert found.removable == tuple(range(1, 10))
    assert found.given == ids[10]
    several = prediction_contexts(lens, item(lens), None, "a", Settings(positions=4))
    assert len({one.position for one in several}) == 4
    for one in several:
        assert one.position is not None
        assert len(one.item.tensors["input_ids"]) == one.position + 1
        assert one.given == ids[one.position + 1]
        assert len(one.removable) >= 3
    all_of_them = prediction_contexts(lens, item(lens), None, "a", Settings(positions=99))
    assert [one.position for one in all_of_them] == [3, 4, 5, 6, 7, 8, 9]


def test_a_masked_token() -> None:
    lens = masked()
    ids = item(lens).tensors["input_ids"].tolist()
    for one in prediction_contexts(lens, item(lens), None, "a", Settings(positions=3)):
        assert one.position is not None
        assert one.item.tensors["input_ids"][one.position] == 4  # [MASK]
        assert one.item.sides["encoder"].names[one.position] == "[MASK]"
        assert one.given == ids[one.position]
        assert one.position not in one.removable
        assert len(one.removable) == 8


def test_positions_depend_on_the_entry_and_the_seed_alone() -> None:
    def drawn(id: str, seed: int) -> list[int | None]:
        return [
            one.position
            for one in prediction_contexts(causal(), item(causal()), None, id, Settings(positions=3, seed=seed))
        ]

    assert drawn("a", 0) == drawn("a", 0)
    assert len({tuple(drawn(id, seed)) for id in "abcdef" for seed in (0, 1)}) > 4
    assert named_generator(0, "a", "x").random() != named_generator(0, "a", "y").random()


def test_an_unknown_word_is_text() -> None:
    (found,) = prediction_contexts(classifier(), item(classifier(), "the zebra sat"), None, "a", Settings())
    assert found.item.sides["encoder"].names[2] == "[UNK]"
    assert found.removable == (1, 2, 3)


def test_short_texts_are_refused() -> None:
    for lens in (classifier(), causal(), masked()):
        with pytest.raises(NormscopeError, match="too short"):
            prediction_contexts(lens, item(lens, "the cat"), None, "a", Settings())


def test_settings() -> None:
    given = Settings(methods=("exact", "random"), positions=3, erasures=("delete",))
    assert settings_from_plain(given.to_plain()) == given
    assert settings_from_plain(given.to_plain() | {"head": "x"}) == given
    assert settings_from_plain({}) == Settings()
    for wrong, reason in (
        ({"target": "nope"}, "one of top, given"),
        ({"erasures": ["burn"]}, "mask or delete"),
        ({"erasures": []}, "mask or delete"),
        ({"positions": -1}, "0 \\(the last position\\) or more"),
        ({"nonsense": 1}, "settings: nonsense"),
    ):
        with pytest.raises(NormscopeError, match=reason):
            settings_from_plain(wrong)


def test_heads_are_what_the_tests_say() -> None:
    assert isinstance(classifier().model.classifier, nn.Linear)
    assert classifier().model.config.num_labels == 3
    assert torch.equal(causal().model.get_output_embeddings().weight, causal().model.lm_head.weight)
