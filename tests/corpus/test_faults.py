"""Faults with their tracebacks, and how a run ends: signals, a second run on the folder, the summary, CSV files."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import normscope
from normscope import NormscopeError, NormscopeWarning, corpus
from normscope.corpus import folder_lock, measure_registry
from normscope.corpus.folder_lock import lock_folder
from tests.helpers.corpus_runs import table_bytes, toy_corpus, toy_run
from tests.helpers.toys import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=24)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return toy_corpus(tmp_path)


@pytest.fixture
def own_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.measures()
    monkeypatch.setattr(measure_registry, "_measures", dict(measure_registry._measures))


def errors(folder: Path) -> list[dict[str, Any]]:
    return corpus.open(folder).scan("errors").collect().to_dicts()


def test_a_measure_that_raises(own_measures: None, data: Path, model: Path, tmp_path: Path) -> None:
    @normscope.register_measure("careless", whole=True)
    def careless(sample: Any) -> dict[str, Any]:
        if sample.entry.id == "data.txt:3":
            raise KeyError(object())
        if sample.entry.id == "data.txt:5":
            return 7  # type: ignore[return-value]
        return {"value": [1.0]}

    summary = toy_run(data, model, tmp_path / "run", measures=["mixing", "careless"])
    assert (summary.finished, summary.faults) == (True, 2)
    first, second = errors(tmp_path / "run")
    assert (first["id"], first["where"]) == ("data.txt:3", "measure")
    assert first["reason"].startswith("KeyError: <object object at 0x...>")
    assert "Traceback" in first["traceback"]
    assert "raise KeyError(object())" in first["traceback"]
    assert second["id"] == "data.txt:5"
    assert "must return columns by name, not int 7" in second["reason"]
    assert second["traceback"] == ""
    opened = corpus.open(tmp_path / "run")
    for table in ("items", "mixing", "careless"):
        assert opened.scan(table).select(pl.col("id").n_unique()).collect().item() == 8
    toy_run(data, model, tmp_path / "again", measures=["mixing", "careless"])
    assert table_bytes(tmp_path / "again") == table_bytes(tmp_path / "run")  # no address differs


def test_any_exception_of_an_item_is_its_fault(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normscope.corpus import shards

    real_batch, real_encode = shards.run_batch, shards.encode
    long = max(len(line.split()) for line in data.read_text().splitlines())

    def run_batch(loaded: Any, items: Any, *rest: Any) -> Any:
        if any(len(item) == long + 2 for item in items):
            raise ZeroDivisionError("an index of a tensor")
        return real_batch(loaded, items, *rest)

    def encode(loaded: Any, given: Any, truncation: bool) -> Any:
        if given == data.read_text().splitlines()[0]:
            raise TypeError("a tokenizer")
        return real_encode(loaded, given, truncation)

    monkeypatch.setattr(shards, "run_batch", run_batch)
    monkeypatch.setattr(shards, "encode", encode)
    summary = toy_run(data, model, tmp_path / "run")
    found = {row["where"]: row for row in errors(tmp_path / "run")}
    assert summary.finished
    assert found["analysis"]["reason"] == "ZeroDivisionError: an index of a tensor"
    assert found["encoding"]["reason"] == "TypeError: a tokenizer"
    assert all("Traceback" in row["traceback"] for row in found.values())
    monkeypatch.undo()
    assert toy_run(data, model, tmp_path / "run").computed == 0
    again = toy_run(data, model, tmp_path / "run", retry_errors=True)
    assert (again.faults, again.finished) == (0, True)
    assert 0 < again.computed < 10
    toy_run(data, model, tmp_path / "whole")
    assert table_bytes(tmp_path / "run") == table_bytes(tmp_path / "whole")
    assert toy_run(data, model, tmp_path / "run", retry_errors=True).computed == 0


def test_columns_that_cannot_be_joined_stop_the_run(
    own_measures: None, data: Path, model: Path, tmp_path: Path
) -> None:
    @normscope.register_measure("mixed", whole=True)
    def mixed(sample: Any) -> dict[str, Any]:
        return {"value": ["text" if sample.entry.id.endswith(":2") else 1]}

    with pytest.raises(NormscopeError, match="the measure 'mixed' returned for different entries cannot be joined"):
        toy_run(data, model, tmp_path / "run", measures=["mixed"])


def test_folders_of_a_run_are_not_names_of_measures() -> None:
    with pytest.raises(NormscopeError, match="folder of every run"):
        normscope.register_measure("errors")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_finish_the_shard(data: Path, model: Path, tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def send(done: int, total: int) -> None:
        if done == 4:
            os.kill(os.getpid(), number)

    summary = toy_run(data, model, tmp_path / "run", progress=send)
    assert 4 <= summary.done < 10
    assert signal.getsignal(number) == before
    assert toy_run(data, model, tmp_path / "run").finished


def test_a_signal_that_is_ignored_stays_ignored(data: Path, model: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        summary = toy_run(data, model, tmp_path / "run", progress=lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert summary.finished


SECOND = """
import sys
from normscope import NormscopeError, corpus

