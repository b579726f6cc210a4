"""The command line: against a stand-in for the analyzer, and end to end with the default model."""

import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import normscope
from normscope import Analysis, Analyzer, NormscopeError, NormscopeWarning, __version__, checking, cli, default_model
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.view.formats import ANALYSIS_SUFFIXES
from tests.helpers.fakes import SENTENCE, fake
from tests.helpers.tiny import ENCODER_DECODER, OTHER_FAMILIES, inputs, tiny

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
    """Stands in for an Analyzer of six layers, and records its arguments."""

    depth = 6
    two_sided = False
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
    monkeypatch.setattr(cli.loading, "load_analyzer", lambda *_: stand_in)
    return stand_in


def test_help_of_every_command_has_an_example() -> None:
    assert run("--help").exit_code == 0
    for command in ("demo", "analyze", "flow", "serve", "corpus", "paper", "faithfulness", "check", "models"):
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
        ["analyze", "x", "--row", "0"],
        ["analyze", "x", "--generate", "0"],
        ["analyze", "x", "--side", "left"],
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
        "rows": None,
        "heads": False,
        "truncation": False,
        "gate": "ig",
        "value_bias": "token",
    }


def test_analyze_asks_for_everything_by_default(lens: Lens) -> None:
    result = run("analyze", "a", "--pair", "b", "--heads", "--truncate")
    assert "ATTNRESLNFFRESLN-N, layer 6" in result.output
    assert lens.asked == {
        "given": ("a", "b"),
        "scopes": None,
        "layers": None,
        "rows": None,
        "heads": True,
        "truncation": True,
        "gate": "ig",
        "value_bias": "token",
    }


def test_analyze_passes_on_rows_chats_and_lengths(lens: Lens) -> None:
    run("analyze", "a", "--row", "1", "--row", "-2", "--generate", "3")
    assert (lens.asked["rows"], lens.asked["generate"]) == ([0, -2], 3)
    run("analyze", "a", "--chat")
    assert (lens.asked["given"], lens.asked["chat"]) == (None, [{"role": "user", "content": "a"}])


def test_analyze_passes_on_sources(lens: Lens, tmp_path: Path) -> None:
    (tmp_path / "ann.txt").write_text("Ann sat.\n", encoding="utf-8")
    files = ["--source", str(tmp_path / "ann.txt")]
    assert run("analyze", "Who?", *files, "--template", "{ann}\\n{question}").exit_code == 0
    assert lens.asked["sources"] == {"ann": "Ann sat."}
    assert lens.asked["template"] == "{ann}\n{question}"
    assert run("analyze", "Who?", "--by", "sentence").exit_code == 0
    assert lens.asked["sources"] == "sentence"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "ann.txt").write_text("Ann ran.", encoding="utf-8")
    for wrong, message in (
        ([*files, "--by", "word"], "leave --by or --source out"),
        (["--template", "{question}"], "pass at least one"),
        (["--source", str(tmp_path / "none.txt")], "Cannot read"),
        ([*files, "--source", str(tmp_path / "b" / "ann.txt")], "Two sources are named 'ann'"),
    ):
        refused = run("analyze", "Who?", *wrong)
        assert refused.exit_code == 1
        assert message in refused.output


def test_no_estimate_of_what_the_model_will_write(lens: Lens) -> None:
    lens.seconds = 12.0
    assert run("analyze", "x", "--generate", "2").stderr == ""


def test_layers_out_of_range_are_counted_from_1(lens: Lens) -> None:
    result = run("analyze", "x", "--layer", "7")
    assert (result.exit_code, result.stderr) == (1, "error: There is no layer 7: this model has layers 1 to 6.\n")
    assert not lens.asked


def test_text_from_standard_input(lens: Lens) -> None:
    assert run("analyze", "-", text="two\nlines ü\n").exit_code == 0
    assert lens.asked["given"] == "two\nlines ü"
    result = run("analyze", "-", text=b"\xff\xfe")
    assert (result.exit_code, result.stderr) == (1, "error: The text on standard input is not UTF-8.\n")


def test_analyze_writes_files(lens: Lens, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"x{suffix}") for suffix in ANALYSIS_SUFFIXES]
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


