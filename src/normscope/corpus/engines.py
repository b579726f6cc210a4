"""Engines: compute shards in this process or in Ray workers. Both yield finished shards, in any order."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from normscope.corpus.committed import ShardTarget, WrittenShard
from normscope.corpus.line_ranges import EntryRange, ShardEntries, read_shard_entries
from normscope.corpus.plan import Plan
from normscope.corpus.ray_cluster import Cluster, connected_cluster, place_workers
from normscope.corpus.run_manifest import describe_run_model, package_versions
from normscope.corpus.same_run import public_version
from normscope.corpus.shard_tables import ShardFiles
from normscope.corpus.shards import EncodedShard, compute_shard, encode_shard, shard_of_faults
from normscope.corpus.writing import write_pending_files
from normscope.errors import NormscopeError

Shard = tuple[int, ShardEntries]
LoadAnalyzer = Callable[..., Any]  # loads the Analyzer on a `device`; pickled for the workers
AHEAD = 2  # shards tokenised in advance, and shards queued for each worker
DEATHS = 3  # of workers, until their shard is given up, or until none is started any more
PATIENCE = 5.0  # seconds of waiting between two looks at the cluster
START_SECONDS = 900.0  # for the first worker, which loads the model


def compute_locally(lens: Any, plan: Plan, shards: Iterable[Shard]) -> Iterator[ShardFiles]:
    """Compute one shard after the other, while a second thread tokenises the next."""
    with ThreadPoolExecutor(1) as pool:
        waiting: list[Any] = []
        given = iter(shards)

        def fill() -> None:
            while len(waiting) < AHEAD and (shard := next(given, None)) is not None:
                waiting.append(pool.submit(_encode_given_shard, lens, plan, *shard))

        fill()
        while waiting:
            encoded: EncodedShard = waiting.pop(0).result()
            fill()
            yield compute_shard(lens, plan, encoded)


def _encode_given_shard(lens: Any, plan: Plan, number: int, given: ShardEntries) -> EncodedShard:
    return encode_shard(lens, plan, number, read_shard_entries(given))


def compute_with_ray(
    load: LoadAnalyzer,
    plan: Plan,
    shards: Iterable[Shard],
    workers: int,
    threads: int,
    address: str | None,
    expected: Mapping[str, Any] | None = None,
    target: ShardTarget | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[ShardFiles | WrittenShard]:
    """Compute shards with one model per worker.

    Workers that see the files of the data read their entries there, and those that see the folder of the run write
    their files there; entries and files of the others are sent.

    A worker that dies is replaced and its shards are computed again. A shard at which three workers died is given up:
    its entries become faults.

    Args:
        load: Loads the Analyzer in a worker.
        plan: What to compute.
        shards: The shards to compute.
        workers: The number of workers; fewer are started, with a warning, if the cluster cannot place as many.
        threads: Threads of each worker.
        address: The address of the cluster; None starts one on this machine.
        expected: The manifest of the run, whose model and versions every worker must have.
        target: Where workers write their files; None: they return them.
        start_seconds: How long to wait while no worker has loaded the model.
    """
    with connected_cluster(address) as cluster:
        placement = place_workers(cluster.ray.nodes(), workers, threads)
        actor = cluster.ray.remote(num_cpus=threads, num_gpus=placement.gpus, max_restarts=0)(_RayWorker)
        pool = _RayPool(
            cluster, lambda: actor.remote(load, plan, threads, expected), plan, iter(shards), start_seconds, target
        )
        pool.start(placement.workers)
        yield from pool.results()


@dataclass
class _Worker:
    """A Ray actor, and its tasks in the order in which it computes them."""

    actor: Any
    ready: Any  # the task that ends when the model is loaded; None afterwards
    tasks: deque[tuple[Any, Shard]] = field(default_factory=deque)
    sees: tuple[bool, bool] | None = None  # the files of the data, and the folder of the run; None: not asked yet


@dataclass
class _RayPool:
    """Workers and the shards that they compute."""

    cluster: Cluster
    make: Callable[[], Any]  # starts an actor
    plan: Plan
    given: Iterator[Shard]
    start_seconds: float
    target: ShardTarget | None = None
    workers: list[_Worker] = field(default_factory=list)
    again: deque[Shard] = field(default_factory=deque)  # of dead workers; each is computed alone
    deaths: Counter[int] = field(default_factory=Counter)  # by shard
    failed_starts: int = 0
    idle_since: float = field(default_factory=time.monotonic)  # when no worker was ready
    looked: float = field(default_factory=time.monotonic)  # at the head, for the last time

    def start(self, count: int) -> None:
        """Start workers, until there are `count`."""
        while len(self.workers) < count:
            actor = self.make()
            self.workers.append(_Worker(actor, actor.ready.remote()))

    def results(self) -> Iterator[ShardFiles | WrittenShard]:
        """The finished shards."""
        ray = self.cluster.ray
        while self._fill():
            waiting = [worker.ready for worker in self.workers if worker.ready is not None]
            waiting += [task for worker in self.workers for task, _ in worker.tasks]
            done, _ = ray.wait(waiting, num_returns=1, timeout=PATIENCE)
            if time.monotonic() - self.looked > PATIENCE:
                self.looked = time.monotonic()
                self.cluster.check_head()
                self._check_start()
            if not done:
                continue
            worker = next(one for one in self.workers if done[0] is one.ready or done[0] in [t for t, _ in one.tasks])
            if worker.ready is not None:
                self._finish_start(worker)
            else:
                yield from self._finish_tasks(worker)

    def _fill(self) -> bool:
        """Give shards to the workers that are ready. Returns whether anything is left to do."""
        for worker in [one for one in self.workers if one.ready is None]:
            while len(worker.tasks) < AHEAD and not any(self.deaths[shard[0]] for _, shard in worker.tasks):
                if self.again and worker.tasks:  # what was with a dead worker is computed alone
                    break
                shard = self.again.popleft() if self.again else next(self.given, None)
                if shard is None:
                    break
                worker.tasks.append((self._submit(worker, shard), shard))
        if any(worker.tasks for worker in self.workers) or self.again:
            return True
        if any(worker.ready is None for worker in self.workers):
            return False  # ready and without work: none is left
        return bool(self.workers)

    def _submit(self, worker: _Worker, shard: Shard) -> Any:
        """Give a shard to a worker: where its entries are, unless the worker does not see the files, and where its
        results go, unless it does not see that folder."""
        number, given = shard
        where = given if isinstance(given, EntryRange) else None
        if worker.sees is None and (where is not None or self.target is not None):
            try:
                worker.sees = self.cluster.ray.get(worker.actor.sees.remote(where, self.target), timeout=PATIENCE)
            except Exception:  # a dead or slow worker is found out when its tasks are
                worker.sees = False, False
        data, folder = worker.sees or (False, False)
        sent = given if where is None or data else where.read()
        return worker.actor.shard.remote(number, sent, *([self.target] if folder else []))

    def _finish_start(self, worker: _Worker) -> None:
        try:
            self.cluster.ray.get(worker.ready)
        except Exception as error:
            if not self._is_death(error):
                raise _explain_task_error(error) from error
            self.failed_starts += 1
            if self.failed_starts >= DEATHS:
                raise NormscopeError(
                    f"{DEATHS} Ray workers in a row died while they loaded the model: {_shortened(error)} Finished "
                    "shards are kept. Is there enough memory for the model? Use fewer workers."
                ) from error
            self._replace(worker)
        else:
            worker.ready, self.failed_starts = None, 0

    def _finish_tasks(self, worker: _Worker) -> Iterator[ShardFiles | WrittenShard]:
        """Take the results of a worker, up to the first task that is not done; replace the worker if it has died."""
        ray = self.cluster.ray
        while worker.tasks and ray.wait([worker.tasks[0][0]], timeout=0)[0]:
            task, shard = worker.tasks.popleft()
            try:
                finished: ShardFiles | WrittenShard = ray.get(task)
            except Exception as error:
                if not self._is_death(error):
                    raise _explain_task_error(error) from error
                yield from self._mourn(worker, shard, error)
                return
            yield finished

    def _mourn(self, worker: _Worker, shard: Shard, error: Exception) -> Iterator[ShardFiles]:
        """After a death: the shard that was computed is tried again or given up, those behind it are computed again."""
        number, given = shard
        self.deaths[number] += 1
        self.again.extend(behind for _, behind in worker.tasks)
        self._replace(worker)
        if self.deaths[number] < DEATHS:
            self.again.append(shard)
        else:
            reason = f"{DEATHS} Ray workers died while they computed this shard. The last: {_shortened(error)}"
            yield shard_of_faults(self.plan, number, read_shard_entries(given), "worker", reason)

    def _replace(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        self.cluster.ray.kill(worker.actor)  # in case it was only out of reach
        if not any(one.ready is None for one in self.workers):
            self.idle_since = time.monotonic()
        self.start(len(self.workers) + 1)

    def _check_start(self) -> None:
        if any(worker.ready is None for worker in self.workers):
            return
        if time.monotonic() - self.idle_since > self.start_seconds:
            raise NormscopeError(
                f"No Ray worker has loaded the model within {self.start_seconds:.0f} s. The cluster may be busy with "
                "other work, or the model's download slow. See `ray status`, and run the same command again."
            )

    def _is_death(self, error: Exception) -> bool:
        """Whether an error of a task means that its worker or machine has died."""
        errors = self.cluster.ray.exceptions
        kinds = (errors.RayActorError, errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError)
        return isinstance(error, (*kinds, errors.ObjectLostError)) and not isinstance(error, errors.RayTaskError)


def _explain_task_error(error: Exception) -> NormscopeError:
    """The error of a worker as one of ours."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, NormscopeError):
        return cause
    return NormscopeError(f"A Ray worker failed: {_shortened(error)} Finished shards are kept.")


