"""What a resumed run must share with the run in its folder; the error names whatever changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import normscope
from normscope import Analyzer, NormscopeError, corpus
from normscope.corpus import measure_registry, run_manifest
from normscope.corpus.fingerprints import function_fingerprint
from normscope.papers.feed_forward.measures import measure_ff_norms
from normscope.tracing import model_state
from tests.helpers.corpus_runs import table_bytes, toy_corpus, toy_lines, toy_run
from tests.helpers.toys import save_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", max_position_embeddings=24)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return toy_corpus(tmp_path)


@pytest.fixture
def own_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus.measures()
    monkeypatch.setattr(measure_registry, "_measures", dict(measure_registry._measures))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def swap_vocabulary(model: Path) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["cat"], vocabulary["dog"] = vocabulary["dog"], vocabulary["cat"]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: edit_json(model / "config.json", num_attention_heads=1),
            r"config\.num_attention_heads: was 4, is 1",
        ),
        (lambda model: edit_json(model / "config.json", layer_norm_eps=0.1), r"config\.layer_norm_eps: was"),
        (
            lambda model: edit_json(model / "config.json", hidden_act="relu"),
            r"config\.hidden_act: was 'gelu', is 'relu'",
        ),
        (swap_vocabulary, r"model\.tokenizer"),
    ],
    ids=["heads", "eps", "activation", "tokenizer"],
)
def test_another_model_is_noticed(data: Path, model: Path, tmp_path: Path, change: Any, said: str) -> None:
    toy_run(data, model, tmp_path / "run", limit=4)
    before = table_bytes(tmp_path / "run")
    change(model)
    with pytest.raises(NormscopeError, match=said):
        toy_run(data, model, tmp_path / "run", limit=8)
    assert table_bytes(tmp_path / "run") == before


def test_a_module_exchanged_in_memory_is_noticed(data: Path, model: Path, tmp_path: Path) -> None:
    toy_run(data, Analyzer.from_pretrained(model), tmp_path / "run")
    lens = Analyzer.from_pretrained(model)
    for module in lens.model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 0.5
    with pytest.raises(NormscopeError, match=r"model\.structure"):
        toy_run(data, lens, tmp_path / "run")


def test_the_same_model_from_another_folder_is_the_same(data: Path, model: Path, tmp_path: Path) -> None:
    toy_run(data, model, tmp_path / "run")
    moved = model.rename(tmp_path / "moved")
    again = toy_run(data, moved, tmp_path / "run")
    assert (again.computed, again.finished) == (0, True)


@pytest.mark.parametrize("package", ["normscope", "torch", "transformers"])
def test_other_versions_are_noticed(
    data: Path, model: Path, tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_run(data, model, tmp_path / "run")
    real = run_manifest.package_versions()
    major, minor, *_ = real[package].split(".")

    def pretend(version: str) -> None:
        monkeypatch.setattr(run_manifest, "package_versions", lambda: real | {package: version})

    pretend(f"{major}.{minor}.99")
    with pytest.raises(NormscopeError, match=rf"other versions: versions\.{package}: was .* is '{major}\.{minor}\.99'"):
        toy_run(data, model, tmp_path / "run")
    assert toy_run(data, model, tmp_path / "run", allow_versions=True).finished
    assert corpus.open(tmp_path / "run").manifest["other_versions"] == [run_manifest.package_versions()]
    assert toy_run(data, model, tmp_path / "run", allow_versions=True).computed == 0
    pretend(f"{int(major) + 1}.0.0")
    with pytest.raises(NormscopeError, match=rf"versions\.{package}"):
        toy_run(data, model, tmp_path / "run", allow_versions=True)


def test_versions_are_those_of_the_packages() -> None:
    found = run_manifest.package_versions()
    assert found == {
        "normscope": normscope.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def alignment_files(folder: Path, source: str = "the cat\na dog\n") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "gold.talp").write_text("1-1 2-2\n1-1 2p2\n")
    (folder / "source.txt").write_text(source)
    (folder / "target.txt").write_text("le chat\nun chien\n")
    return folder / "gold.talp"


def test_a_side_file_is_noticed(model: Path, tmp_path: Path) -> None:
    links = alignment_files(tmp_path / "links")
    reader = {name: str(tmp_path / "links" / f"{name}.txt") for name in ("source", "target")}
    toy_run(links, model, tmp_path / "run", reader=reader)
    (tmp_path / "links" / "source.txt").write_text("the bird\na dog\n")
    with pytest.raises(NormscopeError, match=r"data\.fingerprint.*the file source\.txt changed"):
        toy_run(links, model, tmp_path / "run", reader=reader)


def test_another_version_of_a_dataset_is_noticed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": line} for line in toy_lines(6)]
    package = SimpleNamespace(load_dataset=lambda *given, **named: iter(rows))
    monkeypatch.setitem(sys.modules, "datasets", package)
    toy_run("made/up", model, tmp_path / "run", format="huggingface")
    assert toy_run("made/up", model, tmp_path / "run", format="huggingface").computed == 0
    rows[3] = {"text": "another text"}
    with pytest.raises(NormscopeError, match=r"data\.fingerprint"):
        toy_run("made/up", model, tmp_path / "run", format="huggingface")


def test_the_same_data_by_another_path_is_the_same(data: Path, model: Path, tmp_path: Path) -> None:
    toy_run(data, model, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    moved = data.rename(tmp_path / "elsewhere" / data.name)
    again = toy_run(moved, model, tmp_path / "run", format="lines")
    assert (again.computed, again.finished) == (0, True)


def test_the_limit_can_be_raised(data: Path, model: Path, tmp_path: Path) -> None:
    first = toy_run(data, model, tmp_path / "run", limit=6)
    assert (first.entries, first.computed) == (6, 6)
    second = toy_run(data, model, tmp_path / "run", limit=9)
    assert (second.entries, second.computed, second.finished) == (9, 5, True)  # the half shard and one more
    third = toy_run(data, model, tmp_path / "run")
    assert (third.entries, third.finished) == (10, True)
    toy_run(data, model, tmp_path / "whole")
    assert table_bytes(tmp_path / "run") == table_bytes(tmp_path / "whole")
    with pytest.raises(NormscopeError, match=r"data\.limit: was None, is 5"):
        toy_run(data, model, tmp_path / "run", limit=5)


def test_a_raised_limit_does_not_hide_other_data(data: Path, model: Path, tmp_path: Path) -> None:
    toy_run(data, model, tmp_path / "run", limit=6)
    lines = data.read_text().splitlines()
    data.write_text("\n".join(["a cat", *lines[1:]]) + "\n")
    with pytest.raises(NormscopeError, match=r"data\.fingerprint.*data\.txt changed"):
        toy_run(data, model, tmp_path / "run", limit=9)


def register(value: float, helper: Callable[[float], float]) -> None:
    @normscope.register_measure("own", scopes=["layer"])
    def own(analysis: Any) -> dict[str, Any]:
        return {"value": [helper(value)]}


def test_another_body_of_a_measure_is_noticed(own_measures: None, data: Path, model: Path, tmp_path: Path) -> None:
    def one(x: float) -> float:
        return x

    def two(x: float) -> float:
        return x * 2

    register(1.0, one)
    toy_run(data, model, tmp_path / "run", measures=["own"])
    register(1.0, one)
    assert toy_run(data, model, tmp_path / "run", measures=["own"]).computed == 0
    for value, helper in ((1.0, two), (2.0, one)):
        register(value, helper)
        with pytest.raises(NormscopeError, match=r"code\.own: was 'python3"):
            toy_run(data, model, tmp_path / "run", measures=["own"])
    assert corpus.open(tmp_path / "run").scan("own").select(pl.col("value").max()).collect().item() == 1.0


def compiled(source: str, name: str = "measure") -> Any:
    scope: dict[str, Any] = {"__name__": "made_up"}
    exec(source, scope)
    return scope[name]


def test_a_fingerprint_of_code_does_not_see_the_state_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    measures = [measure_ff_norms, compiled("def measure(x): return x\n")]
    before = [function_fingerprint(measure) for measure in measures]
    monkeypatch.setitem(model_state._swapped, 1, ["eager", 1])
    monkeypatch.setitem(model_state._stand_ins, "eager", "another")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "another", len)
    assert [function_fingerprint(measure) for measure in measures] == before


def test_what_a_fingerprint_of_code_sees() -> None:
    base = "LIMIT = {3, 1, 2}\ndef helper(x): return x + 1\ndef measure(x):\n    return helper(x) in LIMIT\n"
    same = [
        base.replace("return helper", "# a comment\n    return helper"),
        base.replace("def measure(x):\n", "def measure(x):\n    'documented'\n"),
        base.replace("{3, 1, 2}", "{2, 3, 1}"),
        base + "OTHER = 5\n",
    ]
    other = [
        base.replace("x + 1", "x + 2"),
        base.replace("{3, 1, 2}", "{3, 1, 4}"),
        base.replace("in LIMIT", "not in LIMIT"),
        base.replace("measure(x)", "measure(x=5)"),
        base.replace("return helper(x) in LIMIT", "return any(helper(y) in LIMIT for y in [x])"),
    ]
    digest = function_fingerprint(compiled(base))
    assert [function_fingerprint(compiled(source)) == digest for source in same] == [True] * len(same)
    assert [function_fingerprint(compiled(source)) == digest for source in other] == [False] * len(other)


def test_the_code_of_a_helper_module_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for body in ("x + 1", "x + 2", "x + 1"):
        (tmp_path / "made_up_helpers.py").write_text(f"def helper(x):\n    return {body}\n")
        for name in ("made_up_helpers",):
            sys.modules.pop(name, None)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        digests.append(
            function_fingerprint(compiled("import made_up_helpers\ndef measure(x): return made_up_helpers.helper(x)\n"))
        )
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("folder", ["site-packages", "own"])
def test_modules_that_contain_one_another(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does; of a package on Python's path, wherever it is installed, only the names count."""
    package = tmp_path / folder / "made_up_package"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    digests = []
    for body in ("x + 1", "x + 2"):
        (package / "__init__.py").write_text("from made_up_package import inner\n")
        (package / "inner.py").write_text(f"import made_up_package as inner\ndef helper(x):\n    return {body}\n")
        for name in ("made_up_package", "made_up_package.inner"):
            sys.modules.pop(name, None)
        source = "import made_up_package\ndef measure(x): return made_up_package.inner.inner.inner.helper(x)\n"
        digests.append(function_fingerprint(compiled(source)))
    assert (digests[0] == digests[1]) == (folder == "site-packages")
