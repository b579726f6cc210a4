"""The command line before any computation: it starts fast, completes names, and refuses wrong paths."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from normscope import cli
from normscope.cli import completion
from normscope.corpus.measure_registry import _measures, describe_measures
from normscope.corpus.readers.formats import FORMATS
from normscope.engine.request import GATES, LINEAR_GATES, VALUE_BIASES
from normscope.flow.methods import METHODS
from normscope.models.registry import FAMILIES
from normscope.models.scopes import scope_aliases, scope_names

HEAVY = ("torch", "transformers", "polars", "matplotlib")
LOADS = ("demo", "analyze", "flow", "serve", "corpus", "paper", "faithfulness", "check")
SCRIPT = """
import json, sys
from normscope import cli
sys.argv = ["normscope", *json.loads(sys.argv[1])]
try:
    cli.main()
except SystemExit as stopped:
    code = stopped.code
print(json.dumps([code, [name for name in {heavy} if name in sys.modules]]))
"""


def start(*arguments: str, folder: Path | None = None) -> tuple[int, list[str], str]:
    """The exit code of a command in a separate process, the heavy packages it imported, and its output."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(heavy=HEAVY), json.dumps(arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    code, imported = json.loads(done.stdout.splitlines()[-1])
    return code, imported, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], *([name, "--help"] for name in LOADS)], ids=" ".join)
def test_help_waits_for_nothing(arguments: list[str]) -> None:
    assert start(*arguments)[:2] == (0, [])


def cpu_seconds(*arguments: str) -> float:
    """User and system time of a Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_help_is_fast(option: str) -> None:
    """At most 0.3 s of CPU where importing typer takes 0.0375 s: in units of that import, since machines differ; the
    best of several pairs, since other processes interfere."""
    ratios = [cpu_seconds("-m", "normscope", option) / cpu_seconds("-c", "import typer") for _ in range(7)]
    assert min(ratios) < 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data.txt").write_text("a cat\n")
    (tmp_path / "data.xyz").write_text("a cat\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("analyze x -o map.gif", "Cannot write map.gif: its name must end in one of .html, .svg"),
        ("analyze x -o nowhere/map.svg", "the folder nowhere does not exist"),
        ("analyze x -m ./nowhere", "Cannot load a model from './nowhere': there is no such folder"),
        ("analyze x -m ./other --revision main", "--revision main names a version on the Hugging Face hub"),
        ("flow x -t top -o map.npz", "Cannot write map.npz"),
        ("flow x -o map.txt", "Cannot write map.txt"),
        ("flow x --against y", "--against needs a target"),
        ("flow x -m ./nowhere", "there is no such folder"),
        ("demo -m ./nowhere", "there is no such folder"),
        ("demo -o data.txt", "Cannot create the folder data.txt"),
        ("check ./nowhere", "there is no such folder"),
        ("serve -m ./nowhere --no-open", "there is no such folder"),
        ("serve -m a/b -m c/d --revision main", "--revision applies to one model"),
        ("corpus nothing.txt -o run", "Cannot read nothing.txt: No such file or directory."),
        ("corpus nothing -o run", "use --format huggingface"),
        ("corpus data.xyz -o run", "Use --format with one of lines"),
        ("corpus other -o run --format lines", "The folder other has no file with a known suffix"),
        ("corpus data.txt -o data.txt", "data.txt is a file"),
        ("corpus data.txt -o other", "other is not empty and does not contain a corpus run"),
        ("corpus data.txt -o run -m ./nowhere", "there is no such folder"),
        ("corpus data.txt -o run --reader nothing=1", "has no option nothing"),
        ("paper ff nothing.txt -o run", "Cannot read nothing.txt"),
        ("paper ff data.txt -o data.txt", "data.txt is a file"),
        ("paper ff data.txt -o run --frequencies nothing.txt", "Cannot read nothing.txt"),
        ("paper ff data.txt", "--out DIR"),
        ("faithfulness nothing.tsv -m gpt2 -o run", "Cannot read nothing.tsv"),
        ("faithfulness data.txt -m ./nowhere -o run", "there is no such folder"),
    ],
)
def test_wrong_paths_are_refused_before_anything_is_imported(folder: Path, line: str, said: str) -> None:
    before = sorted(folder.rglob("*"))
    code, imported, output = start(*line.split(), folder=folder)
    assert (code, imported) == (1, [])
    assert said in output
    assert "error: " in output
    assert sorted(folder.rglob("*")) == before


def test_every_command_that_loads_a_model_says_how() -> None:
    for name in LOADS:
        text = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200"}).output
        for option in ("--device", "--dtype", "--revision", "MODEL"):
            assert option in text, (name, option)


def test_flags_show_no_value() -> None:
    for name in (*LOADS, "models"):
        text = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200"}).output
        assert "<bool>" not in text
        assert "<int range>" not in text
    assert "<bool>" not in CliRunner().invoke(cli.app, ["--help"]).output


# Completion.


def complete(line: str) -> list[str]:
    """The completions for the end of a line in bash; the process must import nothing heavy."""
    words = line.split(" ")
    told = f"sys.stderr.write(str([name for name in {HEAVY} if name in sys.modules]))"
    script = f"import sys; from normscope import cli\ntry: cli.main()\nfinally: {told}\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "_NORMSCOPE_COMPLETE": "complete_bash",
            "COMP_WORDS": "\n".join(words),
            "COMP_CWORD": str(len(words) - 1),
        },
    )
    assert done.stderr == "[]"
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("normscope fl", ["flow"]),
        ("normscope flow x --method dec", ["decompx"]),
        ("normscope flow x --gate t", ["tangent"]),
        ("normscope analyze x --scope attention-b", ["attention-block"]),
        ("normscope analyze x --gate shapley-s", ["shapley-sampled"]),
        ("normscope analyze x --dtype float6", ["float64"]),
        ("normscope analyze x --model d", ["default"]),
        ("normscope models Lla", ["Llama", "Llama-like"]),
        ("normscope models lla", ["llama", "llama-like"]),
        ("normscope models LLA", ["LLAMA", "LLAMA-LIKE"]),
        ("normscope analyze x -s attnreslnffresln", ["attnreslnffresln-n"]),
        ("normscope corpus x --measures mixing,si", ["mixing,similarity"]),
        ("normscope corpus x --format conllu", ["conllu"]),
        ("normscope paper emnlp2021", ["emnlp2021"]),
    ],
)
def test_names_are_completed(line: str, offered: list[str]) -> None:
    assert complete(line) == offered


def test_completed_names_match_the_library() -> None:
    assert tuple(METHODS) == completion.METHODS
    assert tuple(GATES) == completion.GATES
    assert tuple(LINEAR_GATES) == completion.FLOW_GATES
    assert tuple(VALUE_BIASES) == completion.VALUE_BIASES
    assert set(completion.MEASURES) <= set(describe_measures())
    own = {
        name for name, measure in _measures.items() if measure.columns.__module__ == "normscope.corpus.measure_registry"
    }
    assert own == set(completion.MEASURES)
    assert completion.complete_measures("") == [*completion.MEASURES, "list"]
    assert completion.complete_format("") == list(FORMATS)
    for family in FAMILIES:
        assert family.name in completion.complete_family(family.name)
        for stack in family.stacks:
            for name in (*scope_names(stack.blocks), *scope_aliases(stack.blocks)):
                assert name in completion.complete_scope(name)


def test_completion_can_be_installed() -> None:
    text = CliRunner().invoke(cli.app, ["--help"]).output
    assert "--install-completion" in text
    assert "--show-completion" in text