def _shortened(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class _RayWorker:
    """A Ray actor: one model, one shard at a time."""

    def __init__(self, load: LoadAnalyzer, plan: Plan, threads: int, expected: Mapping[str, Any] | None = None) -> None:
        import ray

        torch.set_num_threads(threads)
        self.plan, self.expected = plan, expected
        self.problem: str | None = None
        try:
            self.lens = load(device="cuda" if ray.get_gpu_ids() else None)
        except NormscopeError as error:
            self.problem = str(error)

    def ready(self) -> None:
        """Raise if the model could not be loaded, or is not that of the run."""
        if self.problem is not None:
            raise NormscopeError(self.problem)
        if self.expected is None:
            return
        model = {**describe_run_model(self.lens, self.plan), "name": self.expected["model"]["name"]}
        wrong = sorted(
            key for key in {*model, *self.expected["model"]} if model.get(key) != self.expected["model"].get(key)
        )
        versions = package_versions()
        pairs = ((name, versions[name], self.expected["versions"][name]) for name in versions)
        wrong += [f"{name} {here}" for name, here, there in pairs if public_version(here) != public_version(there)]
        if wrong:
            raise NormscopeError(
                f"A Ray worker has another model or other versions than this process ({', '.join(wrong)}). Install the "
                "same packages and copy the same model to every machine of the cluster."
            )

    def sees(self, given: EntryRange | None, target: ShardTarget | None) -> tuple[bool, bool]:
        """Whether the files of these entries, and the folder of the run, are where the driver sees them."""
        return given is not None and given.is_readable(), target is not None and target.is_reachable()

    def shard(self, number: int, given: ShardEntries, target: ShardTarget | None = None) -> ShardFiles | WrittenShard:
        """Compute a shard and write its files; without a target, return them."""
        found = compute_shard(self.lens, self.plan, _encode_given_shard(self.lens, self.plan, number, given))
        return found if target is None else write_pending_files(Path(target.folder), found)
