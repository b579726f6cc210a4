"""A few analyses at once: queue, cancelling, cache, many clients, clients that go away."""

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from normscope import Analyzer
from normscope.view.server.analyses import Shown, run_server_analysis
from normscope.view.server.jobs import BusyError, Jobs
from normscope.view.server.schemas import AnalysisRequest
from tests.helpers.compare import state_of
from tests.helpers.kinds import lenses
from tests.helpers.live import PATIENCE, WAIT, Live, Slow, Told, eventually, live
from tests.helpers.tiny import tiny
from tests.helpers.toys import toy_tokenizer


def ask(server: Live, text: str, wait: float = 0) -> Any:
    return server.client.post("/api/analyses", params={"wait": wait}, json={"model": "tiny-encoder", "text": text})


def texts(count: int) -> list[str]:
    words = ("the", "cat", "dog", "sat", "ran", "on", "mat", "and")
    return [" ".join(words[(n >> shift) % 8] for shift in (0, 3, 6)) for n in range(count)]


def test_concurrency_and_queue_are_limited(slow: Slow) -> None:
    with live(lenses(), run=slow, at_once=2, waiting=3) as server:
        answers = [ask(server, text) for text in texts(5)]
        assert [answer.status_code for answer in answers] == [201] * 5
        eventually(lambda: slow.begun == 2)
        full = ask(server, "one too many")
        assert full.status_code == 429
        assert "5 analyses are running or waiting" in full.json()["error"]
        assert ask(server, texts(1)[0]).status_code == 201  # one of those that run already
        slow.let_go()
        for answer in answers:
            server.until(answer.json()["id"], "done")
        assert slow.most == 2
        assert ask(server, "one too many", wait=WAIT).json()["state"] == "done"


def test_fifty_concurrent_clients() -> None:
    """Fifty clients with ten different questions: each is computed once, and every client gets an answer."""
    slow = Slow(0)
    with live(lenses(), run=slow) as server, ThreadPoolExecutor(50) as pool:
        questions = texts(10) * 5
        answers = list(pool.map(lambda text: ask(server, text, wait=WAIT), questions))
        assert {answer.status_code for answer in answers} == {201}
        assert {answer.json()["state"] for answer in answers} == {"done"}
        assert slow.begun == 10
        assert slow.most <= 2
        ids = {text: answer.json()["id"] for text, answer in zip(questions, answers, strict=True)}
        assert len(set(ids.values())) == 10
        paths = [f"/api/analyses/{id}/cells?side=encoder&scope=ATTN-N" for id in ids.values()] * 5
        sizes = set(pool.map(lambda path: len(server.client.get(path).content), paths))
        assert sizes == {4 * 2 * 5 * 5}


def test_a_full_queue_is_refused() -> None:
    with live(lenses(), at_once=1, waiting=4) as server, ThreadPoolExecutor(50) as pool:
        codes = [answer.status_code for answer in pool.map(lambda text: ask(server, text), texts(50))]
        assert set(codes) <= {201, 429}
        assert codes.count(201) >= 5
        eventually(lambda: not server.app.state.jobs.active)
        assert ask(server, "the mat", wait=WAIT).json()["state"] == "done"


def test_cancelling_what_waits_and_what_runs(slow: Slow) -> None:
    with live(lenses(), run=slow, at_once=1, waiting=1) as server:
        running, waiting = (ask(server, text).json()["id"] for text in texts(2))
        eventually(lambda: slow.begun == 1)
        assert ask(server, "the mat").status_code == 429
        assert server.client.delete(f"/api/analyses/{waiting}").json()["state"] == "cancelled"
        eventually(lambda: ask(server, "the mat").status_code == 201)  # its place is free at once
        assert server.client.delete(f"/api/analyses/{running}").json()["state"] == "cancelled"
        assert server.client.get(f"/api/analyses/{running}/header").status_code == 409
        assert server.client.delete(f"/api/analyses/{running}").json()["state"] == "cancelled"  # again: nothing new
        slow.let_go()
        eventually(lambda: slow.ended == 2)
        assert slow.begun == 2  # the waiting one never began
        assert ask(server, texts(1)[0], wait=WAIT).json()["state"] == "done"  # and can be asked for again


def test_one_of_two_clients_cancels(slow: Slow) -> None:
    with live(lenses(), run=slow) as server:
        first, second = (ask(server, "the cat").json() for _ in range(2))
        assert first["id"] == second["id"]
        assert server.client.delete(f"/api/analyses/{first['id']}").json()["state"] == "running"
        slow.let_go()
        server.until(first["id"], "done")
        assert server.client.delete(f"/api/analyses/{first['id']}").json()["state"] == "done"