def test_our_own_warnings_are_shown_once_and_others_are_not(lens: Lens, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lens.analyze

    def warned(*given: Any, **options: Any) -> Analysis:
        for n in range(2):  # all from one place, as those of one analysis are
            for text in (f"Small cells [b] are wrong by {n}e-3.", f"The input has {40 + n} tokens."):
                warnings.warn(text, NormscopeWarning, stacklevel=2)
            warnings.warn("somebody else's", stacklevel=2)
        return plain(*given, **options)

    monkeypatch.setattr(lens, "analyze", warned)
    result = run("analyze", "text")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "Warning: Small cells [b] are wrong by 0e-3.",
        "Warning: The input has 40 tokens.",
    ]
    assert "somebody" not in result.output


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
    assert result.stderr.startswith("error: Cannot create the folder")


def test_models_has_one_line_per_family() -> None:
    entries = json.loads(run("models", "--json").output)
    lines = run("models").output.splitlines()
    assert len(lines) == len(entries) + 3  # a title, and a hint below
    for line, entry in zip(lines[1:], entries, strict=False):
        cells = [entry["name"], ", ".join(entry["model_types"]), entry["stacks"][-1]["order"], entry["note"]]
        assert re.split(r"  +", line.strip()) == cells


def test_models_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "100")
    entries = json.loads(run("models", "--json").output)
    lines = run("models").output.splitlines()
    assert len(lines) == len(entries) + 3
    assert max(map(len, lines)) <= 100
    for line, entry in zip(lines[1:], entries, strict=False):
        assert line.startswith(entry["name"])
        assert entry["stacks"][-1]["order"] in line


def test_models_as_json() -> None:
    entries = json.loads(run("models", "--json").output)
    for entry in entries:
        assert set(entry) == {"name", "model_types", "input", "note", "stacks"}
        for stack in entry["stacks"]:
            assert set(stack) == {"side", "order", "scopes", "aliases"}
    bert = entries[0]
    assert "bert" in bert["model_types"]
    (stack,) = bert["stacks"]
    assert (stack["side"], stack["order"]) == ("encoder", "ATTN RES LN FF RES LN")
    assert stack["aliases"]["layer"] == stack["scopes"][-1] == "ATTNRESLNFFRESLN-N"
    marian = next(entry for entry in entries if entry["name"] == "Marian")
    assert [stack["side"] for stack in marian["stacks"]] == ["encoder", "decoder"]
    assert "XATTN-N" in marian["stacks"][1]["scopes"]


def test_models_in_detail() -> None:
    text = run("models", "MARIAN").output
    assert "encoder layer: ATTN RES LN FF RES LN" in text
    assert "decoder layer: ATTN RES LN XATTN RES LN FF RES LN" in text
    assert re.search(r"XATTN-N +cross-attention", text)
    assert run("models", "opt").output.count("(opt):") == 2
    assert [entry["name"] for entry in json.loads(run("models", "llama", "--json").output)] == ["Llama"]
    assert "Scopes of LN ATTN FF RES:" in run("models", "--scopes").output
    result = run("models", "lama")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: Unknown family 'lama'. Did you mean 'llama'")


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
        SimpleNamespace(scope="ATTN-W", side="encoder", maps=0.0, sums=2e-7, padded=1e-6, ok=True, **limits),
        SimpleNamespace(
            scope="ATTN-N", side="decoder", maps=3e-7, sums=4e-7 if ok else 0.5, padded=1e-6, ok=ok, **limits
        ),
    )
    passes = {"alone": 3e-7, "padded left": 3e-7 if ok else float("inf")}
    refusals = {} if ok else {"padded left": "it differs there"}
    report = SimpleNamespace(rows=rows, ok=ok, inputs=7, passes=passes, refusals=refusals)
    checking = SimpleNamespace(check=lambda lens, progress=None: report)
    monkeypatch.setitem(sys.modules, "normscope.checking", checking)
    monkeypatch.setattr(normscope, "checking", checking, raising=False)
    result = run("check", "some/model")
    assert result.exit_code == (0 if ok else 1)
    assert "worst errors over 7 inputs" in result.output
    assert "(1e-05)" in result.output
    line = next(line for line in result.output.splitlines() if "decoder ATTN-N" in line)
    assert "4.0e-07" in line if ok else "5.0e-01" in line
    assert ("FAIL" in result.output) is not ok
    assert "padded left" in result.output
    assert ("padded left: it differs there" in result.output) is not ok


