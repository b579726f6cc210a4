"""Every published number of EMNLP 2021 can be reached by a command, or there is a reason why not."""

from __future__ import annotations

import json
import random
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from normscope import Analyzer, corpus
from normscope.papers import published
from normscope.papers.emnlp2021 import PAPER
from normscope.papers.study import reproduce
from normscope.papers.verify import tolerance_rule
from tests.helpers.tiny import tiny
from tests.helpers.toys import save_model, toy_tokenizer

TEXTS = ("the cat sat on a mat", "a big red bird saw it and ran", "the dog ran and sat")
METHODS = "(ATTN-W|ATTN-N|ATTNRES-W|ATTNRES-N|ATTNRESLN-N)"
LAYER = r"L(\d+)"
PATTERNS = {  # experiment -> the keys of its numbers, as tests of the sections check them
    "mixing": rf"mixing\.{METHODS}\.(mean|max|min)",
    "layers": rf"mixing\.{METHODS}\.{LAYER}\.(first|separator|mask|other|overall)",
    "depth": rf"depth\.{METHODS}",
    "frequency": rf"frequency\.{METHODS}\.(all|words)",
    "expansion": rf"expansion\.(code|paper)\.(mean|min|max|{LAYER})",
}
EXCEPTIONS = {  # model -> why a single report cannot be compared with its numbers
    "multiberts": "means over 25 models; reports of several models are compared jointly",
}


def entries() -> list[dict[str, Any]]:
    text = files("normscope.papers").joinpath("published.json").read_text()
    found: list[dict[str, Any]] = json.loads(text)["emnlp2021"]
    return found


def experiment_of(key: str) -> str | None:
    return next((name for name, pattern in PATTERNS.items() if re.fullmatch(pattern, key)), None)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry['model']}-{entry['data']}")
def test_published_numbers_can_be_reached(entry: dict[str, Any]) -> None:
    model, data = entry["model"], entry["data"]
    assert entry["figures"]
    for name in entry["figures"]:
        assert not name.endswith(".sd") or model in EXCEPTIONS, name  # over models, in joint reports
        key = name.removesuffix(".sd")
        experiment = experiment_of(key)
        assert experiment is not None, key
        assert (data is None) == (experiment == "expansion"), key  # only the weights are independent of the data
        assert tolerance_rule(key).pattern != ".*", key
        layer = re.search(r"\.L(\d+)", key)
        if layer and model in published.MODELS:
            assert 1 <= int(layer[1]) <= published.MODELS[model][0].layers
    if model in EXCEPTIONS:
        assert model not in published.published_models("emnlp2021")
    else:
        assert model in published.published_models("emnlp2021")
        assert data is None or data in published.published_corpora("emnlp2021", model)


def test_every_exception_is_one() -> None:
    assert set(EXCEPTIONS) <= {entry["model"] for entry in entries()}


def test_patterns_are_those_of_the_sections(all_numbers: set[str]) -> None:
    """Every experiment yields the keys that its pattern says, with BERT's names of scopes."""
    for name, pattern in PATTERNS.items():
        assert any(re.fullmatch(pattern, key) for key in all_numbers), name
    names = {name.removesuffix(".sd") for entry in entries() for name in entry["figures"]}
    assert {name for name in names if not re.search(r"\.L(\d+)", name)} <= all_numbers


def test_verify_uses_the_authors_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a report with our own masks in the same folder; a reading that is given stays as it is."""
    monkeypatch.setattr(published, "published_corpus_key", lambda lengths, model: "wikipedia")
    model = save_model(tmp_path / "bert-tiny", hidden_size=128)
    data = tmp_path / "data.txt"
    data.write_text("\n".join(TEXTS) + "\n")

    def masks(run: str) -> list[list[int]]:
        items = corpus.open(tmp_path / "out/runs" / run).scan("items").sort("id").collect()
        return [[n for n, token in enumerate(tokens) if token == "[MASK]"] for tokens in items["tokens"].to_list()]

    options = {"experiments": ["mixing"], "verify": True}
    reproduce(PAPER, model, data, tmp_path / "out", experiments=["mixing"])
    report, _ = reproduce(PAPER, model, data, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert ("mask_draw", "authors") in [reading[:2] for reading in report.readings]
    assert "--reading mask_draw=authors" in report.command
    assert "in corpus order" in dict(report.facts)["run \u201cmasked\u201d"]
    assert corpus.open(tmp_path / "out/runs/authors-masks/masked").manifest["options"]["mask_draw"] == "authors"
    random.seed(0)
    sizes = [len(toy_tokenizer()(text)["input_ids"]) - 2 for text in TEXTS]
    expected = [sorted(random.sample(range(1, n + 1), max(1, int(n * 0.12)))) for n in sizes]
    assert masks("authors-masks/masked") == expected
    assert report.checks
    given = ["mask-draw=sequence"]
    report, _ = reproduce(PAPER, model, data, tmp_path / "out", readings=given, **options)  # type: ignore[arg-type]
    assert ("mask_draw", "sequence") in [reading[:2] for reading in report.readings]


@pytest.fixture(scope="module")
def all_numbers(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The keys of a report with a tiny BERT of three layers."""
    folder = tmp_path_factory.mktemp("report")
    data = folder / "data.txt"
    data.write_text("\n".join(TEXTS) + "\n")
    lens = Analyzer(tiny("bert", "MaskedLM", num_hidden_layers=3), toy_tokenizer())
    report, _ = reproduce(PAPER, lens, data, folder / "out", experiments=list(PATTERNS))
    return set(report.numbers)
