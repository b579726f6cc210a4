"""The memory budget of a run: fixed and stored; what does not fit is halved, cut into rows, or stops the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from normscope import Analyzer, NormscopeError, corpus
from normscope.corpus import runner, shards
from normscope.engine import request, row_pieces
from normscope.engine.request import Options, control_group_memory, default_budget, is_out_of_memory, requests_for
from normscope.engine.row_pieces import OverBudgetError, run_in_row_pieces
from normscope.engine.run import Workspace, batch_cost, run_batch
from normscope.inputs.encode import encode
from tests.helpers.corpus_runs import table_bytes, toy_corpus, toy_run
from tests.helpers.tiny import inputs, tiny
from tests.helpers.toys import save_model, toy_lens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=24)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return toy_corpus(tmp_path)


def pretend_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    for module in (runner, shards, request):
        monkeypatch.setattr(module, "default_budget", lambda device=None: free, raising=False)
    monkeypatch.setattr("normscope.engine.run.default_budget", lambda device=None: free)


def test_a_moment_of_low_memory_loses_nothing(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    toy_run(data, model, whole)

    def shrink(done: int, total: int) -> None:
        pretend_free(monkeypatch, 1000)

    summary = toy_run(data, model, tmp_path / "run", progress=shrink)
    assert (summary.faults, summary.finished) == (0, True)
    assert table_bytes(tmp_path / "run") == table_bytes(whole)


def test_the_budget_is_stored(data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def budget() -> int:
        return int(json.loads((tmp_path / "run" / "manifest.json").read_bytes())["memory"]["budget"])

    pretend_free(monkeypatch, 10**9)
    toy_run(data, model, tmp_path / "run", limit=4)
    assert budget() == 10**9
    pretend_free(monkeypatch, 1000)
    assert toy_run(data, model, tmp_path / "run", limit=8).faults == 0
    assert budget() == 10**9
    toy_run(data, model, tmp_path / "run", memory_budget=2 * 10**9)
    assert budget() == 2 * 10**9


def test_an_entry_that_does_not_fit_stops_the_run(data: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match=r"too little memory for the entry data\.txt:\d+.*larger memory_budget"):
        toy_run(data, model, tmp_path / "run", memory_budget=1000)
    assert not corpus.open(tmp_path / "run").finished
    done = toy_run(data, model, tmp_path / "run", memory_budget=10**9)
    assert (done.faults, done.finished) == (0, True)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_out_of_memory_halves_the_batch(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    sizes = []

    def limited(loaded: Any, items: Any, *rest: Any) -> Any:
        sizes.append(len(items))
        if len(items) > 1:
            raise error
        return run_batch(loaded, items, *rest)

    monkeypatch.setattr(shards, "run_batch", limited)
    summary = toy_run(data, model, tmp_path / "run", batch_size=4)
    assert (summary.faults, summary.finished) == (0, True)
    assert {1, 2, 4} <= set(sizes)
    monkeypatch.undo()
    toy_run(data, model, tmp_path / "single", batch_size=1)
    assert table_bytes(tmp_path / "run") == table_bytes(tmp_path / "single")


def test_out_of_memory_in_single_rows_stops_the_run(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(*_: Any) -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr(shards, "run_batch", limited)
    monkeypatch.setattr(row_pieces, "run_batch", limited)
    with pytest.raises(NormscopeError, match="too little memory for the entry"):
        toy_run(data, model, tmp_path / "run")
    monkeypatch.undo()
    assert toy_run(data, model, tmp_path / "run").faults == 0


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("heads", [False, True])
def test_pieces_of_rows_are_the_whole(family: str, heads: bool) -> None:
    lens = Analyzer(tiny(family))
    given = inputs(family, lens.model, 13)
    (item,) = encode(lens.loaded, given, False)
    scopes = ["weights", "attention", "attention-block"]
    requests = requests_for(lens.loaded, Options(scopes=scopes, heads=heads))
    whole = lens.analyze(given, scopes=scopes, heads=heads)
    cost = batch_cost(lens.loaded, [item], requests).memory
    passes = 0

    def counted(*given: Any) -> Any:
        nonlocal passes
        passes += 1
        return run_batch(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_pieces, "run_batch", counted)
        joined = run_in_row_pieces(lens.loaded, item, requests, Workspace(10 * cost), 10 * cost)
    assert passes == 2
    assert joined.rows == whole.rows == joined.columns
    assert joined.scopes == whole.scopes
    for scope in whole.scopes:
        torch.testing.assert_close(joined[scope], whole[scope], atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(joined.remainder(scope), whole.remainder(scope), atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(joined.mixing_ratio(scope), whole.mixing_ratio(scope), atol=1e-12, rtol=1e-10)
        assert joined.completeness[scope].shape == whole.completeness[scope].shape
    for scope, maps in whole.heads.items():
        torch.testing.assert_close(joined.heads[scope], maps, atol=1e-12, rtol=1e-10)
    vectors = joined.vectors("attention-block", 1, rows=[0, 6, 12])
    torch.testing.assert_close(vectors, whole.vectors("attention-block", 1, rows=[0, 6, 12]), atol=1e-12, rtol=1e-10)
    with pytest.raises(OverBudgetError, match="even in the smallest pieces"):
        run_in_row_pieces(lens.loaded, item, requests, Workspace(10), 10)


def test_fewer_rows_need_less(model: Path) -> None:
    """A budget between the cost of the whole and that of pieces: the run computes pieces."""
    lens = toy_lens()
    (item,) = encode(lens.loaded, "the cat sat on the mat " * 8, True)
    requests = requests_for(lens.loaded, Options(scopes=["attention"], layers=[0]))
    cost = batch_cost(lens.loaded, [item], requests).memory
    found = run_in_row_pieces(lens.loaded, item, requests, Workspace(cost - 1), cost - 1)
    whole = lens.analyze("the cat sat on the mat " * 8, truncation=True, scopes=["attention"], layers=[0])
    torch.testing.assert_close(found["attention"], whole["attention"], atol=1e-12, rtol=1e-10)


def test_encoder_decoders_have_no_pieces() -> None:
    lens = Analyzer(tiny("marian"))
    (item,) = encode(lens.loaded, inputs("marian", lens.model, 5, 3), False)
    with pytest.raises(OverBudgetError):
        run_in_row_pieces(lens.loaded, item, requests_for(lens.loaded, Options()), Workspace(), 10**12)


def test_control_groups(tmp_path: Path) -> None:
    groups, membership = tmp_path / "groups", tmp_path / "cgroup"
    (groups / "a" / "b").mkdir(parents=True)
    membership.write_text("0::/a/b\n")
    assert control_group_memory(groups, membership) is None

    def limit(folder: Path, most: str, used: int, cached: int = 0) -> None:
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")

    limit(groups / "a" / "b", "max", 100)
    assert control_group_memory(groups, membership) is None
    limit(groups / "a", "1000", 700, 50)
    assert control_group_memory(groups, membership) == 350
    limit(groups, "100", 90)  # the root: all a container sees
    assert control_group_memory(groups, membership) == 10
    assert control_group_memory(groups, tmp_path / "none") is None
    old = tmp_path / "old"
    (old / "memory" / "job").mkdir(parents=True)
    membership.write_text("9:memory:/job\n3:cpu,cpuacct:/\n")
    (old / "memory" / "job" / "memory.limit_in_bytes").write_text("5000\n")
    (old / "memory" / "job" / "memory.usage_in_bytes").write_text("4000\n")
    (old / "memory" / "job" / "memory.stat").write_text("total_inactive_file 300\n")
    assert control_group_memory(old, membership) == 1300
    (old / "memory" / "job" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert control_group_memory(old, membership) is None


def test_the_default_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = default_budget()
    assert alone > 0
    monkeypatch.setattr(request, "control_group_memory", lambda: 1000)
    assert default_budget() == 900
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500, 10**9))
    assert default_budget(torch.device("cuda")) == 450


def test_what_is_out_of_memory() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("out of memory"))
