"""Running a made-up paper: available experiments, merged runs that resume, the report, and the command."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

pytest.importorskip("matplotlib")

from normscope import Analyzer, NormscopeError, default_model
from normscope.cli import Commands, progress
from normscope.cli.paper import paper_command
from normscope.corpus import Run
from normscope.models.source import ModelSource
from normscope.papers import published, runs, several, study
from normscope.papers.readings import reading
from normscope.papers.runs import RunPlan, StoppedError, merge_run_plans
from normscope.papers.several import compare_models
from normscope.papers.study import PAPERS, Experiment, Paper, Setting, find_paper, reproduce
from normscope.reports import facts
from normscope.reports.report import Claim, Report, Section, Table
from tests.helpers.toys import WORDS as VOCABULARY
from tests.helpers.toys import save_model

WORDS = [word for word in VOCABULARY if word.isalpha()]


@dataclass(frozen=True)
class Readings:
    mask_seed: int = reading(0, "seed of the draw")
    percent: bool = reading(True, "whether ratios are percents")


def mixing(setting: Setting, runs: Mapping[str, Run]) -> Section:
    mean = runs["masked"].scan("mixing").select(pl.col("mixing").mean()).collect().item()
    mean *= 100 if setting.readings.percent else 1
    rows = ((scope_count(runs["masked"]), mean),)
    return Section(
        "mixing",
        "Mixing",
        parts=(Table("mixing", "Table 1", ("scopes", "mean"), rows),),
        claims=(Claim("Tokens mix", mean > 0, f"{mean:.1f}"),),
        numbers={"mixing.ATTNRESLN-N.mean": mean},
    )


def scope_count(run: Run) -> int:
    return int(run.scan("mixing").select(pl.col("scope").n_unique()).collect().item())


def similar(setting: Setting, runs: Mapping[str, Run]) -> Section:
    assert set(runs) == {"masked", "plain"}  # its own, not those of others
    rows = len(runs["masked"].scan("similarity").collect()) + len(runs["plain"].scan("value_norms").collect())
    return Section("similar", "Similarity", numbers={"rows": rows})


def weights_only(setting: Setting, runs: Mapping[str, Run]) -> Section:
    assert not runs
    return Section("weights", "Weights alone", numbers={"expansion.code.mean": 1.858})


MADE_UP = Paper(
    "emnlp2021",
    "A paper that nobody wrote",
    "Nobody 2021",
    Readings,
    (
        Experiment(
            "mixing",
            "Mixing ratio",
            mixing,
            lambda setting: (RunPlan("masked", ("mixing",), ("attention-block",), masked=True),),
        ),
        Experiment(
            "similar",
            "Similarity of scopes",
            similar,
            lambda setting: (
                RunPlan("masked", ("similarity",), ("attention", "layer"), ("layer",), masked=True),
                RunPlan("plain", ("value_norms",)),
            ),
        ),
        Experiment(
            "entities",
            "Named entities",
            lambda setting, runs: Section("entities", "Named entities"),
            lambda setting: (RunPlan("plain", ("value_norms",)),),
            lambda setting: None if setting.has_entities else "The corpus has no named entities.",
            "words with named entities",
        ),
        Experiment("weights", "Weights alone", weights_only, needs="no data"),
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, with the name of one of the papers' models but another shape."""
    return save_model(tmp_path_factory.mktemp("model") / "bert-tiny", max_position_embeddings=24)


@pytest.fixture(scope="module")
def papers_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the name and the shape of one of the papers' models."""
    return save_model(tmp_path_factory.mktemp("papers") / "bert-tiny", hidden_size=128)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    generator = random.Random(0)
    path = tmp_path / "data.txt"
    path.write_text("".join(" ".join(generator.choices(WORDS, k=generator.randint(1, 12))) + "\n" for _ in range(12)))
    return path


def made(data: Path | None, folder: Path | Analyzer, out: Path, **options: Any) -> Report:
    report, path = reproduce(MADE_UP, folder, data, out, **options)
    assert path == out / "report.html"
    assert path.is_file()
    return report


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*") if path.is_file()}


