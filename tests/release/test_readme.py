"""The README, followed word for word in a fresh clone and an empty home directory."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.fresh import copy_project, environment, run
from tests.helpers.pages import SAMPLES, TRAINED, blocks, commands

pytestmark = pytest.mark.slow
LEFT_OUT = ["make", "test"]  # which runs this test


def test_the_readme_word_for_word(tmp_path: Path) -> None:
    clone = copy_project(tmp_path / "clone")
    env = environment(tmp_path / "home", clone / ".venv" / "bin")  # what `make demo` makes, and people then activate
    for name, text in SAMPLES.items():
        (clone / name).write_text(text, encoding="utf-8")
    code = ""
    for block in blocks((clone / "README.md").read_text(encoding="utf-8")):
        if block.kind == "sh":
            for words in commands(block.code):
                if words[:2] == ["normscope", "serve"]:
                    serve([*words, "--no-open"], clone, env)
                elif words != LEFT_OUT:
                    run(words, clone, env)
        elif not any(f'from_pretrained("{name}")' in block.code for name in TRAINED):  # those are downloaded
            code += block.code  # later blocks use the names of earlier ones
            said = run([clone / ".venv" / "bin" / "python", "-c", code], clone, env)
            assert (block.printed or "") in said
    assert (clone / "normscope-demo" / "demo.html").is_file()


def serve(words: list[str], cwd: Path, env: Mapping[str, str]) -> None:
    """Start the server, wait until it answers, stop it with Ctrl-C."""
    found = False
    with subprocess.Popen(
        [*words, "--port", "0"], cwd=cwd, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if "http://127.0.0.1:" in line:
                found = True
                os.kill(server.pid, signal.SIGINT)
    assert found
