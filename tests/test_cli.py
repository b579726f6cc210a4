"""The command line: against a stand-in for the analyzer, and end to end with the default model."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import normscope
from normscope import Analysis, NormscopeError, __version__, cli, default_model
from normscope.view.export import SUFFIXES
from tests.view.fake import SENTENCE, fake

try:
    default_model.find()
    installed = True
except NormscopeError:
    installed = False
with_model = pytest.mark.skipif(not installed, reason="the default model is not installed")


def run(*arguments: str, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=text)


class Estimate:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __str__(self) -> str:
        return f"11 tokens: about 5 MB of memory and {self.seconds:.1f} s"


class Lens:
    """Answers as an Analyzer of six layers does, and keeps what it was asked."""

    depth = 6
    model_name = "some/model"

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.seconds = 0.1
        self.fails: type[BaseException] | None = None

    def estimate(self, given: Any, **options: Any) -> Estimate:
        return Estimate(self.seconds)

    def analyze(self, given: Any, progress: Callable[[int, int], None] | None = None, **options: Any) -> Analysis:
        self.asked = {"given": given, **options}
        if self.fails:
            raise self.fails("refused\nfor a reason")
        scopes = options.get("scopes")
        layers = options.get("layers")
        return fake(
            SENTENCE,
            layers=range(self.depth) if layers is None else layers,
            heads=2 if options.get("heads") else 0,
            **({} if scopes is None else {"scopes": scopes}),
        )


@pytest.fixture
def lens(monkeypatch: pytest.MonkeyPatch) -> Lens:
    stand_in = Lens()
    monkeypatch.setattr(cli, "_load", lambda *_: stand_in)
    return stand_in


def test_help_of_every_command_has_an_example() -> None:
    assert run("--help").exit_code == 0
    for command in ("demo", "analyze", "check", "models"):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert f"Example: normscope {command}" in result.output


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"normscope {__version__}\n")


def test_usage_errors_exit_with_2() -> None:
    for arguments in (
        ["nothing"],
        ["analyze"],
        ["analyze", "x", "--layer", "0"],
        ["analyze", "x", "--layer", "-1"],
        ["analyze", "x", "--dtype", "int8"],
        ["check"],
    ):
        assert run(*arguments).exit_code == 2


def test_analyze_prints_the_last_scope_and_layer_asked_for(lens: Lens) -> None:
    result = run("analyze", "a text", "-s", "ATTN-N", "-s", "ATTN-W", "--layer", "5", "--layer", "2")
    assert result.exit_code == 0
    assert "ATTN-W, layer 2 (counted from 1): attention weight" in result.output
    assert "Mixing ratio" in result.output
    assert lens.asked == {
        "given": "a text",
        "scopes": ["ATTN-N", "ATTN-W"],
        "layers": [1, 4],
        "heads": False,
        "truncation": False,
    }


def test_analyze_asks_for_everything_by_default(lens: Lens) -> None:
    result = run("analyze", "a", "--pair", "b", "--heads", "--truncate")
    assert "ATTNRESLNFFRESLN-N, layer 6" in result.output
    assert lens.asked == {"given": ("a", "b"), "scopes": None, "layers": None, "heads": True, "truncation": True}


def test_layers_out_of_range_are_counted_from_1(lens: Lens) -> None:
    result = run("analyze", "x", "--layer", "7")
    assert (result.exit_code, result.stderr) == (1, "error: There is no layer 7: this model has the layers 1 to 6.\n")
    assert not lens.asked


def test_text_from_standard_input(lens: Lens) -> None:
    assert run("analyze", "-", text="two\nlines ü\n").exit_code == 0
    assert lens.asked["given"] == "two\nlines ü"
    result = run("analyze", "-", text=b"\xff\xfe")
    assert (result.exit_code, result.stderr) == (1, "error: The text on standard input is not UTF-8.\n")


def test_analyze_writes_files(lens: Lens, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"x{suffix}") for suffix in SUFFIXES]
    result = run("analyze", "x", *(part for path in paths for part in ("-o", path)))
    assert result.exit_code == 0
    assert result.output == (
        f"11 tokens, 6 layers, 8 scopes, worst completeness error 2.5e-07: wrote {', '.join(paths)}\n"
    )
    assert all(Path(path).stat().st_size for path in paths)


def test_one_scope_and_layer_give_one_map(lens: Lens, tmp_path: Path) -> None:
    run("analyze", "x", "-s", "ATTN-N", "-l", "3", "-o", str(tmp_path / "x.svg"))
    assert "ATTN-N, layer 3" in (tmp_path / "x.svg").read_text()


def test_bad_files_are_refused_before_anything_is_computed(lens: Lens, tmp_path: Path) -> None:
    for name in ("x.gif", "missing/x.png"):
        result = run("analyze", "x", "-o", str(tmp_path / "x.png"), "-o", str(tmp_path / name))
        assert result.exit_code == 1
        assert result.stderr.startswith("error: Cannot write ")
    assert not lens.asked
    assert not list(tmp_path.iterdir())


def test_refusals_are_one_line_without_a_traceback(lens: Lens) -> None:
    lens.fails = NormscopeError
    result = run("analyze", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "error: refused for a reason\n")


def test_interruption_is_quiet(lens: Lens) -> None:
    lens.fails = KeyboardInterrupt
    result = run("analyze", "x")
    assert (result.exit_code, result.output) == (130, "")


def test_long_runs_say_so_first(lens: Lens) -> None:
    assert run("analyze", "x").stderr == ""
    lens.seconds = 12.0
    assert run("analyze", "x").stderr == "estimate: 11 tokens: about 5 MB of memory and 12.0 s\n"


def test_demo_writes_a_page_and_figures(lens: Lens, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "demo"
    result = run("demo", "-o", str(folder))
    assert result.exit_code == 0
    names = ["demo.html", "demo.svg", "demo.png", "demo-map.png"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    for name in names:
        assert f"wrote {folder / name}" in result.output
    for part in ("[CLS] colin fleming", "ATTNRESLN-N, layer 6", "Mixing ratio", "completeness"):
        assert part in result.output


def test_demo_without_matplotlib_leaves_figures_out(
    lens: Lens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("demo", "-o", str(tmp_path))
    assert result.exit_code == 0
    assert "pip install 'normscope[plot]'" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["demo.html"]


def test_demo_refuses_a_folder_that_cannot_be_made(lens: Lens, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("demo", "-o", str(tmp_path / "file"))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: Cannot make the folder")


def test_models() -> None:
    result = run("models")
    assert result.exit_code == 0
    entries = json.loads(run("models", "--json").output)
    for entry in entries:
        assert entry["name"] in result.output
        assert set(entry) == {"name", "model_types", "order", "scopes", "aliases", "note"}
    bert = entries[0]
    assert bert["model_types"] == ["bert"]
    assert bert["order"] == "ATTN RES LN FF RES LN"
    assert bert["aliases"]["layer"] == bert["scopes"][-1] == "ATTNRESLNFFRESLN-N"


def test_an_unusable_device_is_refused() -> None:
    for device in ("nonsense", *(["cuda"] if not torch.cuda.is_available() else [])):
        result = run("analyze", "x", "--device", device)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"error: Cannot use the device '{device}': ")
        assert result.stderr.count("\n") == 1


def test_a_model_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    for command in (["analyze", "x", "--model"], ["check"]):
        result = run(*command, str(tmp_path))
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("ok", [True, False])
def test_check_prints_errors_and_limits(lens: Lens, monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    limits = {"maps_limit": 1e-5, "sums_limit": 1e-5, "padded_limit": 1e-4}
    rows = (
        SimpleNamespace(scope="ATTN-W", maps=0.0, sums=2e-7, padded=1e-6, ok=True, **limits),
        SimpleNamespace(scope="ATTN-N", maps=3e-7, sums=4e-7 if ok else 0.5, padded=1e-6, ok=ok, **limits),
    )
    report = SimpleNamespace(rows=rows, ok=ok, inputs=7)
    checking = SimpleNamespace(check=lambda lens, progress=None: report)
    monkeypatch.setitem(sys.modules, "normscope.checking", checking)
    monkeypatch.setattr(normscope, "checking", checking, raising=False)
    result = run("check", "some/model")
    assert result.exit_code == (0 if ok else 1)
    assert "worst errors over 7 inputs" in result.output
    line = next(line for line in result.output.splitlines() if "ATTN-N" in line)
    assert "4.0e-07 (1e-05)" in line if ok else "5.0e-01 (1e-05)" in line
    assert ("FAIL" in result.output) is not ok


@with_model
def test_analyze_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    result = run("analyze", "Hello there", "-l", "2", "-s", "layer", "--heads", "--dtype", "float64", "-o", str(path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("4 tokens, 1 layers, 1 scopes, worst completeness error ")
    content = json.loads(path.read_bytes())
    assert [row["token"] for row in content["rows"]] == ["[CLS]", "hello", "there", "[SEP]"]
    assert content["layers"] == [1]
    assert content["info"]["model"] == "all-MiniLM-L6-v2"
    assert list(content["scopes"]) == ["ATTNRESLNFFRESLN-N"]
    assert len(content["heads"]["indices"]) == 12


@with_model
def test_analyze_refuses_what_the_analyzer_refuses() -> None:
    for arguments in (["x", "-s", "nothing"], ["word " * 600], [""]):
        result = run("analyze", *arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
    assert run("analyze", "word " * 600, "--truncate", "-l", "1", "-s", "weights").exit_code == 0


@with_model
def test_demo_end_to_end(tmp_path: Path) -> None:
    result = run("demo", "--out", str(tmp_path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "all-MiniLM-L6-v2 (BERT)" in result.output
    assert len(list(tmp_path.iterdir())) == 4


@with_model
def test_check_end_to_end() -> None:
    pytest.importorskip("normscope.checking")
    result = run("check", "default")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "PASS" in result.output
    assert "FAIL" not in result.output
