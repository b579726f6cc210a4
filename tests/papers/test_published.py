"""Published numbers: the papers' main results, with the model and corpus of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normscope import Analyzer
from normscope.papers import published
from tests.helpers.tiny import tiny


def lens(name: str, layers: int, width: int, kind: str = "bert") -> Any:
    config = SimpleNamespace(model_type=kind, num_hidden_layers=layers, hidden_size=width)
    return SimpleNamespace(model_name=name, loaded=SimpleNamespace(base=SimpleNamespace(config=config)))


@pytest.mark.parametrize(
    ("paper", "model", "data", "key", "value"),
    [
        ("emnlp2020", "bert-base", "wikipedia", "dispersion.L2H4.max", 12.66),
        ("emnlp2020", "bert-base", "wikipedia", "pairs.other", 1_944_928_224),
        ("emnlp2020", "bert-base", "wikipedia", "share.norm.separator.L12", 0.02),
        ("emnlp2021", "bert-base", "wikipedia", "mixing.ATTNRESLN-N.mean", 18.75),
        ("emnlp2021", "bert-base", "wikipedia", "mixing.ATTN-W.mean", 96.41),  # the notebook's, not the 97.1 printed
        ("emnlp2021", "bert-base", "sst2", "mixing.ATTN-W.mean", 92.5),
        ("emnlp2021", "bert-base", "wikipedia", "mixing.ATTNRESLN-N.L12.first", 39),
        ("emnlp2021", "bert-base", "wikipedia", "mixing.ATTNRESLN-N.L12.separator", 21),
        ("emnlp2021", "bert-base", "wikipedia", "mixing.ATTNRESLN-N.L8.mask", 30),
        ("emnlp2021", "bert-base", "wikipedia", "frequency.ATTNRES-N.words", -0.86),
        ("emnlp2021", "multiberts", "wikipedia", "mixing.ATTNRES-N.mean.sd", 0.3),  # over 25 training runs
        ("emnlp2021", "roberta-base", "wikipedia", "depth.ATTNRESLN-N", -0.98),
        ("emnlp2021", "bert-base", None, "expansion.code.L3", 0.632),  # needs no data
        ("emnlp2021", "bert-mini", "anything", "expansion.code.L4", 2.484),
        ("emnlp2021", "bert-small", None, "expansion.code.max", 2.41),
        ("ff", "bert-base", "wikipedia", "similarity.ATTNRESLNFF-N", 0.79),
        ("ff", "bert-base", "wikipedia", "removed.L11", 0.94),
        ("ff", "bert-base", "conll03", "entity.L11.p", 0.05),
    ],
)
def test_figures(paper: str, model: str, data: str | None, key: str, value: float) -> None:
    assert published.published_numbers(paper, model, data)[key] == value


def test_figures_of_another_corpus_or_model_are_left_out() -> None:
    assert set(published.published_numbers("emnlp2021", "bert-tiny", "sst2")) == {
        *("expansion.code.L1", "expansion.code.L2", "expansion.code.mean", "expansion.code.min", "expansion.code.max")
    }
    assert published.published_numbers("emnlp2020", None, "wikipedia") == {}
    assert published.published_numbers("emnlp2020", "bert-large", "wikipedia") == {}
    assert published.published_numbers("a paper of one's own", "bert-base", "wikipedia") == {}


def test_shares_of_attention_sum_to_one() -> None:
    found = published.published_main_numbers("emnlp2020")
    for layer in range(1, 13):
        kinds = ("first", "separator", "punctuation", "other")
        assert sum(found[f"share.weight.{kind}.L{layer}"] for kind in kinds) == pytest.approx(1, abs=0.0151)


def test_reference_is_bert_base_on_wikipedia_with_what_else_the_paper_has() -> None:
    assert published.published_main_numbers("emnlp2021")["mixing.ATTN-N.mean"] == 85.28
    assert published.published_main_numbers("emnlp2020")["alignment.AWI.norm.best"] == 24.98
    assert published.published_main_numbers("ff")["entity.L3.p"] == 0.05


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (lens("bert-base-uncased", 12, 768), "bert-base"),
        (lens("google-bert/bert-base-uncased", 12, 768), "bert-base"),
        (lens("/models/bert-base-uncased", 12, 768), "bert-base"),
        (lens("/hub/models--google-bert--bert-large-uncased/snapshots/6da4b6", 24, 1024), "bert-large"),
        (lens("prajjwal1/bert-mini", 4, 256), "bert-mini"),
        (lens("google/bert_uncased_L-4_H-512_A-8", 4, 512), "bert-small"),
        (lens("FacebookAI/roberta-base", 12, 768, "roberta"), "roberta-base"),
        (lens("bert-base-uncased", 2, 128), None),  # another model of that name
        (lens("roberta-base", 12, 768), None),
        (lens("bert-base-cased", 12, 768), None),
        (lens("my-bert-base-uncased-finetuned", 12, 768), None),
    ],
)
def test_model_key(given: Any, key: str | None) -> None:
    assert published.published_model_key(given) == key


def test_model_key_of_an_analyzer() -> None:
    model = tiny("bert", dtype=torch.float32, num_hidden_layers=2, hidden_size=128)
    model.name_or_path = "prajjwal1/bert-tiny"
    assert published.published_model_key(Analyzer(model)) == "bert-tiny"


@pytest.mark.parametrize(
    ("lengths", "model", "key"),
    [
        ([122] * 991 + [121_134 - 122 * 991], "bert-base", "wikipedia"),
        ([122] * 992, "bert-base", None),
        ([118] * 992, "roberta-base", "wikipedia"),
        ([25] * 872, "bert-base", "sst2"),
        ([21] * 1000, "bert-base", "conll03"),
        ([39] * 1000, "bert-base", "mnli"),
        ([30] * 1000, "bert-base", None),
        ([], None, None),
    ],
)
def test_data_key(lengths: list[int], model: str | None, key: str | None) -> None:
    assert published.published_corpus_key(lengths, model) == key


def test_models_and_corpora() -> None:
    assert published.published_models("emnlp2020") == ("bert-base",)
    assert published.published_models("emnlp2021") == tuple(published.MODELS)
    assert published.published_corpora("emnlp2021", "bert-base") == ("wikipedia", "sst2", "mnli", "conll03")
