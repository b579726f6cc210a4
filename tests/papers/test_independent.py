"""The numbers of a report on a BERT equal those of an independent computation from its weights."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from normscope import Analyzer
from normscope.papers.study import find_paper, reproduce
from tests.helpers import paper_oracle
from tests.helpers.paper_oracle import NaiveBert
from tests.helpers.tiny import random_model
from tests.helpers.toys import toy_tokenizer

TEXTS = ("the cats sat on the big red mat", "a dog saw it and ran", "the red bird was big and it ran and sat on a cat")


def naive_bert(model: Any) -> NaiveBert:
    names = {name.removeprefix("bert."): value for name, value in model.state_dict().items()}
    weights = {name: value.double().numpy() for name, value in names.items() if value.is_floating_point()}
    config = model.config
    return NaiveBert(weights, config.num_hidden_layers, config.num_attention_heads, config.layer_norm_eps)


def assert_close(ours: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert set(expected) <= set(ours)
    assert {key: ours[key] for key in expected} == pytest.approx(dict(expected), rel=1e-6, abs=1e-6)


def check_report(paper: str, model: Any, tokenizer: Any, texts: Sequence[str], folder: Path) -> int:
    """Compare a report with the independent numbers, and return how many were compared."""
    data = folder / "data.txt"
    data.write_text("\n".join(texts) + "\n")
    readings = {"emnlp2021": ["mask_draw=authors"], "ff": ["masking=false"]}.get(paper, [])
    report, _ = reproduce(find_paper(paper), Analyzer(model, tokenizer), data, folder / paper, readings=readings)
    bert, ids = naive_bert(model), [tokenizer(text)["input_ids"] for text in texts]
    if paper == "emnlp2020":
        expected = paper_oracle.emnlp2020_numbers(bert, ids)
    elif paper == "emnlp2021":
        expected = paper_oracle.emnlp2021_numbers(bert, ids, tokenizer.mask_token_id)
    else:
        expected = paper_oracle.ff_numbers(bert, ids)
        check_amplified_pairs(folder / paper / "tables/amplified-pairs.csv", bert, ids, tokenizer)
    assert_close(report.numbers, expected)
    return len(expected)


def check_amplified_pairs(table: Path, bert: NaiveBert, ids: Sequence[Sequence[int]], tokenizer: Any) -> None:
    amps = paper_oracle.mean_ff_amp(bert, ids)
    with table.open() as file:
        rows = [row for row in csv.DictReader(file) if row["amplified by"] == "FF"]
    assert rows
    for row in rows:
        pair = tuple(tokenizer.convert_tokens_to_ids([row["input"], row["output"]]))
        assert float(row["amp"]) == pytest.approx(amps[int(row["layer"]) - 1][pair], rel=1e-6, abs=1e-6)  # type: ignore[index]


@pytest.mark.parametrize(("paper", "count"), [("emnlp2020", 100), ("emnlp2021", 140), ("ff", 100)])
def test_numbers_are_those_of_an_independent_computation(paper: str, count: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 35, "num_attention_heads": 5, "intermediate_size": 53, "num_hidden_layers": 3}
    model = random_model("bert", "MaskedLM", seed=3, vocab_size=21, max_position_embeddings=24, **sizes)
    assert model.dtype == torch.float64
    assert check_report(paper, model, toy_tokenizer(), TEXTS, tmp_path) >= count