try:
    corpus.run(*sys.argv[1:4])
except NormscopeError as error:
    print(error)
"""


def test_two_runs_on_one_folder(data: Path, model: Path, tmp_path: Path) -> None:
    said = []

    def run_another(done: int, total: int) -> None:
        if done == 4:
            arguments = [sys.executable, "-c", SECOND, str(data), str(model), str(tmp_path / "run")]
            said.append(subprocess.run(arguments, capture_output=True, text=True).stdout)
            with pytest.raises(NormscopeError, match="Another run"):
                toy_run(data, model, tmp_path / "run")

    assert toy_run(data, model, tmp_path / "run", progress=run_another).finished
    assert "Another run is writing to the folder" in said[0]
    assert toy_run(data, model, tmp_path / "run").computed == 0


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\nfrom normscope.corpus.folder_lock import lock_folder\n"
        "folder = pathlib.Path(sys.argv[1])\nwith lock_folder(folder, folder / 'lock'):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -signal.SIGKILL
    again = lock_folder(tmp_path, tmp_path / "lock")
    with lock_folder(tmp_path, tmp_path / "lock"), pytest.raises(NormscopeError, match="Another run"):
        again.__enter__()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", refuse)
    with pytest.warns(NormscopeWarning, match="No locks available"), lock_folder(tmp_path, tmp_path / "lock"):
        pass
    monkeypatch.setattr(folder_lock, "fcntl", None)
    with pytest.warns(NormscopeWarning, match="no file locks"), lock_folder(tmp_path, tmp_path / "lock"):
        pass


def test_the_summary_says_what_failed(data: Path, model: Path, tmp_path: Path) -> None:
    lines = data.read_text().splitlines()
    for number in (1, 4, 6, 7):
        lines[number] = " ".join(["the"] * 30)
    data.write_text("\n".join(lines) + "\n")
    summary = toy_run(data, model, tmp_path / "run")
    assert summary.faults == 4
    assert [reason.split()[0] for reason in summary.reasons] == ["data.txt:2", "data.txt:5", "data.txt:7"]
    assert summary.errors == tmp_path / "run" / "errors"
    text = str(summary)
    assert "4 could not be analysed:\n  data.txt:2 (encoding): The input has 32 tokens" in text
    assert text.endswith(f"and 1 more\n  all of them: {tmp_path}/run/errors")
    assert "4 could not be analysed" in str(toy_run(data, model, tmp_path / "run"))


def test_csv_files(data: Path, model: Path, tmp_path: Path) -> None:
    toy_run(data, model, tmp_path / "run")
    assert not (tmp_path / "run" / "csv").exists()
    toy_run(data, model, tmp_path / "run", csv=True)
    opened = corpus.open(tmp_path / "run")
    with (tmp_path / "run" / "csv" / "items.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    items = opened.scan("items").collect()
    assert [json.loads(row["tokens"]) for row in rows] == items["tokens"].to_list()
    mixing = pl.read_csv(tmp_path / "run" / "csv" / "mixing.csv")
    assert mixing["mixing"].cast(pl.Float32).to_list() == opened.scan("mixing").collect()["mixing"].to_list()
    assert opened.verify() == []
    (tmp_path / "run" / "csv" / "mixing.csv").write_text("id\n")
    assert opened.verify() == ["csv/mixing.csv"]
    toy_run(data, model, tmp_path / "run", csv=True)
    assert corpus.open(tmp_path / "run").verify() == []


def test_csv_files_of_an_earlier_state_are_removed(data: Path, model: Path, tmp_path: Path) -> None:
    toy_run(data, model, tmp_path / "run", limit=4, csv=True)
    toy_run(data, model, tmp_path / "run", limit=8)
    assert not (tmp_path / "run" / "csv").exists()
