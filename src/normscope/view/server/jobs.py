"""Background analyses of the server: a queue, progress, cancellation, and a cache of results.

Everything runs on the event loop except the analyses, which run in threads and report back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from normscope.errors import NormscopeError
from normscope.view.server.schemas import State

AT_ONCE = 2
WAITING = 16
CACHE = 512 * 2**20  # bytes of cached results
RECORDS = 1000  # analyses that are remembered, in any state

log = logging.getLogger("normscope.serve")


class BusyError(Exception):
    """Too many analyses are waiting."""


class CancelledError(Exception):
    """Raised inside an analysis to stop it."""


T = TypeVar("T")


@dataclass(eq=False)
class Job(Generic[T]):
    """One analysis. `result` is set once the state is "done"."""

    id: str
    state: State = "running"
    progress: float = 0.0
    error: str | None = None
    first: T | None = None  # the part of the result that is done, until the rest is computed
    result: T | None = None
    size: int = 0
    wanted: int = 1  # number of requests that were not cancelled
    stop: threading.Event = field(default_factory=threading.Event)
    future: Future[None] | None = None
    change: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.state != "running"

    def note(self, state: State | None = None, progress: float | None = None, error: str | None = None) -> None:
        """Update state, progress and error, and wake waiting requests."""
        self.state = self.state if state is None else state
        self.progress = self.progress if progress is None else progress
        self.error = error
        self.change.set()
        self.change = asyncio.Event()


class ProgressReport(Generic[T]):
    """Reports progress from the thread of an analysis, and stops the analysis if it was cancelled."""

    def __init__(self, job: Job[T], loop: asyncio.AbstractEventLoop) -> None:
        self.job, self.loop = job, loop

    def __call__(self, done: int, total: int) -> None:
        if self.job.stop.is_set():
            raise CancelledError
        _call_on_loop(self.loop, self._progress, min(done / max(total, 1), 1.0))

    def first(self, part: T) -> None:
        """Publish the part of the result that is done; a later part replaces it."""
        _call_on_loop(self.loop, self._first, part)

    def _progress(self, progress: float) -> None:
        if not self.job.ended:
            self.job.note(progress=progress)

    def _first(self, part: T) -> None:
        if not self.job.ended:
            self.job.first = part
            self.job.note()


class Jobs(Generic[T]):
    """Runs analyses and keeps up to `cache` bytes of results; the least recently used are dropped first."""

    def __init__(
        self,
        size: Callable[[T], int],
        *,
        at_once: int = AT_ONCE,
        waiting: int = WAITING,
        cache: int = CACHE,
        records: int = RECORDS,
    ) -> None:
        self.size, self.limit, self.cache, self.records = size, at_once + waiting, cache, records
        self.pool = ThreadPoolExecutor(at_once, thread_name_prefix="normscope-analysis")
        self.jobs: OrderedDict[str, Job[T]] = OrderedDict()  # most recently used last
        self.active: set[Job[T]] = set()  # running or queued

    def submit(self, id: str, work: Callable[[ProgressReport[T]], T]) -> Job[T]:
        """The analysis with this id if it is running or done; otherwise a new one."""
        job = self.get(id)
        if job is not None and job.state in ("running", "done"):
            job.wanted += 1
            return job
        if len(self.active) >= self.limit:
            raise BusyError(f"{len(self.active)} analyses are running or waiting. Try again when some are done.")
        job = Job[T](id)
        self.jobs[id] = job
        self.jobs.move_to_end(id)
        self.active.add(job)
        loop = asyncio.get_running_loop()
        job.future = self.pool.submit(self._run, job, work, loop)
        job.future.add_done_callback(lambda _: _call_on_loop(loop, self.active.discard, job))
        self._forget()
        return job

    def get(self, id: str) -> Job[T] | None:
        """The analysis with this id; None if it is unknown or was dropped."""
        job = self.jobs.get(id)
        if job is not None:
            self.jobs.move_to_end(id)
        return job

    def cancel(self, job: Job[T]) -> None:
        """Cancel one request for the analysis; it stops when all of its requests are cancelled."""
        if job.ended:
            return
        job.wanted -= 1
        if job.wanted <= 0:
            job.stop.set()
            if job.future is not None:
                job.future.cancel()  # if it has not started
            self._keep_first(job)
            job.note("cancelled")

    async def changed(self, job: Job[T], seconds: float) -> None:
        """Wait until state or progress changes, for at most `seconds`."""
        if not job.ended and seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(job.change.wait(), seconds)

    async def finished(self, job: Job[T], seconds: float, first: bool = False) -> None:
        """Wait until the analysis has ended, or with `first` until its first part is ready, for at most `seconds`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not (job.ended or (first and job.first is not None)) and (left := until - loop.time()) > 0:
            await self.changed(job, left)

    def close(self) -> None:
        """Stop all analyses and wait for their threads, which restore their models."""
        for job in self.active:
            job.stop.set()
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: Job[T], work: Callable[[ProgressReport[T]], T], loop: asyncio.AbstractEventLoop) -> None:
        """Run the analysis in a thread and report its outcome."""
        try:
            if job.stop.is_set():
                return
            result = work(ProgressReport(job, loop))
        except CancelledError:
            return
        except NormscopeError as error:
            _call_on_loop(loop, self._failed, job, str(error))
        except MemoryError:
            _call_on_loop(loop, self._failed, job, "Not enough memory for this analysis. Shorten the input.")
        except Exception:
            log.exception("an analysis failed")
            _call_on_loop(loop, self._failed, job, "The analysis failed inside the server; see its log.")
        else:
            _call_on_loop(loop, self._done, job, result)

    def _failed(self, job: Job[T], error: str) -> None:
        if not job.ended:
            self._keep_first(job)
            job.note("failed", error=error)

    def _keep_first(self, job: Job[T]) -> None:
        """Keep the first part, which clients may still request."""
        if job.first is not None:
            job.size = self.size(job.first)

    def _done(self, job: Job[T], result: T) -> None:
        if job.ended or self.jobs.get(job.id) is not job:
            return
        job.first, job.result, job.size = None, result, self.size(result)
        self.jobs.move_to_end(job.id)
        job.note("done", progress=1.0)
        self._forget()

    def _forget(self) -> None:
        """Drop the least recently used analyses until the rest fits; the latest always stays."""
        kept = sum(job.size for job in self.jobs.values())
        count = len(self.jobs)
        for id, job in list(self.jobs.items())[:-1]:
            if kept <= self.cache and count <= self.records:
                break
            if job.ended and (job.size or count > self.records):
                del self.jobs[id]
                kept -= job.size
                count -= 1


def _call_on_loop(loop: asyncio.AbstractEventLoop, what: Callable[..., object], *arguments: object) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(what, *arguments)
