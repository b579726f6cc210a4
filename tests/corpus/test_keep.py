"""Columns of the data that come along with the tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from normscope import NormscopeError, corpus
from normscope.corpus import read
from tests.helpers.corpus_runs import toy_lines, toy_run
from tests.helpers.files import good, write
from tests.helpers.toys import save_model

ROWS = [{"text": line, "label": n % 2, "topic": None if n < 4 else f"t{n % 3}"} for n, line in enumerate(toy_lines(9))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=24)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path, "\n".join(map(json.dumps, ROWS)), "x.jsonl")


def test_kept_columns_join_every_table(data: Path, model: Path, tmp_path: Path) -> None:
    reader = {"keep": ["label", "topic"]}
    toy_run(data, model, tmp_path / "run", reader=reader, measures=["mixing", "category_sums"])
    run = corpus.open(tmp_path / "run")
    items = run.scan("items").collect()
    assert items["label"].to_list() == [str(row["label"]) for row in ROWS]
    assert items["topic"].to_list() == [row["topic"] for row in ROWS]  # the first shard has none
    assert items.schema["topic"] == pl.String
    for name in ("mixing", "category_sums"):
        plain, joined = run.scan(name).collect(), run.table(name).collect()
        assert joined.drop("label", "topic").equals(plain)
        expected = {f"x.jsonl:{n}": str(row["label"]) for n, row in enumerate(ROWS, 1)}
        assert joined["label"].to_list() == [expected[id] for id in joined["id"]]
    by_class = run.table("mixing").group_by("label").agg(pl.col("mixing").mean()).sort("label").collect()
    values = run.scan("mixing").collect()
    ids = [f"x.jsonl:{n}" for n, row in enumerate(ROWS, 1) if row["label"] == 1]
    mean = values.filter(pl.col("id").is_in(ids))["mixing"].mean()
    assert by_class["mixing"][1] == pytest.approx(mean)
    with pytest.raises(NormscopeError, match=r"data\.fingerprint"):
        toy_run(data, model, tmp_path / "run", measures=["mixing", "category_sums"])


def test_without_kept_columns_a_table_is_as_it_is(data: Path, model: Path, tmp_path: Path) -> None:
    toy_run(data, model, tmp_path / "run")
    run = corpus.open(tmp_path / "run")
    assert run.table("mixing").collect().equals(run.scan("mixing").collect())


def test_values_of_any_type_are_text(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "a", "x": [1, "é"], "y": true, "z": 1.5}', "x.jsonl")
    assert good(next(read(path, keep=["x", "y", "z"]))).kept == (("x", '[1, "é"]'), ("y", "true"), ("z", "1.5"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": ["id"]}, "keep= cannot take 'id'"),
        ({"keep": ["colour"]}, "There is no column 'colour'"),
        ({"keep": "label"}, "takes a list of names"),
        ({"keep": ["label"], "format": "lines"}, "has no option keep"),
    ],
)
def test_columns_that_cannot_be_kept(data: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(NormscopeError, match=said):
        read(data, **options)


def test_keep_on_the_command_line(data: Path, model: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from normscope.cli import app

    arguments = ["corpus", str(data), "-m", str(model), "--keep", "label,topic", "-o", str(tmp_path / "run"), "--csv"]
    result = CliRunner().invoke(app, [*arguments, "--memory", "2GB", "--limit", "3"])
    assert result.exit_code == 0, result.output
    assert "label" in (tmp_path / "run" / "csv" / "items.csv").read_text()
    assert json.loads((tmp_path / "run" / "manifest.json").read_bytes())["memory"]["budget"] == 2 * 10**9
    for wrong in ("much", "0GB", "8 XB"):
        assert "--memory takes a size" in CliRunner().invoke(app, [*arguments, "--memory", wrong]).output
