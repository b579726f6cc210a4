"""Ray workers: placement, deaths, quarantine, a head that is gone. The scheduler runs on a made-up Ray, whose workers
die where a test says so; slow tests use a real cluster on this machine."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from normscope import NormscopeError, NormscopeWarning, corpus
from normscope.corpus import engines, measure_registry
from normscope.corpus.committed import ShardTarget
from normscope.corpus.engines import DEATHS, _RayPool, _RayWorker
from normscope.corpus.entries import Entry
from normscope.corpus.line_ranges import EntryRange, plan_lines, read_shard_entries
from normscope.corpus.plan import Plan
from normscope.corpus.ray_cluster import Cluster, Placement, connected_cluster, place_workers
from normscope.corpus.shard_tables import ShardFiles
from tests.helpers.corpus_runs import toy_corpus, toy_run
from tests.helpers.toys import save_model


class RayActorError(Exception):
    """As Ray's."""


class RayTaskError(Exception):
    """As Ray's."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """Ray without processes: a task runs when it is waited for; `fate` raises what happens to a worker at a shard."""

    def __init__(self, fate: Callable[[int, int], None], start: Callable[[int], None] = lambda worker: None) -> None:
        names = ("RayActorError", "WorkerCrashedError", "OutOfMemoryError", "NodeDiedError", "ObjectLostError")
        kinds: dict[str, Any] = dict.fromkeys(names, RayActorError)
        self.exceptions = SimpleNamespace(**kinds, RayTaskError=RayTaskError)
        self.fate, self.start, self.workers = fate, start, 0
        self.dead: set[int] = set()
        self.computed: list[tuple[int, int]] = []  # (worker, shard)
        self.silent = False

    def make(self) -> Any:
        number = self.workers
        self.workers += 1

        def remote(work: Callable[..., Any]) -> Any:
            return SimpleNamespace(remote=lambda *given: SimpleNamespace(worker=number, run=lambda: work(*given)))

        def shard(given: int, entries: tuple[Any, ...]) -> ShardFiles:
            self.computed.append((number, given))
            self.fate(number, given)
            return ShardFiles(given, len(entries), 0, {})

        return SimpleNamespace(number=number, ready=remote(lambda: self.start(number)), shard=remote(shard))

    def wait(self, tasks: list[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        return ([], tasks) if self.silent else (tasks[:1], tasks[1:])

    def get(self, task: Any) -> Any:
        if task.worker in self.dead:
            raise RayActorError("the worker is dead")
        try:
            return task.run()
        except RayActorError:
            self.dead.add(task.worker)
            raise

    def kill(self, actor: Any) -> None:
        self.dead.add(actor.number)


def pooled(ray: FakeRay, shards: int = 7, workers: int = 2, **options: Any) -> list[ShardFiles]:
    given = ((n, (Entry(id=f"{n}a", text="x"), Entry(id=f"{n}b", text="x"))) for n in range(shards))
    pool = _RayPool(Cluster(ray, options.pop("head", None)), ray.make, Plan(), given, options.pop("seconds", 60.0))
    pool.start(workers)
    return list(pool.results())


def test_every_shard_is_computed_once_without_deaths() -> None:
    ray = FakeRay(lambda worker, shard: None)
    assert sorted(one.number for one in pooled(ray)) == list(range(7))
    assert Counter(shard for _, shard in ray.computed) == Counter(range(7))
    assert ray.workers == 2


def test_a_worker_that_dies_is_replaced_and_loses_nothing() -> None:
    def die_once(worker: int, shard: int) -> None:
        if worker < 2 and shard in (2, 3):
            raise RayActorError("killed")

    ray = FakeRay(die_once)
    found = pooled(ray)
    assert sorted(one.number for one in found) == list(range(7))
    assert sum(one.faults for one in found) == 0


def test_a_shard_that_kills_its_workers_is_quarantined() -> None:
    def die(worker: int, shard: int) -> None:
        if shard == 3:
            raise RayActorError("SIGSEGV")

    ray = FakeRay(die)
    found = {one.number: one for one in pooled(ray)}
    assert sorted(found) == list(range(7))
    assert {number for number, one in found.items() if one.faults} == {3}
    assert Counter(shard for _, shard in ray.computed)[3] == DEATHS
    assert (found[3].entries, found[3].faults) == (2, 2)
    rows = pl.read_parquet(found[3].files["errors/000003.parquet"]).rows(named=True)
    assert [row["id"] for row in rows] == ["3a", "3b"]
    assert rows[0]["where"] == "worker"
    assert rows[0]["reason"].startswith("3 Ray workers died while they computed this shard")
    assert "SIGSEGV" in rows[0]["reason"]


def test_a_run_of_nothing_but_deaths_ends() -> None:
    def die(worker: int, shard: int) -> None:
        raise RayActorError("killed")

    found = pooled(FakeRay(die), shards=4)
    assert sorted((one.number, one.faults) for one in found) == [(n, 2) for n in range(4)]


def test_workers_that_die_at_the_start() -> None:
    def die(worker: int) -> None:
        raise RayActorError("out of memory")

    ray = FakeRay(lambda worker, shard: None, die)
    with pytest.raises(NormscopeError, match="3 Ray workers in a row died while they loaded the model: out of memory"):
        pooled(ray)


class SeeingRay(FakeRay):
    """Ray whose workers see the files of the data, the folder of the run, both or neither; it keeps what they get."""

    def __init__(self, answer: tuple[bool, bool] | None) -> None:
        super().__init__(lambda worker, shard: None)
        self.answer = answer  # None: the worker does not answer
        self.given: list[tuple[Any, ...]] = []

    def make(self) -> Any:
        actor = super().make()

        def remote(work: Callable[..., Any]) -> Any:
            return SimpleNamespace(remote=lambda *given: SimpleNamespace(worker=actor.number, run=lambda: work(*given)))

        def sees(given: Any, target: Any) -> tuple[bool, bool]:
            if self.answer is None:
                raise TimeoutError
            return self.answer

        def shard(number: int, *given: Any) -> ShardFiles:
            self.given.append(given)
            return ShardFiles(number, len(read_shard_entries(given[0])), 0, {})

        actor.sees, actor.shard = remote(sees), remote(shard)
        return actor

    def get(self, task: Any, timeout: float | None = None) -> Any:
        return super().get(task)


@pytest.mark.parametrize("answer", [(True, True), (True, False), (False, True), (False, False), None])
def test_workers_get_what_they_do_not_see(tmp_path: Path, answer: tuple[bool, bool] | None) -> None:
    ray, target = SeeingRay(answer), ShardTarget(str(tmp_path), "run")
    plan, _, _ = plan_lines([toy_corpus(tmp_path)], 4, None, 0)
    shards = iter([(n, plan.shard(n)) for n in range(3)])
    pool = _RayPool(Cluster(ray, None), ray.make, Plan(), shards, 60.0, target)
    pool.start(2)
    assert [shard.entries for shard in pool.results()] == [4, 4, 2]
    data, folder = answer or (False, False)
    assert [isinstance(given[0], EntryRange) for given in ray.given] == [data] * 3
    assert [given[1:] for given in ray.given] == [(target,) if folder else ()] * 3


def test_a_worker_knows_what_it_sees(tmp_path: Path) -> None:
    data, out = toy_corpus(tmp_path), tmp_path / "run"
    toy_run(data, save_model(tmp_path / "model", max_position_embeddings=24), out)
    plan, _, _ = plan_lines([data], 4, None, 0)
    worker = object.__new__(_RayWorker)
    target = ShardTarget(str(out), corpus.open(out).manifest["run"])
    assert worker.sees(plan.shard(0), target) == (True, True)
    assert worker.sees(None, None) == (False, False)
    data.unlink()
    assert worker.sees(plan.shard(0), ShardTarget(str(tmp_path), target.run)) == (False, False)


def test_a_worker_that_is_late_is_waited_for() -> None:
    def die(worker: int) -> None:
        if worker == 0:
            raise RayActorError("preempted")

    ray = FakeRay(lambda worker, shard: None, die)
    assert len(pooled(ray, workers=1)) == 7


def test_errors_of_a_worker() -> None:
    def refuse(worker: int, shard: int) -> None:
        raise RayTaskError(NormscopeError("too little memory"))

    with pytest.raises(NormscopeError, match=r"^too little memory$"):
        pooled(FakeRay(refuse))

    def break_down(worker: int, shard: int) -> None:
        raise RayTaskError(KeyError("x"))

    with pytest.raises(NormscopeError, match="A Ray worker failed: 'x' Finished shards are kept"):
        pooled(FakeRay(break_down))


def test_a_start_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PATIENCE", 0.0)
    ray = FakeRay(lambda worker, shard: None)
    ray.silent = True
    with pytest.raises(NormscopeError, match="No Ray worker has loaded the model within 0 s"):
        pooled(ray, seconds=0.0)


def test_a_head_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PATIENCE", 0.0)
    ray = FakeRay(lambda worker, shard: None)
    ray.silent = True
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        cluster = Cluster(ray, address)
        for _ in range(5):
            cluster.check_head()
    with pytest.raises(NormscopeError, match=rf"The head of the Ray cluster at {address} does not answer any more"):
        pooled(ray, head=address)


def node(cpus: float, gpus: int = 0, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"CPU": cpus} | ({"GPU": gpus} if gpus else {})}


@pytest.mark.parametrize(
    ("nodes", "workers", "threads", "expected"),
    [
        ([node(4)], 2, 1, Placement(2, 0.0)),
        ([node(2), node(2)], 2, 2, Placement(2, 0.0)),
        ([node(8, 2)], 2, 1, Placement(2, 1.0)),
        ([node(8, 2)], 4, 1, Placement(4, 0.5)),
        ([node(8, 3)], 4, 1, Placement(4, 0.5)),  # not 3/4 each: only three would find a place
    ],
)
def test_what_fits_is_placed(nodes: list[Any], workers: int, threads: int, expected: Placement) -> None:
    assert place_workers(nodes, workers, threads) == expected


def test_more_workers_than_fit() -> None:
    with pytest.warns(NormscopeWarning, match="room for 3 of 8 workers with threads=2; 3 are started"):
        assert place_workers([node(5), node(3), node(9, alive=False)], 8, 2).workers == 3
    with pytest.raises(NormscopeError, match="no room for a worker with threads=4: its largest machine has 3"):
        place_workers([node(3), node(2)], 1, 4)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "No Ray cluster answers at 127.0.0.1:1"),
        ("ray://127.0.0.1:1", "No Ray cluster answers at ray://127.0.0.1:1"),
        ("nonsense", "is not an address such as"),
        ("host:port", "is not an address such as"),
    ],
)
def test_addresses_without_a_cluster(address: str, said: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(NormscopeError, match=re.escape(said)), connected_cluster(address):
        pass


def test_a_worker_with_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from normscope import Analyzer
    from normscope.corpus.run_manifest import describe_run_model, package_versions

    monkeypatch.setattr(ray, "get_gpu_ids", list)
    lens = Analyzer.from_pretrained(save_model(tmp_path / "model"))
    expected = {"model": describe_run_model(lens, Plan()), "versions": package_versions()}
    _RayWorker(lambda **_: lens, Plan(), 1, expected).ready()
    for part, key, value in (("model", "fingerprint", "x"), ("versions", "torch", "1.0")):
        other = {**expected, part: {**expected[part], key: value}}
        with pytest.raises(NormscopeError, match=f"another model or other versions than this process .*{key}"):
            _RayWorker(lambda **_: lens, Plan(), 1, other).ready()

    def fail(**_: Any) -> Any:
        raise NormscopeError("no such folder")

    with pytest.raises(NormscopeError, match="no such folder"):
        _RayWorker(fail, Plan(), 1, expected).ready()


# --- A real cluster ---------------------------------------------------------------------------------------------------

RAY_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
DEADLY = """
import os, signal
import normscope


