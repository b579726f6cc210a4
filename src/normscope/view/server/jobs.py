"""Analyses that run beside the server: a few at once, others in a queue; progress, cancelling, and results kept.

Everything here happens on the event loop except the analysis itself, which runs in a thread and reports back.
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
CACHE = 512 * 2**20  # bytes of results
RECORDS = 1000  # analyses that are remembered, whatever became of them

log = logging.getLogger("normscope.serve")


class BusyError(Exception):
    """Too many analyses are waiting."""


class CancelledError(Exception):
    """Raised inside an analysis to end it."""


T = TypeVar("T")


@dataclass(eq=False)
class Job(Generic[T]):
    """One analysis. `result` is there once it is done."""

    id: str
    state: State = "running"
    progress: float = 0.0
    error: str | None = None
    first: T | None = None  # a part of the result, while the rest is being computed
    result: T | None = None
    size: int = 0
    wanted: int = 1  # how many asked for it and did not cancel
    stop: threading.Event = field(default_factory=threading.Event)
    future: Future[None] | None = None
    change: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.state != "running"

    def note(self, state: State | None = None, progress: float | None = None, error: str | None = None) -> None:
        """Change what is known of it, and wake whoever waits."""
        self.state = self.state if state is None else state
        self.progress = self.progress if progress is None else progress
        self.error = error
        self.change.set()
        self.change = asyncio.Event()


class Report(Generic[T]):
    """How an analysis tells, from its thread, how far it is. Telling ends it where nobody wants it any more."""

    def __init__(self, job: Job[T], loop: asyncio.AbstractEventLoop) -> None:
        self.job, self.loop = job, loop

    def __call__(self, done: int, total: int) -> None:
        if self.job.stop.is_set():
            raise CancelledError
        _tell(self.loop, self._progress, min(done / max(total, 1), 1.0))

    def first(self, part: T) -> None:
        """A part of the result that is worth showing before the rest is there."""
        _tell(self.loop, self._first, part)

    def _progress(self, progress: float) -> None:
        if not self.job.ended:
            self.job.note(progress=progress)

    def _first(self, part: T) -> None:
        if not self.job.ended:
            self.job.first = part
            self.job.note()


class Jobs(Generic[T]):
    """Runs analyses and keeps what came of them, the results up to `cache` bytes, the longest unused go first."""

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
        self.jobs: OrderedDict[str, Job[T]] = OrderedDict()  # the last used at the end
        self.active: set[Job[T]] = set()  # with a thread, or waiting for one

    def submit(self, id: str, work: Callable[[Report[T]], T]) -> Job[T]:
        """The analysis of that id: the one that runs or is done already, else a new one."""
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
        job.future.add_done_callback(lambda _: _tell(loop, self.active.discard, job))
        self._forget()
        return job

    def get(self, id: str) -> Job[T] | None:
        """An analysis by its id; None for one that is not known, or not any more."""
        job = self.jobs.get(id)
        if job is not None:
            self.jobs.move_to_end(id)
        return job

    def cancel(self, job: Job[T]) -> None:
        """One of those who asked for it does not want it any more; it ends when the last one does."""
        if job.ended:
            return
        job.wanted -= 1
        if job.wanted <= 0:
            job.stop.set()
            if job.future is not None:
                job.future.cancel()  # where it has not begun
            self._keep_first(job)
            job.note("cancelled")

    async def changed(self, job: Job[T], seconds: float) -> None:
        """Wait until its state or progress changes, for so many seconds at the most."""
        if not job.ended and seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(job.change.wait(), seconds)

    async def finished(self, job: Job[T], seconds: float, first: bool = False) -> None:
        """Wait until it has ended, or until its `first` part is there, for so many seconds at the most."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not (job.ended or (first and job.first is not None)) and (left := until - loop.time()) > 0:
            await self.changed(job, left)

    def close(self) -> None:
        """End everything; threads are given the time to put their models right."""
        for job in self.active:
            job.stop.set()
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: Job[T], work: Callable[[Report[T]], T], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: the analysis, and what became of it."""
        try:
            if job.stop.is_set():
                return
            result = work(Report(job, loop))
        except CancelledError:
            return
        except NormscopeError as error:
            _tell(loop, self._failed, job, str(error))
        except MemoryError:
            _tell(loop, self._failed, job, "There is not enough memory for this analysis. Shorten the input.")
        except Exception:
            log.exception("an analysis failed")
            _tell(loop, self._failed, job, "The analysis failed inside the server; its log says more.")
        else:
            _tell(loop, self._done, job, result)

    def _failed(self, job: Job[T], error: str) -> None:
        if not job.ended:
            self._keep_first(job)
            job.note("failed", error=error)

    def _keep_first(self, job: Job[T]) -> None:
        """Whoever was shown the first part may still look at the rest of it."""
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
        """Drop what was not used for the longest time, until the rest fits; the last one stays, whatever its size."""
        kept = sum(job.size for job in self.jobs.values())
        count = len(self.jobs)
        for id, job in list(self.jobs.items())[:-1]:
            if kept <= self.cache and count <= self.records:
                break
            if job.ended and (job.size or count > self.records):
                del self.jobs[id]
                kept -= job.size
                count -= 1


def _tell(loop: asyncio.AbstractEventLoop, what: Callable[..., object], *arguments: object) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody is there to be told
        loop.call_soon_threadsafe(what, *arguments)