def test_a_cancelled_analysis_leaves_the_model_as_it_was() -> None:
    """Cancelled inside the forward pass: the hooks are gone, and the next analysis is right."""
    lens = Analyzer(tiny("bert", num_hidden_layers=3), toy_tokenizer())
    expected = lens.analyze("the cat sat on the mat")
    before = state_of(lens.model)
    inside, go_on = threading.Event(), threading.Event()

    def run(lens: Analyzer, request: AnalysisRequest, progress: Any) -> Shown:
        def stop_after_the_first(done: int, total: int) -> None:
            inside.set()
            assert go_on.wait(PATIENCE)
            progress(done, total)

        return run_server_analysis(lens, request, Told(stop_after_the_first))

    with live({"tiny": lens}, run=run) as server:
        body = {"model": "tiny", "text": "the dog ran"}
        id = server.client.post("/api/analyses", json=body).json()["id"]
        assert inside.wait(PATIENCE)
        assert state_of(lens.model)["hooks"] != before["hooks"]
        assert server.client.delete(f"/api/analyses/{id}").json()["state"] == "cancelled"
        go_on.set()
        eventually(lambda: not server.app.state.jobs.active)
        assert state_of(lens.model) == before
        found = server.start(model="tiny", text="the cat sat on the mat")
        mixing = found["header"]["sides"][0]["mixing"]["ATTN-N"]
        assert mixing[0] == pytest.approx(expected.mixing_ratio("ATTN-N")[0].tolist(), rel=1e-3)


def test_a_client_that_disconnects(slow: Slow) -> None:
    """While it waits for an analysis: others are answered, and the result is there for the next client."""
    with live(lenses(), run=slow) as server:
        body = b'{"model": "tiny-encoder", "text": "the cat sat"}'
        head = (
            f"POST /api/analyses?wait=30 HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(head.encode() + body)
                eventually(lambda: slow.begun == 1)
        assert server.client.get("/api/models").status_code == 200
        slow.let_go()
        assert ask(server, "the cat sat", wait=WAIT).json()["state"] == "done"
        assert slow.begun == 1


def test_the_cache_forgets_the_longest_unused() -> None:
    with live(lenses()) as server:
        size = run_server_analysis(
            lenses()["tiny-encoder"], AnalysisRequest(model="tiny-encoder", text=texts(1)[0]), Told(lambda *_: None)
        ).size
    with live(lenses(), cache=int(2.5 * size)) as server:
        first, second = (ask(server, text, wait=WAIT).json()["id"] for text in texts(2))
        assert server.client.get(f"/api/analyses/{first}/header").status_code == 200  # used again
        third = ask(server, texts(3)[2], wait=WAIT).json()["id"]
        codes = [server.client.get(f"/api/analyses/{id}").status_code for id in (first, second, third)]
        assert codes == [200, 404, 200]
    with live(lenses(), cache=0) as server:  # the last result stays, even if it is too large
        id = ask(server, texts(1)[0], wait=WAIT).json()["id"]
        assert server.client.get(f"/api/analyses/{id}/header").status_code == 200


def test_records_of_failures_are_forgotten_too() -> None:
    async def scenario() -> None:
        jobs = Jobs[int](lambda result: 0, records=5)

        def fail(progress: Any) -> int:
            raise ValueError

        for n in range(20):
            await jobs.finished(jobs.submit(str(n), fail), PATIENCE)
        assert list(jobs.jobs) == ["15", "16", "17", "18", "19"]
        jobs.close()

    asyncio.run(scenario())


def test_a_busy_server_says_so() -> None:
    async def scenario() -> None:
        jobs = Jobs[int](lambda result: 0, at_once=1, waiting=0)
        gate = threading.Event()
        job = jobs.submit("a", lambda progress: int(gate.wait(PATIENCE)))
        with pytest.raises(BusyError, match="1 analyses are running"):
            jobs.submit("b", lambda progress: 1)
        gate.set()
        await jobs.finished(job, PATIENCE)
        assert job.state == "done"
        assert job.result == 1
        jobs.close()

    asyncio.run(scenario())


def test_the_server_ends_with_analyses_under_way() -> None:
    slow = Slow()
    with live(lenses(), run=slow) as server:
        ask(server, "the cat")
        eventually(lambda: slow.begun == 1)
        (job,) = server.app.state.jobs.active
        # It stands still until the server, on its way out, tells it to stop.
        threading.Thread(target=lambda: job.stop.wait(PATIENCE) and slow.let_go()).start()
    assert job.stop.is_set()
    assert slow.ended == 1
