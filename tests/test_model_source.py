"""Models by name with device, dtype and revision: passed on from every command, to workers, and kept with a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from normscope import Analyzer, NormscopeError, NormscopeWarning, cli, corpus
from normscope.corpus import ModelSource, engines
from normscope.model_loading import as_analyzer, load_source
from tests.helpers.toys import save_model, toy_tokenizer
from tests.helpers.zoo import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


def test_loading(folder: str) -> None:
    lens = load_source(
        ModelSource(folder, device="cpu", dtype="float64"), device="nonsense"
    )  # its own device comes first
    assert (lens.dtype, lens.loaded.base.dtype, lens.revision) == (torch.float64, torch.float64, None)
    assert load_source(ModelSource(folder)).dtype == torch.float32
    assert as_analyzer(lens) is lens
    assert as_analyzer(Path(folder)).model_name == folder
    with pytest.raises(NormscopeError, match="Cannot use the device 'nonsense'"):
        load_source(ModelSource(folder, device="nonsense"))
    with pytest.raises(NormscopeError, match="Cannot use the device 'nonsense'"):
        load_source(ModelSource(folder), device="nonsense")
    with pytest.raises(NormscopeError, match="dtype must be float32 or float64, not 'int8'"):
        ModelSource(folder, dtype="int8")
    with pytest.raises(NormscopeError, match="is a local folder"):
        ModelSource(folder, revision="main").check()


def test_a_device_is_for_the_workers(folder: str) -> None:
    """With Ray, the process that starts the run does not need the device."""
    source = ModelSource(folder, device="nonsense", dtype="float64")
    assert as_analyzer(source, "ray").dtype == torch.float64
    with pytest.raises(NormscopeError, match="nonsense"):
        as_analyzer(source, "local")


def test_a_revision_reaches_every_file(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for auto in (transformers.AutoConfig, transformers.AutoModel, transformers.AutoTokenizer):

        def record(*given: Any, _plain: Any = auto.from_pretrained, **options: Any) -> Any:
            asked.append(options.get("revision"))
            return _plain(*given, **options)

        monkeypatch.setattr(auto, "from_pretrained", record)
    assert Analyzer.from_pretrained(folder, revision="v1").revision == "v1"
    assert len(asked) >= 3  # config, weights, tokenizer
    assert set(asked) == {"v1"}
    asked.clear()
    assert Analyzer.from_pretrained(folder).revision is None
    assert set(asked) == {None}


def test_a_run_keeps_dtype_and_revision(folder: str, tmp_path: Path) -> None:
    data, out = tmp_path / "data.txt", tmp_path / "run"
    data.write_text("a cat\nthe dog\n")
    corpus.run(data, ModelSource(folder, device="cpu"), out, limit=2)
    path = out / "manifest.json"
    assert "revision" not in json.loads(path.read_text())["model"]  # as in runs of earlier versions, which resume
    assert corpus.run(data, folder, out, limit=2).computed == 0
    with pytest.raises(NormscopeError, match=r"model\.dtype: was 'float32', is 'float64'"):
        corpus.run(data, ModelSource(folder, dtype="float64"), out, limit=2)
    lens = Analyzer.from_pretrained(folder, revision="v1")
    with pytest.raises(NormscopeError, match=r"model\.revision: was None, is 'v1'"):
        corpus.run(data, lens, out, limit=2)
    corpus.run(data, lens, tmp_path / "v1", limit=2)
    assert corpus.open(tmp_path / "v1").manifest["model"]["revision"] == "v1"
    with pytest.raises(NormscopeError, match=r"model\.revision: was 'v1', is None"):
        corpus.run(data, folder, tmp_path / "v1", limit=2)


def test_worker_payload(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data.txt"
    data.write_text("a cat\n")
    sent: list[Any] = []

    def on_ray(load: Any, *given: Any) -> Any:
        sent.append(load)
        return iter(())

    monkeypatch.setattr(engines, "compute_with_ray", on_ray)
    source = ModelSource(folder, device="cpu", dtype="float64")
    corpus.run(data, source, tmp_path / "run", engine="ray")
    assert (sent[0].func, sent[0].args) == (load_source, (source,))
    with pytest.raises(NormscopeError, match="give its name or path"):
        corpus.run(data, load_source(source), tmp_path / "run", engine="ray")


def test_no_derivation_on_request(tmp_path: Path) -> None:
    folder = str(tmp_path)
    tiny_model("codegen").save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    with pytest.warns(NormscopeWarning, match="no family for CodeGen"):
        assert Analyzer.from_pretrained(folder).family.derived
    with pytest.raises(NormscopeError, match="'codegen', which normscope does not know"):
        Analyzer.from_pretrained(folder, derive=False)
    with pytest.raises(NormscopeError, match="'codegen', which normscope does not know"):
        load_source(ModelSource(folder, derive=False))
    refused = CliRunner().invoke(cli.app, ["check", folder, "--no-derive"])
    assert refused.exit_code == 1
    assert "does not know" in refused.stderr


class StoppedError(Exception):
    pass


GIVEN = ["--device", "cuda:1", "--dtype", "float64", "--revision", "v1"]


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("analyze x --model MODEL", "normscope.cli.loading.load_analyzer"),
        ("flow x --model MODEL", "normscope.cli.loading.load_analyzer"),
        ("demo --model MODEL -o OUT", "normscope.cli.loading.load_analyzer"),
        ("check MODEL", "normscope.cli.loading.load_analyzer"),
        ("serve --no-open --port 0 --model MODEL", "normscope.cli.loading.load_analyzer"),
        ("corpus DATA -o OUT --model MODEL", "normscope.corpus.runner.run"),
        ("paper ff DATA -o OUT --model MODEL", "normscope.papers.study.reproduce"),
        ("faithfulness DATA -o OUT --model MODEL", "normscope.papers.faithfulness.comparison.compare_methods"),
    ],
)
def test_every_command_passes_them_on(line: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data.txt"
    data.write_text("a cat\n")
    found: list[Any] = []

    def stop(*given: Any, **options: Any) -> Any:
        found.extend(one for one in given if isinstance(one, ModelSource))
        raise StoppedError

    monkeypatch.setattr(place, stop)
    words = line.replace("MODEL", "some/model").replace("DATA", str(data)).replace("OUT", str(tmp_path / "out")).split()
    result = CliRunner().invoke(cli.app, [*words, "--no-derive", *GIVEN])
    assert isinstance(result.exception, StoppedError), result.output
    assert found == [ModelSource("some/model", "cuda:1", "float64", "v1", derive=False)]


def test_a_command_line_that_is_refused_to_resume(folder: str, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("a cat\n")
    given = ["corpus", str(data), "--model", folder, "-o", str(tmp_path / "run")]
    assert CliRunner().invoke(cli.app, given).exit_code == 0
    result = CliRunner().invoke(cli.app, [*given, "--dtype", "float64"])
    assert result.exit_code == 1
    assert "--dtype: was 'float32', is 'float64'" in result.stderr


def test_the_command_of_a_report(folder: str) -> None:
    from normscope.reports.facts import model_arguments

    lens: Any = None
    assert model_arguments(ModelSource("a/b", "cuda", "float64", "v1"), lens) == [
        ("--model", "a/b"),
        ("--dtype", "float64"),
        ("--revision", "v1"),
    ]
    assert model_arguments("a/b", lens) == [("--model", "a/b"), ("--dtype", None), ("--revision", None)]