@normscope.register_measure("deadly", whole=True)
def deadly(sample):
    if sample.entry.id == "data.txt:6":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"value": [1.0]}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), max_position_embeddings=24)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with the measure "deadly", which Ray's workers find through its entry point."""
    folder = tmp_path / "site"
    (folder / "deadly-1.0.dist-info").mkdir(parents=True)
    (folder / "deadly.py").write_text(DEADLY)
    (folder / "deadly-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: deadly\nVersion: 1.0\n")
    (folder / "deadly-1.0.dist-info" / "entry_points.txt").write_text("[normscope.measures]\ndeadly = deadly:deadly\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def head(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A cluster of one machine on a loopback port: its address, and the process whose group it is."""
    pytest.importorskip("ray")
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    address = f"127.0.0.1:{free_port()}"
    arguments = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={address.partition(':')[2]}"]
    command = [str(Path(sys.executable).with_name("ray")), *arguments, "--num-cpus=2", "--include-dashboard=false"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    for line in process.stdout:
        if b"Ray runtime started" in line:
            break
    else:
        pytest.fail("Ray did not start")
    try:
        yield address, process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_a_cluster_on_a_loopback_port(head: Any, model: Path, tmp_path: Path) -> None:
    address, _ = head
    data = toy_corpus(tmp_path)
    toy_run(data, model, tmp_path / "local")
    with pytest.warns(NormscopeWarning, match="room for 2 of 5 workers"):
        summary = toy_run(data, model, tmp_path / "ray", engine="ray", workers=5, address=address)
    assert (summary.finished, summary.faults) == (True, 0)
    rows = [
        corpus.open(tmp_path / name).scan("items").select("id", "tokens").sort("id").collect()
        for name in ("local", "ray")
    ]
    assert rows[0].equals(rows[1])


COMMAND = """
import sys
from pathlib import Path
from normscope import NormscopeError, corpus

options = {"shard_size": 2, "measures": ["mixing"], "scopes": ["layer"]}
try:
    print(corpus.run(*sys.argv[1:4], engine="ray", workers=1, address=sys.argv[4], progress=lambda done, total:
        (Path(sys.argv[5]).touch() if done else None), **options))
except NormscopeError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_a_head_that_dies_during_a_run(head: Any, model: Path, tmp_path: Path) -> None:
    address, process = head
    data = toy_corpus(tmp_path, 4000)
    mark = tmp_path / "begun"
    arguments = [sys.executable, "-c", COMMAND, *map(str, (data, model, tmp_path / "run", address, mark))]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as run:
        while not mark.exists() and run.poll() is None:
            time.sleep(0.2)
        assert run.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        text = run.communicate(timeout=300)[0]
    assert "refused: The head of the Ray cluster" in text
    assert "Traceback" not in text
    assert corpus.open(tmp_path / "run").verify() == []


@pytest.mark.slow
def test_a_measure_that_kills_its_worker(
    head: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = head
    corpus.measures()
    monkeypatch.setattr(measure_registry, "_measures", dict(measure_registry._measures))
    importlib.import_module("deadly")
    options: dict[str, Any] = {"engine": "ray", "workers": 2, "address": address, "shard_size": 2}
    summary = toy_run(toy_corpus(tmp_path), model, tmp_path / "run", measures=["deadly"], **options)
    assert (summary.finished, summary.faults) == (True, 2)
    rows = corpus.open(tmp_path / "run").scan("errors").collect().rows(named=True)
    assert [row["id"] for row in rows] == ["data.txt:5", "data.txt:6"]
    assert rows[0]["reason"].startswith("3 Ray workers died while they computed this shard")
    assert corpus.open(tmp_path / "run").scan("deadly").collect().height == 8
