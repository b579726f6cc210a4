"""The code of the README and of every page of docs/ runs, block after block in one namespace, and prints what the page
says it prints; every command line is executed, in the same folder.

A local model replaces each model of the hub. The commands of normscope run in this process; `make` and `pip`, which
would set up an environment, are only checked here (tests/release runs them).
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from normscope import NormscopeError, default_model
from normscope.cli import app
from normscope.corpus import measure_registry
from normscope.models import loading, registry
from tests.helpers.pages import DOCS, ROOT, SAMPLES, SHOWN, TRAINED, Block, blocks, commands, pages

SLOW = ("flow.md", "guides/ray.md", "guides/papers.md")
FINDINGS = DOCS / "findings"  # reports, each with the command that it was made by
_done: set[tuple[str, ...]] = set()


def runnable() -> list[Any]:
    read = [page for page in pages() if not page.is_relative_to(FINDINGS)]
    found = [page for page in read if blocks(page.read_text(encoding="utf-8"))]
    names = [page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix() for page in found]
    return [
        pytest.param(page, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for page, name in zip(found, names, strict=True)
    ]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local models replace those of the hub; a page that needs a missing one is skipped."""
    load = loading.load_pretrained

    def load_here(name: str, *options: Any) -> Any:
        if name in TRAINED:
            trained = TRAINED[name]
            data = os.environ.get("NORMSCOPE_TEST_DATA")
            if trained and not data:
                pytest.skip(f"the rest of the page needs {trained}: NORMSCOPE_TEST_DATA names no folder")
            name = str(Path(data or "", "models", trained) if trained else default_model.find())
        return load(name, *options)

    monkeypatch.setattr(loading, "load_pretrained", load_here)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a page runs: it holds the samples only. Registrations are undone afterwards."""
    try:
        default_model.find()
    except NormscopeError:
        pytest.skip("the default model is not installed")
    for name, text in SAMPLES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    classifier(tmp_path / "classifier")
    monkeypatch.setattr(registry, "_registered", [])
    measure_registry.find_registered_measures(
        ["flow"]
    )  # loads every measure: one that a page loads first would be forgotten after it
    monkeypatch.setattr(measure_registry, "_measures", dict(measure_registry._measures))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def classifier(folder: Path) -> None:
    """A tiny model of two classes, which some pages assume their reader has."""
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        id2label={0: "negative", 1: "positive"},
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(default_model.find()).save_pretrained(folder)


@pytest.mark.parametrize("page", runnable())
@pytest.mark.usefixtures("stand_ins", "folder")
def test_the_code_of_a_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A new module: transformers and normscope look up names in the module of a class.
    module = ModuleType(f"docs_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run(page, module)


def run(page: Path, module: ModuleType) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.kind != "python":
            for words in commands(block.code):
                with alone() if block.kind == "either" else nullcontext():
                    execute(words)
            continue
        code = compile("\n" * block.line + block.code, str(page), "exec", dont_inherit=True)  # errors name the line
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, vars(module))
        if block.printed is not None:
            assert printed.getvalue() == block.printed, f"{page.name}:{block.line + 1} prints something else"


@contextmanager
def alone() -> Iterator[None]:
    """In a copy of the folder, so that the next command does not see the files of this one."""
    with TemporaryDirectory() as copy:
        shutil.copytree(".", copy, dirs_exist_ok=True)
        with chdir(copy):
            yield


def execute(words: list[str]) -> None:
    """Run a command line of a page, or check that it can run. Commands that change nothing run once."""
    if words[0] != "normscope" or words[1] in ("check", "models", "serve"):
        if tuple(words) in _done:
            return
        _done.add(tuple(words))
    match words:
        case ["normscope", "serve", *options]:
            serve(options)
        case ["normscope", *options]:
            with cluster() if "--address" in options else nullcontext():
                result = CliRunner().invoke(app, options, env={"COLUMNS": "120"})
            if isinstance(result.exception, pytest.skip.Exception):
                raise result.exception
            # Verifying says with 1 that a number is off, and of a stand-in all are.
            assert result.exit_code in ((0, 1) if "--verify" in options else (0,)), f"{words}: {result.output}"
            refused = "error:" in result.output and "models with published numbers" not in result.output
            assert not refused, f"{words}: {result.output}"
        case ["make", *targets]:
            done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        case ["pip", "install", *what]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for name in re.findall(r"\[([\w,]+)\]", " ".join(what)):
                assert set(name.split(",")) <= set(extras), f"{words} names an extra that there is not"
        case ["python" | ".venv/bin/python", "-m", *what]:
            if what[0] == "pytest":
                assert all((ROOT / path).is_file() for path in what[1:]), words
            else:
                done = subprocess.run([sys.executable, "-m", *what], cwd=ROOT, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
        case _:
            raise AssertionError(f"{words} is not a command that tests/docs knows: add it there")


@contextmanager
def cluster() -> Iterator[None]:
    """A running Ray cluster."""
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def serve(options: list[str]) -> None:
    """Start the server with the page's options, but on a free port and without a browser; then stop it with Ctrl-C."""
    command = [sys.executable, "-m", "normscope", "serve", *options, "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        for line in server.stdout:
            if "http://127.0.0.1:" in line:
                server.send_signal(signal.SIGINT)
        assert server.wait(180) in (0, 130, -signal.SIGINT)


@pytest.mark.usefixtures("folder")
def test_the_map_in_the_readme() -> None:
    """The README shows what a command prints, up to its last line."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^(normscope analyze [^\n]+)\n```\n\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found
    (words,) = commands(found[1])
    printed = CliRunner().invoke(app, words[1:], env={"COLUMNS": "120"}).output
    shown = found[2].splitlines()
    assert [line.rstrip() for line in printed.splitlines()][: len(shown)] == shown


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_line_is_one_that_is_executed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.is_relative_to(FINDINGS):
        return
    executed = {line for block in blocks(text) if block.kind != "python" for line in block.code.splitlines()}
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for body in fenced for line in body.splitlines() if line.startswith(SHOWN)]
    loose = [line for line in lines if line not in executed]
    assert not loose, f"fence these with sh, so that they are executed: {loose}"


def test_blocks_are_found_with_what_they_print() -> None:
    text = "a\n```python\nprint(1)\n```\n\n```text\n1\n```\nb\n```sh\nmake x\n```\nc\n```text\nno output\n```\n"
    assert blocks(text) == [Block("python", "print(1)\n", 2, "1\n"), Block("sh", "make x\n", 10, None)]


def test_commands_are_split_as_a_shell_does() -> None:
    assert commands('make a  # why\n\nnormscope analyze "a b" \\\n    -o x\n') == [
        ["make", "a"],
        ["normscope", "analyze", "a b", "-o", "x"],
    ]


def test_a_page_that_fails_or_prints_something_else_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:6 prints something else"):
        run(page, ModuleType("page"))
    page.write_text("```python\nraise KeyError\n```\n")
    with pytest.raises(KeyError):
        run(page, ModuleType("page"))
    for command in ("normscope analyse x", "make no-such-target", "pip install 'normscope[nothing]'", "rm -r /x"):
        page.write_text(f"```sh\n{command}\n```\n")
        with pytest.raises(AssertionError):
            run(page, ModuleType("page"))
