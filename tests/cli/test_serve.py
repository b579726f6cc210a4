"""`normscope serve`: what it loads, where it listens, how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from normscope import NormscopeError, cli, default_model
from normscope.view.server.analyses import models_by_name
from tests.helpers.toys import speaker, toy_lens

try:
    default_model.find()
    installed = True
except NormscopeError:
    installed = False


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that a server would have been started with; none is started."""
    found: dict[str, Any] = {"opened": []}

    class Server:
        started = True
        should_exit = False

        def __init__(self, config: Any) -> None:
            found["config"] = config

        def run(self, sockets: list[socket.socket]) -> None:
            found["address"] = sockets[0].getsockname()

    monkeypatch.setattr("uvicorn.Server", Server)
    monkeypatch.setattr(
        cli.loading, "load_analyzer", lambda source: speaker() if source.name == "other" else toy_lens()
    )
    monkeypatch.setattr("threading.Thread.start", lambda self: self.run())
    monkeypatch.setattr("webbrowser.open", lambda address: found["opened"].append(address))
    return found


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["serve", *arguments])


def test_serve_listens_on_localhost_only(started: dict[str, Any]) -> None:
    result = run("--port", "0")
    assert result.exit_code == 0, result.output
    host, port = started["address"]
    assert host == "127.0.0.1"
    assert f"normscope is at http://127.0.0.1:{port}/" in result.output
    assert started["opened"] == [f"http://127.0.0.1:{port}/"]
    assert "--host" not in run("--help").output


def test_several_models_and_no_browser(started: dict[str, Any]) -> None:
    result = run("--port", "0", "--no-open", "--model", "default", "-m", "other")
    assert result.exit_code == 0, result.output
    assert started["opened"] == []
    assert started["config"].access_log is False


def test_a_port_in_use(started: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("--port", str(taken.getsockname()[1]))
    assert result.exit_code == 1
    assert "error: Cannot listen on port" in result.output
    assert "--port 0 takes any free one" in result.output


def test_a_model_that_cannot_be_loaded() -> None:
    result = run("--port", "0", "--no-open", "--model", "/nowhere/at/all")
    assert result.exit_code == 1
    assert "Cannot load a model from '/nowhere/at/all'" in result.output


def test_missing_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = run()
    assert result.exit_code == 1
    assert "pip install 'normscope[serve]'" in result.output


def test_a_speech_model_is_refused() -> None:
    from normscope import Analyzer
    from tests.helpers.tiny import tiny

    with pytest.raises(NormscopeError, match="is a speech model"):
        models_by_name([Analyzer(tiny("whisper"))])


@pytest.mark.skipif(not installed, reason="the default model is not installed")
def test_from_start_to_ctrl_c() -> None:
    """The command itself, in a separate process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "normscope", "serve", "--port", "0", "--no-open"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    try:
        said = ""
        while not (address := re.search(r"http://127\.0\.0\.1:\d+/", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        with httpx.Client(base_url=address[0], timeout=180, trust_env=False) as client:
            (model,) = client.get("/api/models").json()
            assert model["name"] == "all-MiniLM-L6-v2"
            body = {"model": model["name"], "text": "Colin Fleming played the highway tiny soap opera."}
            answer = client.post("/api/analyses?wait=60", json=body).json()
            assert answer["state"] == "done"
            assert answer["header"]["sides"][0]["rows"][1]["token"] == "colin"
        process.send_signal(signal.SIGINT)
        assert process.wait(180) in (0, 130)
    finally:
        process.kill()
        process.stderr.close()
        process.wait()