def test_all_that_can_run_is_run(data: Path, folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = made(data, folder, tmp_path / "out", progress=lambda *what: seen.append(what))
    assert [section.name for section in report.sections] == ["mixing", "similar", "weights"]
    assert report.skipped == (("Named entities", "The corpus has no named entities."),)
    assert report.readings[0] == ("mask_seed", "0", "seed of the draw (default 0)", False)
    assert report.checks == ()  # not one of the papers' models
    known = dict(report.facts)
    assert known["layers"] == "BERT: 2 layers with 4 heads, width 24"
    assert known["data"] == str(data)
    assert known["sequences"].startswith("12 with ")
    assert "12 % of the tokens masked (seed 0); 0 of 12 entries could not" in known["run \u201cmasked\u201d"]
    assert known["run \u201cplain\u201d"].startswith("no tokens masked")
    assert ("masked", 12, 12) in seen
    assert ("sections", 3, 3) in seen
    assert (tmp_path / "out/tables/mixing.csv").is_file()


def test_runs_of_one_name_are_one_run(data: Path, folder: Path, tmp_path: Path) -> None:
    report = made(data, folder, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out/runs").iterdir()) == ["masked", "plain"]
    run = Run(tmp_path / "out/runs/masked")
    assert set(run.tables) == {"items", "maps", "mixing", "similarity"}
    assert run.manifest["options"]["mask_seed"] == 0
    assert run.manifest["options"]["scopes"] == ["attention-block", "attention", "layer"]
    (table,) = report.sections[0].parts
    assert isinstance(table, Table)
    assert table.rows[0][0] == 3  # the scopes of the other experiment are there too
    assert Run(tmp_path / "out/runs/plain").manifest["options"]["mask_seed"] is None


def test_what_is_done_is_not_done_again(data: Path, folder: Path, tmp_path: Path) -> None:
    first = made(data, folder, tmp_path / "out")
    before, page = times(tmp_path / "out"), (tmp_path / "out/report.html").read_bytes()
    assert made(data, folder, tmp_path / "out").numbers == first.numbers
    assert times(tmp_path / "out") == before
    assert (tmp_path / "out/report.html").read_bytes() == page
    # Neither a part of the finished experiments nor another reading of the same tables needs a new run.
    again = made(data, folder, tmp_path / "out", experiments=["mixing"], readings=["percent=false"])
    assert times(tmp_path / "out") == before
    assert again.numbers["mixing.ATTNRESLN-N.mean"] == pytest.approx(first.numbers["mixing.ATTNRESLN-N.mean"] / 100)


def test_more_experiments_in_the_same_folder_have_a_run_of_their_own(data: Path, folder: Path, tmp_path: Path) -> None:
    made(data, folder, tmp_path / "out", experiments=["mixing"])
    first = times(tmp_path / "out")
    everything = made(data, folder, tmp_path / "out")
    assert (tmp_path / "out/runs/masked-2/manifest.json").is_file()
    both = times(tmp_path / "out")
    assert first.items() <= both.items()
    assert made(data, folder, tmp_path / "out").numbers == everything.numbers
    assert made(data, folder, tmp_path / "out", experiments=["mixing"]).sections[0].name == "mixing"
    assert times(tmp_path / "out") == both


def test_a_folder_of_other_options_is_refused(data: Path, folder: Path, tmp_path: Path) -> None:
    made(data, folder, tmp_path / "out", experiments=["mixing"])
    with pytest.raises(NormscopeError, match="mask_seed: was 0, is 3"):
        made(data, folder, tmp_path / "out", experiments=["mixing"], readings=["mask_seed=3"])
    with pytest.raises(NormscopeError, match="limit: was None, is 5"):
        made(data, folder, tmp_path / "out", experiments=["mixing"], limit=5)


def test_chosen_experiments_must_run(data: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="'entities' cannot run here: The corpus has no named entities"):
        made(data, folder, tmp_path / "out", experiments=["weights", "entities"])
    with pytest.raises(NormscopeError, match="no experiment 'mix'"):
        made(data, folder, tmp_path / "out", experiments=["mix"])
    with pytest.raises(NormscopeError, match="Unknown reading 'percant'"):
        made(data, folder, tmp_path / "out", readings=["percant=true"])
    assert not (tmp_path / "out").exists()


def test_entities_are_seen(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.conll"
    path.write_text("the O\ncat O\n\nthe O\nbird B-PER\n\n")
    report = made(path, folder, tmp_path / "out", experiments=["entities"])
    assert report.sections[0].name == "entities"
    without = tmp_path / "none.conll"
    without.write_text("the O\ncat O\n\n")
    with pytest.raises(NormscopeError, match="no named entities"):
        made(without, folder, tmp_path / "other", experiments=["entities"])
    with pytest.raises(NormscopeError, match="no named entities"):  # beyond the limit
        made(path, folder, tmp_path / "third", experiments=["entities"], limit=1)


def test_without_data(folder: Path, tmp_path: Path) -> None:
    report = made(None, folder, tmp_path / "out")
    assert [section.name for section in report.sections] == ["weights"]
    assert [why for _, why in report.skipped] == [study.NO_DATA] * 3
    assert not (tmp_path / "out/runs").exists()
    with pytest.raises(NormscopeError, match="'mixing' cannot run here: This experiment needs a corpus: pass DATA"):
        made(None, folder, tmp_path / "out", experiments=["mixing"])


def test_none_can_run(data: Path, folder: Path, tmp_path: Path) -> None:
    alone = Paper("none", "", "", Readings, (MADE_UP.experiments[2],))
    with pytest.raises(NormscopeError, match="Named entities: The corpus has no"):
        reproduce(alone, folder, data, tmp_path / "out")


def test_models_without_a_mask_token_are_not_masked(data: Path, folder: Path, tmp_path: Path) -> None:
    lens = Analyzer.from_pretrained(folder)
    lens.tokenizer.mask_token = None
    report = made(data, lens, tmp_path / "out", experiments=["mixing"])
    assert dict(report.facts)["run \u201cmasked\u201d"].startswith("no tokens masked (the model has no mask token)")
    assert Run(tmp_path / "out/runs/masked").manifest["options"]["mask_seed"] is None


def test_only_the_first_entries(data: Path, folder: Path, tmp_path: Path) -> None:
    report = made(data, folder, tmp_path / "out", experiments=["mixing"], limit=5)
    assert "(only the first 5 entries)" in dict(report.facts)["sequences"]
    assert len(Run(tmp_path / "out/runs/masked").scan("items").collect()) == 5


def test_entries_that_cannot_be_analysed(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("the cat sat\n" + "the " * 40 + "\n")
    report = made(path, folder, tmp_path / "out", experiments=["mixing"])
    assert "1 of 2 entries could not be analysed" in dict(report.facts)["run \u201cmasked\u201d"]
    path.write_text("the " * 40 + "\n")
    with pytest.raises(NormscopeError, match=r"No entry could be analysed. First error: data.txt:1: .*24"):
        made(path, folder, tmp_path / "other", experiments=["mixing"])


def test_an_interrupted_run_goes_on(data: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = runs.corpus_run

    def stops(*given: Any, **options: Any) -> Any:
        summary = real(*given, **options)
        return type(summary)(summary.entries, 3, 0, 3, 1.0, summary.folder)

    monkeypatch.setattr(runs, "corpus_run", stops)
    with pytest.raises(StoppedError, match="Stopped in the run 'masked' after 3 of 12 entries"):
        made(data, folder, tmp_path / "out", experiments=["mixing"])
    assert not (tmp_path / "out/report.html").exists()
    monkeypatch.undo()
    made(data, folder, tmp_path / "out", experiments=["mixing"])


@pytest.mark.parametrize("package", ["matplotlib", "polars"])
def test_what_must_be_installed(folder: Path, tmp_path: Path, monkeypatch: Any, package: str) -> None:
    monkeypatch.setattr(study, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(NormscopeError, match=f"need {package}: pip install"):
        made(None, folder, tmp_path / "out")


def test_ray_needs_a_name(data: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="pass its name or path"):
        made(data, Analyzer.from_pretrained(folder), tmp_path / "out", engine="ray")


def test_published_numbers_of_the_papers_models(data: Path, papers_model: Path, tmp_path: Path) -> None:
    report = made(data, papers_model, tmp_path / "out")
    assert [(check.key, check.passed) for check in report.checks] == [("expansion.code.mean", True)]  # not this data
    with pytest.raises(NormscopeError, match="No numbers were published for bert-tiny on this data"):
        made(data, papers_model, tmp_path / "two", experiments=["mixing"], verify=True)


def test_published_numbers_of_data(data: Path, papers_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        published, "published_corpus_key", lambda lengths, model: "wikipedia" if len(lengths) == 12 else None
    )
    report = made(data, papers_model, tmp_path / "out", experiments=["mixing"])
    assert [(check.key, check.passed) for check in report.checks] == [("mixing.ATTNRESLN-N.mean", False)]


def test_verify_wants_a_model_of_the_paper(data: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="not one of the models with published numbers: bert-base, bert-large"):
        made(data, folder, tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()  # before anything is computed


class TestMerge:
    def test_scopes_of_measures_are_added(self) -> None:
        plans = [RunPlan("a", ("value_norms",)), RunPlan("a", ("similarity",), ("ff",), ("layer",))]
        assert merge_run_plans(plans) == [
            RunPlan("a", ("value_norms", "similarity"), ("attention", "ff", "layer"), ("layer",))
        ]

    def test_all_scopes_win(self) -> None:
        assert merge_run_plans([RunPlan("a", ("mixing",), ("ff",)), RunPlan("a", ("mixing",))])[0].scopes is None

    def test_runs_of_other_names_stay(self) -> None:
        plans = [RunPlan("a", ("mixing",)), RunPlan("b", ("mixing",), masked=True)]
        assert merge_run_plans(plans) == plans

    def test_masking_must_agree(self) -> None:
        with pytest.raises(NormscopeError, match="disagree on whether the run 'a' masks"):
            merge_run_plans([RunPlan("a", ("mixing",)), RunPlan("a", ("mixing",), masked=True)])

    def test_unknown_measures(self) -> None:
        with pytest.raises(NormscopeError, match="Unknown measure"):
            merge_run_plans([RunPlan("a", ("mixin",))])


def test_the_command_of_a_report() -> None:
    line = study.report_command(
        "ff",
        [("--model", "some/model"), ("--dtype", None)],
        "my data.txt",
        "out",
        format="pairs",
        reader={"header": True, "text": "a"},
        readings=["mask_seed=1"],
        experiments=["mixing"],
        frequencies="ranks.txt",
        limit=7,
        batch_size=4,
        beside=["other"],
    )
    assert line == (
        "normscope paper ff 'my data.txt' --model some/model --format pairs --reader header=true "
        "--reader text=a --experiment mixing --reading mask_seed=1 --frequencies ranks.txt --limit 7 --batch-size 4 "
        "--beside other --out out"
    )


def test_papers_are_found() -> None:
    with pytest.raises(NormscopeError, match="Known: emnlp2020, emnlp2021, ff, layers, shapley"):
        find_paper("acl")


# Several models.


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tiny model, with three layers."""
    return save_model(tmp_path_factory.mktemp("deeper") / "bert-deep", num_hidden_layers=3)


def test_several_models_in_one_report(data: Path, folder: Path, deeper: Path, tmp_path: Path) -> None:
    seen: set[str] = set()
    joint, page = compare_models(
        MADE_UP, [folder, deeper], data, tmp_path / "joint", progress=lambda name, *_: seen.add(name)
    )
    assert page == tmp_path / "joint/report.html"
    assert joint.labels == ("bert-tiny", "bert-deep")
    assert joint.folders == ("models/bert-tiny", "models/bert-deep")
    assert {"bert-tiny: masked", "bert-deep: sections"} <= seen
    for one in (folder, deeper):
        made(data, one, tmp_path / one.name)
        own = tmp_path / "joint/models" / one.name
        for file in ("numbers.csv", "claims.csv"):
            assert (own / file).read_bytes() == (tmp_path / one.name / file).read_bytes()
    assert joint.command == (
        f"normscope paper emnlp2021 {data} --model {folder} --model {deeper} --out {tmp_path / 'joint'}"
    )


def test_an_interrupted_joint_run_goes_on(
    data: Path, folder: Path, deeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = several.reproduce

    def stops(paper: Paper, model: Any, *given: Any, **options: Any) -> Any:
        if model == deeper:
            raise StoppedError("Stopped.")
        return real(paper, model, *given, **options)

    monkeypatch.setattr(several, "reproduce", stops)
    with pytest.raises(StoppedError):
        compare_models(MADE_UP, [folder, deeper], data, tmp_path, experiments=["mixing"])
    assert not (tmp_path / "report.html").exists()
    before = times(tmp_path / "models/bert-tiny")
    monkeypatch.undo()
    compare_models(MADE_UP, [folder, deeper], data, tmp_path, experiments=["mixing"])
    assert times(tmp_path / "models/bert-tiny") == before
    assert (tmp_path / "report.html").is_file()


def test_finished_reports_beside(data: Path, folder: Path, deeper: Path, tmp_path: Path) -> None:
    made(data, folder, tmp_path / "one", experiments=["mixing"])
    joint, _ = compare_models(
        MADE_UP, [deeper], data, tmp_path / "two", beside=[tmp_path / "one"], experiments=["mixing"]
    )
    assert joint.labels == ("bert-deep", "bert-tiny")
    assert joint.folders == ("models/bert-deep", "../one")
    assert joint.command.endswith(f"--experiment mixing --beside {tmp_path / 'one'} --out {tmp_path / 'two'}")
    # A joint report counts as the reports that it compares; no model is needed.
    again, _ = compare_models(MADE_UP, [], None, tmp_path / "three", beside=[tmp_path / "two"])
    assert again.labels == joint.labels
    assert again.folders == ("../two/models/bert-deep", "../one")
    assert [member.numbers for member in again.members] == [member.numbers for member in joint.members]


def test_what_cannot_be_compared(data: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="nothing to compare"):
        compare_models(MADE_UP, [], data, tmp_path / "out")
    with pytest.raises(NormscopeError, match="bert-tiny is given twice"):
        compare_models(MADE_UP, [folder, str(folder)], data, tmp_path / "out")
    made(None, folder, tmp_path / "one")
    other = Paper("ff", "", "", Readings, MADE_UP.experiments)
    with pytest.raises(NormscopeError, match="one is a report of 'emnlp2021', not of 'ff'"):
        compare_models(other, [folder], None, tmp_path / "out", beside=[tmp_path / "one"])
    assert not (tmp_path / "out").exists()


def test_folders_of_models_with_one_name(folder: Path, tmp_path: Path) -> None:
    names = several._folder_names([ModelSource("a/bert"), ModelSource("b/bert"), ModelSource("c/bert x?")])
    assert names == ["bert", "bert-2", "bert-x"]


@pytest.mark.parametrize(
    ("names", "whose", "value"),
    [
        (["google/multiberts-seed_0", "multiberts-seed_1"], "25 MultiBERTs", 17.5),
        (["multiberts", "x"], "BERT-base", 18.75),
    ],
)
def test_published_numbers_beside_models(names: list[str], whose: str, value: float) -> None:
    found, said = published.published_for_models("emnlp2021", names)
    assert said == whose
    assert found["mixing.ATTNRESLN-N.mean"] == value
    assert published.published_for_models("layers", names) == ({}, "")


# The command.


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setattr(study, "find_paper", lambda name: MADE_UP)
    app = typer.Typer(cls=Commands)
    app.command("paper")(paper_command)
    app.callback()(lambda: None)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: CliRunner().invoke(app, ["paper", *map(str, arguments)])


def test_command(run: Callable[..., Result], data: Path, folder: Path, tmp_path: Path) -> None:
    found = run("emnlp2021", data, "--model", folder, "-o", tmp_path / "out", "--reading", "percent=false")
    assert found.exit_code == 0, found.output
    assert f"{tmp_path / 'out/report.html'}: 3 experiments. 1 of 1 claims holds." in found.output
    assert "not run: Named entities: The corpus has no named entities." in found.stderr
    assert "--reading percent=false" in (tmp_path / "out/report.md").read_text()


def test_command_with_several_models(
    run: Callable[..., Result], data: Path, folder: Path, deeper: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    models = ("--model", folder, "-m", deeper, "--experiment", "weights")
    found = run("emnlp2021", *models, "-o", out)
    assert found.exit_code == 0, found.output
    assert f"{out / 'report.html'}: 2 reports." in found.output
    assert "bert-deep: 1 experiment." in found.output
    found = run("emnlp2021", "--beside", out, "-o", tmp_path / "again")  # without a model
    assert found.exit_code == 0, found.output
    assert "bert-tiny: 1 experiment." in found.output
    found = run("emnlp2021", "--beside", tmp_path, "-o", tmp_path / "again")
    assert found.exit_code == 1
    assert "Pass the folder of a finished report" in found.stderr


def test_command_lists(run: Callable[..., Result]) -> None:
    found = run("emnlp2021", "--list")
    assert found.exit_code == 0
    for text in ("A paper that nobody wrote", "words with named entities", "similar", "mask_seed", "seed of the draw"):
        assert text in found.output


def test_command_verifies(run: Callable[..., Result], papers_model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    arguments = ("emnlp2021", "--model", papers_model, "--experiment", "weights", "--verify", "-o", tmp_path / "out")
    found = run(*arguments)
    assert found.exit_code == 0, found.output
    assert "expansion.code.mean" in found.output
    assert "PASS" in found.output
    assert "1 of 1 within tolerance" in found.output
    monkeypatch.setattr(published, "published_numbers", lambda *given: {"expansion.code.mean": 2.0})
    found = run(*arguments)
    assert found.exit_code == 1
    assert "FAIL" in found.output


def test_command_refuses(run: Callable[..., Result], folder: Path, tmp_path: Path) -> None:
    assert "--out" in run("emnlp2021", "--model", folder).stderr
    assert run("acl2024").exit_code == 2
    found = run("emnlp2021", "--model", folder, "-o", tmp_path / "out", "--verify")
    assert found.exit_code == 1
    assert found.stderr.startswith("error: ")
    assert len(found.stderr.splitlines()) == 1


def test_command_says_when_it_was_stopped(
    run: Callable[..., Result], folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    def stopped(*given: Any, **options: Any) -> Any:
        raise StoppedError("Stopped.")

    monkeypatch.setattr(study, "reproduce", stopped)
    found = run("emnlp2021", "--model", folder, "-o", tmp_path / "out")
    assert found.exit_code == 130
    assert "Run the same command again to resume" in found.stderr


def test_bars_count_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "Console", lambda **options: Console(force_terminal=True, **options))
    with progress.progress_bars() as show:
        assert show is not None
        show("masked", 1, 3)
        show("masked", 3, 3)
        show("sections", 0, 2)


def test_names_of_papers() -> None:
    from normscope.cli.paper import PaperName

    assert list(PAPERS) == [name.value for name in PaperName]


def test_the_default_model_is_called_by_its_name() -> None:
    lens: Any = SimpleNamespace(model_name=str(default_model.find()))
    assert facts.fact_model_name(lens) == default_model.NAME
