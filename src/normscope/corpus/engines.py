"""Engines: compute shards in this process or in Ray workers. Both yield finished shards, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from normscope.corpus.entries import Entry, Fault
from normscope.corpus.plan import Plan
from normscope.corpus.shards import EncodedShard, compute_shard, encode_shard
from normscope.corpus.store import ShardFiles
from normscope.errors import NormscopeError

Shard = tuple[int, tuple[Entry | Fault, ...]]
LoadAnalyzer = Callable[..., Any]  # loads the Analyzer on a `device`; pickled for the workers
AHEAD = 2  # shards tokenised in advance, and shards queued for each worker


def compute_locally(lens: Any, plan: Plan, shards: Iterable[Shard]) -> Iterator[ShardFiles]:
    """Compute one shard after the other, while a second thread tokenises the next."""
    with ThreadPoolExecutor(1) as pool:
        waiting: list[Any] = []
        given = iter(shards)

        def fill() -> None:
            while len(waiting) < AHEAD and (shard := next(given, None)) is not None:
                waiting.append(pool.submit(encode_shard, lens, plan, *shard))

        fill()
        while waiting:
            encoded: EncodedShard = waiting.pop(0).result()
            fill()
            yield compute_shard(lens, plan, encoded)


def compute_with_ray(
    load: LoadAnalyzer, plan: Plan, shards: Iterable[Shard], workers: int, threads: int, address: str | None
) -> Iterator[ShardFiles]:
    """Compute shards with one model per worker. A worker that dies is restarted and its shards are retried."""
    try:
        import ray
    except ImportError as error:
        raise NormscopeError("The engine 'ray' needs Ray: pip install 'normscope[ray]'.") from error
    started = not ray.is_initialized()
    if started:
        try:
            here: dict[str, Any] = {} if address else {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
            ray.init(address=address, log_to_driver=False, configure_logging=False, **here)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise NormscopeError(f"Cannot connect to Ray or start it: {error}") from error
    try:
        gpus = min(1.0, ray.cluster_resources().get("GPU", 0) / workers)
        actor = ray.remote(num_cpus=threads, num_gpus=gpus, max_restarts=-1, max_task_retries=-1)(_RayWorker)
        actors = [actor.remote(load, plan, threads) for _ in range(workers)]
        running: dict[Any, Any] = {}
        given = iter(shards)

        def fill(worker: Any) -> None:
            shard = next(given, None)
            if shard is not None:
                running[worker.shard.remote(*shard)] = worker

        for _ in range(AHEAD):
            for worker in actors:
                fill(worker)
        while running:
            (ready,), _ = ray.wait(list(running), num_returns=1)
            worker = running.pop(ready)
            try:
                finished: ShardFiles = ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, NormscopeError):
                    raise error.cause from error
                raise
            fill(worker)
            yield finished
    finally:
        if started:
            ray.shutdown()


class _RayWorker:
    """A Ray actor: one model, one shard at a time."""

    def __init__(self, load: LoadAnalyzer, plan: Plan, threads: int) -> None:
        import ray

        torch.set_num_threads(threads)
        self.lens, self.plan = load(device="cuda" if ray.get_gpu_ids() else None), plan

    def shard(self, number: int, entries: tuple[Entry | Fault, ...]) -> ShardFiles:
        return compute_shard(self.lens, self.plan, encode_shard(self.lens, self.plan, number, entries))
