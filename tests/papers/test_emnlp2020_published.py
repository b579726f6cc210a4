"""Every published number of EMNLP 2020 can be reached by a command, or there is a reason why not."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import pytest

from normscope import Analyzer
from normscope.papers import published
from normscope.papers.emnlp2020 import PAPER
from normscope.papers.study import reproduce
from normscope.papers.verify import tolerance_rule
from tests.helpers.tiny import tiny
from tests.helpers.toys import letters_tokenizer, toy_tokenizer

TEXTS = ("the cat sat on a mat", "a big red bird saw it and ran", "the dog ran and sat")
LAYER, CATEGORY = r"L(\d+)", "(first|separator|punctuation|other)"
PATTERNS = {  # experiment -> the keys of its numbers
    "dispersion": rf"data\.(tokens|pairs)|dispersion\.({LAYER}H(\d+)\.)?(mean|sd|cv|max|min)",
    "shares": rf"share\.(weight|norm)\.{CATEGORY}\.{LAYER}",
    "correlation": rf"(pairs|spearman)\.{CATEGORY}",
    "frequency": r"frequency\.(norm|weight)",
    "alignment": r"alignment\.(AWO|AWI)\.((weight|norm)\.(mean|best)|highest_layer|highest_head|rho|r)",
}
EXCEPTIONS = {  # model -> why no report is compared with its numbers
    "transformer-iwslt-de-en": "means over five translation models that were not published",
}
ABSENT = "punctuation"  # the toy texts have none


def entries() -> list[dict[str, Any]]:
    text = files("normscope.papers").joinpath("published.json").read_text()
    found: list[dict[str, Any]] = json.loads(text)["emnlp2020"]
    return found


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry['model']}-{entry['data']}")
def test_published_numbers_can_be_reached(entry: dict[str, Any]) -> None:
    model, data = entry["model"], entry["data"]
    assert entry["figures"]
    for key in entry["figures"]:
        experiments = [name for name, pattern in PATTERNS.items() if re.fullmatch(pattern, key)]
        assert len(experiments) == 1, key
        assert (experiments == ["alignment"]) == (model in EXCEPTIONS), key
        assert tolerance_rule(key).pattern != ".*", key
        layer = re.search(rf"\.{LAYER}", key)
        assert layer is None or 1 <= int(layer[1]) <= published.MODELS[model][0].layers
    if model in EXCEPTIONS:
        assert model not in published.published_models("emnlp2020")
        assert not any(tolerance_rule(key).counts for key in entry["figures"])
        assert set(entry["figures"]) <= set(published.published_main_numbers("emnlp2020"))  # shown beside ours
    else:
        assert model in published.published_models("emnlp2020")
        assert data in published.published_corpora("emnlp2020", model)


def test_every_exception_is_one() -> None:
    assert set(EXCEPTIONS) <= {entry["model"] for entry in entries()}


def test_the_sections_have_the_published_keys(all_numbers: set[str]) -> None:
    """All keys but those of layers, heads and categories that the toys lack."""
    for name, pattern in PATTERNS.items():
        assert any(re.fullmatch(pattern, key) for key in all_numbers), name
    names = {key for entry in entries() for key in entry["figures"] if ABSENT not in key}
    assert {key for key in names if not re.search(rf"\.{LAYER}", key)} <= all_numbers
    forms = {re.sub(rf"\.{LAYER}", ".L1", re.sub(r"H\d+", "H1", key)) for key in names}
    assert forms <= all_numbers


@pytest.fixture(scope="module")
def all_numbers(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The keys of two reports: with a tiny BERT, and with a tiny translation model."""
    folder = tmp_path_factory.mktemp("reports")
    data = folder / "data.txt"
    data.write_text("\n".join(TEXTS) + "\n")
    bert = Analyzer(tiny("bert", num_hidden_layers=2), toy_tokenizer())
    alone, _ = reproduce(PAPER, bert, data, folder / "bert")
    pairs = folder / "pairs.jsonl"
    entry = {"src_words": ["a", "b", "c"], "tgt_words": ["b", "a"], "alignment": [[0, 1], [1, 0]]}
    pairs.write_text(json.dumps(entry) + "\n")
    translator = Analyzer(tiny("marian", "Seq2SeqLM", vocab_size=64), letters_tokenizer())
    aligned, _ = reproduce(PAPER, translator, pairs, folder / "aligned", format="alignments", experiments=["alignment"])
    return set(alone.numbers) | set(aligned.numbers)
