"""Measures of a whole sample, measures summed over a shard, and runs on the first entries only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import normscope
from normscope import NormscopeError, corpus, default_model
from normscope.corpus.measure_registry import _measures, corpus_measure_reachable_cells
from normscope.corpus.shard_tables import GroupedSums

TEXTS = ("A short one.", "A second one that is a little longer.", "Three words only")


@pytest.fixture
def own() -> Any:
    """Registered measures, removed after the test."""
    before = dict(_measures)
    yield
    _measures.clear()
    _measures.update(before)


def run(tmp_path: Path, **options: Any) -> corpus.Run:
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(TEXTS))
    corpus.run(data, str(default_model.find()), tmp_path / "out", scopes=["weights"], **options)
    return corpus.open(tmp_path / "out")


def test_a_measure_of_the_whole_sample(own: Any, tmp_path: Path) -> None:
    @normscope.register_measure("ids", whole=True)
    def ids(sample: Any) -> dict[str, Any]:
        assert sample.result is sample.analysis
        assert sample.lens.loaded.base is not None
        return {
            "text": [sample.entry.text],
            "given": [sample.item.tensors["input_ids"].tolist()],
            "before": [sample.original.tensors["input_ids"].tolist()],
        }

    found = run(tmp_path, measures=["ids"], mask_seed=0).scan("ids").collect()
    assert found["text"].to_list() == list(TEXTS)
    for row in found.iter_rows(named=True):
        masked = [n for n, (a, b) in enumerate(zip(row["given"], row["before"], strict=True)) if a != b]
        assert len(masked) >= 1
        assert all(row["given"][n] == 103 for n in masked)


def test_a_measure_that_is_added_up(own: Any, tmp_path: Path) -> None:
    @normscope.register_measure("lengths", summed=["tokens", "weight"])
    def lengths(analysis: Any) -> dict[str, Any]:
        words = [token.startswith("##") for token in analysis.tokens]
        return {"part": words, "tokens": [1] * len(words), "weight": [0.5] * len(words)}

    opened = run(tmp_path, measures=["lengths"], shard_size=2)
    found = opened.scan("lengths").group_by("part").agg(pl.col("tokens", "weight").sum()).collect()
    tokens = [token for row in opened.scan("items").collect()["tokens"].to_list() for token in row]
    assert found["tokens"].sum() == len(tokens)
    assert found["weight"].sum() == len(tokens) / 2
    assert len(opened.scan("lengths").collect()) <= 4  # by shard and not by entry
    assert "id" not in opened.scan("lengths").collect_schema().names()


def test_sums_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupedSums, "AT_ONCE", 50)
    rng = np.random.default_rng(0)
    sums, keys = GroupedSums(["count"]), []
    for _ in range(40):
        some = rng.integers(0, 7, 20)
        keys.append(some)
        sums.add({"key": some, "count": np.ones(20, dtype=np.int64)})
        assert sums.rows <= 50 + 20
    table = sums.table()
    assert table["key"].to_list() == list(range(7))
    assert table["count"].to_list() == np.bincount(np.concatenate(keys)).tolist()


def test_a_measure_that_refuses_an_entry(own: Any, tmp_path: Path) -> None:
    @normscope.register_measure("picky")
    def picky(analysis: Any) -> dict[str, Any]:
        if "only" in analysis.tokens:
            raise NormscopeError("not this one")
        return {"tokens": [len(analysis.tokens)]}

    opened = run(tmp_path, measures=["mixing", "picky"])
    assert opened.scan("errors").collect().select("id", "where", "reason").rows() == [
        ("texts.txt:3", "measure", "not this one")
    ]
    for table in ("items", "mixing", "picky"):
        assert opened.scan(table).collect()["id"].n_unique() == 2


def test_the_first_entries_only(tmp_path: Path) -> None:
    opened = run(tmp_path, limit=2)
    assert opened.scan("items").collect()["id"].to_list() == ["texts.txt:1", "texts.txt:2"]
    assert opened.finished
    with pytest.raises(NormscopeError, match=r"data\.limit: was 2, is 1"):
        run(tmp_path, limit=1)
    assert run(tmp_path, limit=3).scan("items").collect().height == 3
    with pytest.raises(NormscopeError, match="limit must be an integer of at least 1"):
        run(tmp_path, limit=0)


def test_no_mixing_ratio_of_cross_attention_alone(tmp_path: Path) -> None:
    """It reads the encoder's tokens only: its ratio would be 1 everywhere."""
    from tests.helpers.toys import SOURCE, TARGET, translator

    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"source": SOURCE, "target": TARGET}))
    reader = {"text": "source", "target": "target"}
    corpus.run(data, translator(), tmp_path / "out", measures=["mixing", "vector_norms"], reader=reader)
    found = corpus.open(tmp_path / "out").scan("mixing").filter(pl.col("side") == "decoder").collect()
    assert len(set(found["scope"])) == 10
    assert not any(scope.startswith("XATTN") for scope in found["scope"])
    assert float(found["mixing"].max()) <= 1  # type: ignore[arg-type]
    corpus.run(data, translator(), tmp_path / "none", measures=["mixing"], scopes=["XATTN-N"], reader=reader)
    none = corpus.open(tmp_path / "none").scan("mixing").collect()
    assert (none.height, none.columns, none.schema["scope"]) == (0, found.columns, pl.String)


def test_tables_without_rows(tmp_path: Path) -> None:
    """One scope has no other to compare with, and weights are not norms."""
    opened = run(tmp_path, measures=["similarity", "vector_norms"])
    for table in ("similarity", "vector_norms"):
        found = opened.scan(table).collect()
        assert (found.height, found.schema["scope"]) == (0, pl.String)


def test_cells_that_a_causal_model_can_reach() -> None:
    from normscope import Analyzer
    from tests.helpers.tiny import inputs, tiny

    lens = Analyzer(tiny("llama"))
    result = lens.analyze(inputs("llama", lens.model, 5))
    assert torch.equal(corpus_measure_reachable_cells(result), torch.ones(5, 5).tril().bool())
    both = Analyzer(tiny("marian"))
    decoder = both.analyze(inputs("marian", both.model, 5, 3)).decoder
    expected = torch.cat([torch.ones(3, 3).tril().bool(), torch.ones(3, 5).bool()], 1)
    assert torch.equal(corpus_measure_reachable_cells(decoder), expected)
    encoder = both.analyze(inputs("marian", both.model, 5, 3)).encoder
    assert bool(corpus_measure_reachable_cells(encoder).all())