@with_model
def test_analyze_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    result = run("analyze", "Hello there", "-l", "2", "-s", "layer", "--heads", "--dtype", "float64", "-o", str(path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("4 tokens, 1 layer, 1 scope, worst completeness error ")
    content = json.loads(path.read_bytes())
    assert [row["token"] for row in content["rows"]] == ["[CLS]", "hello", "there", "[SEP]"]
    assert content["layers"] == [1]
    assert content["info"]["model"] == "all-MiniLM-L6-v2"
    assert list(content["scopes"]) == ["ATTNRESLNFFRESLN-N"]
    assert len(content["heads"]["indices"]) == 12


@with_model
def test_analyze_with_other_readings(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    lens = Analyzer.from_pretrained(default_model.find())
    for gate, bias in (("shapley", "token"), ("tangent", "remainder")):
        asked = run("analyze", "Hello", "-l", "2", "--gate", gate, "--value-bias", bias, "-o", str(path))
        assert (asked.exit_code, asked.stderr) == (0, "")
        found, expected = Analysis.load(path), lens.analyze("Hello", layers=1, gate=gate, value_bias=bias)
        assert found.info["gate"] == gate
        assert torch.equal(found["layer"], expected["layer"])
        assert torch.equal(found.remainder("layer"), expected.remainder("layer"))


@with_model
def test_analyze_refuses_what_the_analyzer_refuses() -> None:
    wrong = (["x", "-s", "nothing"], ["word " * 600], [""], ["x", "--gate", "shaply"], ["x", "--value-bias", "here"])
    for arguments in wrong:
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


# --- other kinds of models -------------------------------------------------------------------------------------------


class Tiny:
    """A tiny encoder-decoder for the command line: a text stands for some ids, a target for others."""

    def __init__(self) -> None:
        model = tiny("marian", dtype=torch.float32)
        self.lens, self.encoding = Analyzer(model), inputs("marian", model)
        self.depth, self.two_sided = self.lens.depth, True

    def estimate(self, given: Any, text_target: Any = None, **options: Any) -> Estimate:
        return Estimate(0.1)

    def analyze(self, given: Any, text_target: Any = None, progress: Any = None, **options: Any) -> Any:
        return self.lens.analyze(self.encoding, **options)


@pytest.fixture
def translator(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    stand_in = Tiny()
    monkeypatch.setattr(cli.loading, "load_analyzer", lambda *_: stand_in)
    return stand_in


def test_an_encoder_decoder_shows_its_last_scope_and_the_cross_attention(translator: Tiny) -> None:
    result = run("analyze", "x", "--pair", "y")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "ATTNRESLNXATTNRESLNFFRESLN-N, layer 2" in result.output
    assert "(decoder | encoder tokens)" in result.output
    assert "XATTN-N, layer 2" in result.output
    assert "(encoder tokens)" in result.output
    assert "First token" not in result.output
    result = run("analyze", "x", "--side", "encoder", "-l", "1")
    assert "ATTNRESLNFFRESLN-N, layer 1" in result.output
    assert "XATTN" not in result.output
    assert "ATTN-W, layer 2" in run("analyze", "x", "-s", "weights").output


def test_no_mixing_ratio_of_cross_attention_alone_is_shown(translator: Tiny) -> None:
    title, table = run("analyze", "x", "--pair", "y").output.split("Mixing ratio: ")
    assert "XATTN-N, layer 2" in title
    first = table.splitlines()[-2].split()
    assert len(first) == 1 + 10  # the layer, and all of the twelve scopes but XATTN-W and XATTN-N
    assert "100.0" not in first
    output = run("analyze", "x", "--pair", "y", "-s", "XATTN-N").output
    assert "Mixing ratio" not in output
    assert "it has no mixing ratio" in output


def test_an_encoder_decoder_in_every_format(translator: Tiny, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"x{suffix}") for suffix in ANALYSIS_SUFFIXES]
    result = run("analyze", "x", *(part for path in paths for part in ("-o", path)))
    assert result.output.startswith(
        "encoder 9 tokens, 2 layers, 8 scopes; decoder 6 tokens, 2 layers, 12 scopes, worst"
    )
    assert all(Path(path).stat().st_size for path in paths)
    assert isinstance(Analysis.load(tmp_path / "x.safetensors"), EncoderDecoderAnalysis)
    content = json.loads((tmp_path / "x.json").read_bytes())
    assert set(content["sides"]) == {"encoder", "decoder"}
    with np.load(tmp_path / "x.npz") as arrays:
        assert arrays["decoder/map/XATTN-N"].shape == (2, 6, 15)
        assert list(arrays["decoder/column_sides"]) == ["decoder"] * 6 + ["encoder"] * 9
        assert arrays["encoder/map/ATTN-N"].shape == (2, 9, 9)
    one = str(tmp_path / "one.safetensors")
    run("analyze", "x", "--side", "decoder", "-o", one)
    assert isinstance(Analysis.load(one), Analysis)


def test_side_needs_an_encoder_decoder(translator: Tiny, lens: Lens) -> None:
    assert "--side is for encoder-decoders" in run("analyze", "x", "--side", "encoder").stderr


def test_options_of_other_models_are_refused(translator: Tiny) -> None:
    assert "Leave it out with --side encoder" in run("analyze", "x", "--side", "encoder", "--row", "1").stderr
    result = run("analyze", "x", "--row", "7")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: There is no row 7: valid are 1 to 6 (or -6 to -1).\n",
    )
    assert "no row -8: valid are 1 to 6" in run("analyze", "x", "--row", "-8").stderr


def test_demo_of_an_encoder_decoder(translator: Tiny, tmp_path: Path) -> None:
    result = run("demo", "-o", str(tmp_path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(list(tmp_path.iterdir())) == 4


def test_a_causal_model_shows_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", dtype=torch.float32)
    tiny_lens = Analyzer(model)
    found = tiny_lens.analyze(inputs("llama", model))
    monkeypatch.setattr(tiny_lens, "estimate", lambda *_, **__: Estimate(0.1))
    monkeypatch.setattr(tiny_lens, "analyze", lambda *_, **__: found)
    monkeypatch.setattr(cli.loading, "load_analyzer", lambda *_: tiny_lens)
    result = run("analyze", "x")
    assert "First token" in result.output
    share = 100 * float(found.first_token_share("ATTN-W")[1, 1:].mean())
    assert f"{share:.1f}" in result.output


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "vit"
    tiny("vit", dtype=torch.float32).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 12, "width": 12}).save_pretrained(folder)
    return folder


def test_a_picture_end_to_end(vit: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = tmp_path / "picture.png"
    image.fromarray(np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)).save(picture)
    out = tmp_path / "x.svg"
    result = run("analyze", str(picture), "--model", str(vit), "-o", str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "LNATTNRESLNFFRES-N, layer 2, output [CLS]" in out.read_text()
    result = run("analyze", str(picture), "--model", str(vit))
    assert "each cell is a patch of the picture; not on the grid: [CLS]" in result.output
    assert "there is no file 'nothing.png'" in run("analyze", "nothing.png", "--model", str(vit)).stderr
    result = run("check", str(vit))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "PASS" in result.output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OTHER_FAMILIES)
def test_check_of_every_kind_of_model(name: str, dtype: torch.dtype) -> None:
    report = checking.check(Analyzer(tiny(name, dtype=dtype)))
    assert report.ok, [row for row in report.rows if not row.ok]
    sides = {"encoder", "decoder"} if name in ENCODER_DECODER else {""}
    assert {row.side for row in report.rows} == sides


def test_check_of_long_inputs_looks_at_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "VECTORS_AT_ONCE", 20)
    assert checking.check(Analyzer(tiny("marian", dtype=torch.float32))).ok


def test_check_fails_where_maps_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = Analyzer(tiny("marian", dtype=torch.float32))
    honest = lens.analyze

    def wrong(*given: Any, **options: Any) -> Any:
        found = honest(*given, **options)
        found.decoder["XATTN-N"].mul_(1.001)
        return found

    monkeypatch.setattr(lens, "analyze", wrong)
    report = checking.check(lens)
    assert [(row.side, row.scope) for row in report.rows if not row.ok] == [("decoder", "XATTN-N")]
