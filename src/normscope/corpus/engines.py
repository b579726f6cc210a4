"""Where shards are computed: in this process, or by Ray workers. Both yield finished shards, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from normscope.corpus.items import Entry, Fault
from normscope.corpus.shards import Encoded, Plan, compute, encode_shard
from normscope.corpus.store import ShardFiles
from normscope.errors import NormscopeError

Shard = tuple[int, tuple[Entry | Fault, ...]]
Load = Callable[..., Any]  # makes the Analyzer, on a `device`; must be something that a worker can be sent
AHEAD = 2  # shards that are tokenised before the model is ready for them, and that each worker has waiting


def local(lens: Any, plan: Plan, shards: Iterable[Shard]) -> Iterator[ShardFiles]:
    """One after the other; a second thread tokenises ahead of the model."""
    with ThreadPoolExecutor(1) as pool:
        waiting: list[Any] = []
        given = iter(shards)

        def fill() -> None:
            while len(waiting) < AHEAD and (shard := next(given, None)) is not None:
                waiting.append(pool.submit(encode_shard, lens, plan, *shard))

        fill()
        while waiting:
            encoded: Encoded = waiting.pop(0).result()
            fill()
            yield compute(lens, plan, encoded)


def on_ray(
    load: Load, plan: Plan, shards: Iterable[Shard], workers: int, threads: int, address: str | None
) -> Iterator[ShardFiles]:
    """One model per worker. A worker that dies is started again, and its shards are done again by it or another."""
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
            raise NormscopeError(f"Cannot reach or start Ray: {error}") from error
    try:
        gpus = min(1.0, ray.cluster_resources().get("GPU", 0) / workers)
        actor = ray.remote(num_cpus=threads, num_gpus=gpus, max_restarts=-1, max_task_retries=-1)(_Worker)
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


class _Worker:
    """A Ray actor: one model, one shard at a time."""

    def __init__(self, load: Load, plan: Plan, threads: int) -> None:
        import ray
        import torch

        torch.set_num_threads(threads)
        self.lens, self.plan = load(device="cuda" if ray.get_gpu_ids() else None), plan

    def shard(self, number: int, entries: tuple[Entry | Fault, ...]) -> ShardFiles:
        return compute(self.lens, self.plan, encode_shard(self.lens, self.plan, number, entries))
