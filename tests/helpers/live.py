"""A real server in a thread, with helpers for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from normscope import Analyzer
from normscope.view.server.analyses import Shown, run_server_analysis
from normscope.view.server.app import create_app
from normscope.view.server.jobs import ProgressReport
from normscope.view.server.listening import SETTINGS, listen
from normscope.view.server.schemas import AnalysisRequest

WAIT = 60.0  # the longest wait in seconds that the server accepts
PATIENCE = 180.0  # seconds until something counts as failed, however busy the machine is


class Live:
    """The address of a server, a client for it, and its jobs."""

    def __init__(self, port: int, app: Any, server: uvicorn.Server) -> None:
        self.port, self.app, self.server = port, app, server
        self.address = f"http://127.0.0.1:{port}"
        # Unlimited idle connections: otherwise one thread may close a connection that another is about to use.
        limits = httpx.Limits(max_keepalive_connections=None)
        self.client = httpx.Client(base_url=self.address, timeout=PATIENCE, trust_env=False, limits=limits)

    def start(self, **request: Any) -> dict[str, Any]:
        """Start an analysis and wait until it ends."""
        answer = self.client.post("/api/analyses", params={"wait": WAIT}, json=request)
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def status(self, id: str, wait: float = 0) -> dict[str, Any]:
        answer = self.client.get(f"/api/analyses/{id}", params={"wait": wait})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def waits(self) -> threading.Semaphore:
        """A semaphore, released whenever a client starts to wait for a change; it cannot miss a later change."""
        begun, jobs = threading.Semaphore(0), self.app.state.jobs
        changed = jobs.changed

        async def noted(job: Any, seconds: float) -> None:
            begun.release()
            await changed(job, seconds)

        jobs.changed = noted
        return begun

    def until(self, id: str, state: str) -> dict[str, Any]:
        """The status of an analysis once it has reached a state."""
        return eventually(lambda: self.status(id, 1), lambda found: found["state"] == state)


def eventually(look: Callable[[], Any], good: Callable[[Any], bool] = bool, patience: float = PATIENCE) -> Any:
    """The value of `look()` as soon as `good` accepts it; fails if that takes too long."""
    end = time.monotonic() + patience
    while not good(seen := look()):
        assert time.monotonic() < end, seen
        time.sleep(0.01)
    return seen


@contextmanager
def live(models: Mapping[str, Analyzer], **options: Any) -> Iterator[Live]:
    """A server of these models on a free port."""
    listener = listen(0)
    port = int(listener.getsockname()[1])
    app = create_app(models, port, **options)
    server = uvicorn.Server(uvicorn.Config(app, **SETTINGS))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    found = Live(port, app, server)
    try:
        eventually(lambda: server.started)
        yield found
    finally:
        found.client.close()
        server.should_exit = True
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive()


class Told(ProgressReport[Shown]):
    """A report that passes its progress to a test and, optionally, its first layer to another report."""

    def __init__(self, on: Callable[[int, int], object], to: ProgressReport[Shown] | None = None) -> None:
        self.on, self.to = on, to

    def __call__(self, done: int, total: int) -> None:
        self.on(done, total)

    def first(self, part: Shown) -> None:
        if self.to is not None:
            self.to.first(part)


def held(report: ProgressReport[Shown], go: threading.Event) -> Told:
    """A report that blocks its analysis after the second layer until it is released."""

    def on(done: int, total: int) -> None:
        if done == 1:
            report(done, total)
        else:
            assert go.wait(PATIENCE)

    return Told(on, report)


class Slow:
    """An analysis that blocks until it is released, step by step; it counts how many are running."""

    def __init__(self, steps: int = 4) -> None:
        self.steps, self.begun, self.ended, self.at_once, self.most = steps, 0, 0, 0, 0
        self.lock = threading.Lock()
        self.go = threading.Semaphore(0)

    def __call__(self, lens: Analyzer, request: AnalysisRequest, report: ProgressReport[Shown]) -> Shown:
        with self.lock:
            self.begun += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        try:
            for step in range(self.steps):
                assert self.go.acquire(timeout=PATIENCE)
                report(step + 1, self.steps + 1)
            return run_server_analysis(lens, request, report)
        finally:
            with self.lock:
                self.at_once -= 1
                self.ended += 1

    def let_go(self, steps: int = 10_000) -> None:
        for _ in range(steps):
            self.go.release()
