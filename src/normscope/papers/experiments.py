"""A paper as a list of experiments, and how they are run: on the corpus engine, then into one report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from normscope.corpus.items import Entry, Fault
from normscope.corpus.measuring import measures_of
from normscope.corpus.readers import read
from normscope.corpus.running import run as corpus_run
from normscope.corpus.store import open as open_run
from normscope.corpus.store import read_manifest
from normscope.errors import NormscopeError
from normscope.model_source import ModelSource, analyzer_of
from normscope.papers import facts, published
from normscope.papers.readings import describe, parse
from normscope.papers.report import Report, Section, write
from normscope.papers.verify import compare

if TYPE_CHECKING:
    from normscope.analyzer import Analyzer
    from normscope.corpus.store import Run

PAPERS = {  # name -> module; the last two are studies of our own
    "emnlp2020": "emnlp2020",
    "emnlp2021": "emnlp2021",
    "ff": "feed_forward",
    "layers": "across_layers",
    "shapley": "shapley",
}
NO_DATA = "It reads a corpus: give DATA."
PEEK = 1000  # entries that tell which annotations a corpus has
Progress = Callable[[str, int, int], None]  # what is counted (the name of a run, or "sections"), done, in all


class StoppedError(NormscopeError):
    """A corpus run was interrupted; the same call goes on from there."""


@dataclass(frozen=True)
class RunPlan:
    """A corpus run that an experiment reads. Plans of one name are merged: the union of measures, scopes and maps."""

    name: str  # its folder under DIR/runs
    measures: tuple[str, ...]
    scopes: tuple[str, ...] | None = None  # names or aliases; None: all
    maps: tuple[str, ...] = ()  # scopes whose maps are kept
    masked: bool = False  # 12 % masked where the model has a mask token (readings.mask_seed), else as it is


@dataclass(frozen=True)
class Setting:
    """What was asked for: the model, the data and how to read the paper."""

    lens: Analyzer
    data: str  # "" where there is none
    format: str | None
    reader: Mapping[str, Any]
    readings: Any  # the paper's dataclass of readings
    frequencies: Path | None  # a file of word frequencies
    example: str | None  # a text to draw maps of
    entries: tuple[Entry, ...]  # the first readable ones, at most PEEK
    limit: int | None

    @property
    def has_entities(self) -> bool:
        """Whether entries have named entities."""
        return any(entry.entities for entry in self.entries)

    @property
    def has_target(self) -> bool:
        """Whether entries have another side, as parallel text has."""
        return any(entry.target is not None for entry in self.entries)

    @property
    def has_links(self) -> bool:
        """Whether words are linked to words of the other side."""
        return any(entry.possible for entry in self.entries)

    @property
    def mask_seed(self) -> int | None:
        """The seed of masked runs; None where they cannot mask, as the model has two sides or no mask token."""
        if self.lens.two_sided or getattr(self.lens.tokenizer, "mask_token_id", None) is None:
            return None
        return int(getattr(self.readings, "mask_seed", 0))

    @property
    def masks(self) -> bool:
        """Whether the model knows masked tokens: a causal one never saw any, though its tokenizer may have them."""
        return self.mask_seed is not None and self.lens.stacks[0].side == "encoder"

    def read(self) -> Iterator[Entry | Fault]:
        """The entries of the data once more, at most `limit`."""
        return _read(self.lens, self.data, self.format, self.reader, self.limit)


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper."""

    name: str  # as on the command line: "dispersion"
    title: str
    missing: Callable[[Setting], str | None]  # why it cannot run here (the annotation or part that is missing), or None
    runs: Callable[[Setting], tuple[RunPlan, ...]]  # the corpus runs that it reads; () where it needs no data
    section: Callable[[Setting, Mapping[str, Run]], Section]  # the runs by name
    needs: str = "a corpus"  # for people who ask what there is: "sentences with named entities"


@dataclass(frozen=True)
class Paper:
    """A paper, its readings and its experiments in the paper's order."""

    name: str  # as on the command line: "emnlp2020"
    title: str
    citation: str
    readings: type[Any]  # a frozen dataclass whose fields are made by `reading`; `mask_seed` where runs are masked
    experiments: tuple[Experiment, ...]


def find(name: str) -> Paper:
    """A paper by its name on the command line."""
    if name not in PAPERS:
        raise NormscopeError(f"There is no paper {name!r}. Known: {', '.join(PAPERS)}.")
    found: Paper = import_module(f"normscope.papers.{PAPERS[name]}").PAPER
    return found


def reproduce(
    paper: Paper,
    model: str | Path | ModelSource | Analyzer,
    data: str | Path | None,
    out: str | Path,
    *,
    format: str | None = None,
    reader: Mapping[str, Any] | None = None,
    readings: Sequence[str] = (),
    experiments: Sequence[str] | None = None,
    frequencies: str | Path | None = None,
    example: str | None = None,
    limit: int | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: int = 2,
    threads: int = 1,
    address: str | None = None,
    batch_size: int = 16,
    verify: bool = False,
    progress: Progress | None = None,
) -> tuple[Report, Path]:
    """Run a paper's experiments on a model and a corpus, and write the report into the folder `out`.

    All experiments that can run here are run, or those of the given names. Their corpus runs are kept in `out`/runs:
    the same call goes on where it stopped, and what is done is not done again. `readings` are given as "key=value".
    `data` may be None where no experiment needs a corpus. With `verify` the model must be one of the paper's.
    """
    for package, extra in (("matplotlib", "plot"), ("polars", "corpus")):  # now, not after hours of computing
        if find_spec(package) is None:
            raise NormscopeError(f"Reports need {package}: pip install 'normscope[{extra}]'.")
    chosen = _named(paper, experiments)
    using = parse(paper.readings, readings)
    if engine == "ray" and not isinstance(model, str | Path | ModelSource):
        raise NormscopeError("The engine 'ray' loads the model in each worker: give its name or path.")
    lens = analyzer_of(model, engine)
    if verify and published.model_key(lens) not in published.models(paper.name):
        known = ", ".join(published.models(paper.name)) or "none"
        raise NormscopeError(f"{lens.model_name} is not one of the models with published numbers: {known}.")
    source = "" if data is None else str(data)
    setting = Setting(
        lens,
        source,
        format,
        dict(reader or {}),
        using,
        None if frequencies is None else Path(frequencies),
        example,
        _first_entries(_read(lens, source, format, reader or {}, limit)) if source else (),
        limit,
    )
    able, skipped = _able(paper, chosen, setting, strict=experiments is not None)
    plans = merge([plan for experiment in able for plan in experiment.runs(setting)])
    runs: dict[str, Run] = {}
    for plan in plans:
        wanted, folder = _as_before(plan, Path(out) / "runs")
        runs[plan.name] = _run(
            setting,
            wanted,
            folder,
            lens if engine == "local" else model,
            None if progress is None else partial(progress, plan.name),
            engine=engine,
            workers=workers,
            threads=threads,
            address=address,
            batch_size=batch_size,
        )
    sections = []
    for number, experiment in enumerate(able, 1):
        sections.append(experiment.section(setting, {p.name: runs[p.name] for p in experiment.runs(setting)}))
        if progress is not None:
            progress("sections", number, len(able))
    lengths = facts.lengths(next(iter(runs.values()))) if runs else []
    key = published.model_key(lens)
    numbers = {name: value for section in sections for name, value in section.numbers.items()}
    figures = published.figures(paper.name, key, published.data_key(lengths, key))
    asked = facts.command_line(paper.name, model, setting, out, readings, experiments, batch_size)
    report = Report(
        paper.name,
        paper.title,
        paper.citation,
        facts.facts(setting, plans, runs, lengths),
        describe(using),
        tuple(sections),
        tuple(skipped),
        asked,
        compare(numbers, figures),
    )
    path = write(report, out)
    if verify and not report.checks:
        known = "; ".join(published.CORPORA[name].name for name in published.corpora(paper.name, key or ""))
        raise NormscopeError(
            f"None of these numbers was published for {key} on this data. There are some for: {known}."
        )
    return report, path


def merge(plans: Iterable[RunPlan]) -> list[RunPlan]:
    """One plan for each name: the union of measures, scopes and maps. Whether they mask must agree."""
    merged: dict[str, RunPlan] = {}
    for plan in plans:
        scopes = _scopes(plan)
        before = merged.get(plan.name)
        if before is None:
            merged[plan.name] = replace(plan, scopes=scopes)
            continue
        if before.masked != plan.masked:
            raise NormscopeError(f"Two experiments disagree whether the run {plan.name!r} masks tokens.")
        merged[plan.name] = RunPlan(
            plan.name,
            _union(before.measures, plan.measures),
            None if before.scopes is None or scopes is None else _union(before.scopes, scopes),
            _union(before.maps, plan.maps),
            plan.masked,
        )
    return list(merged.values())


def _scopes(plan: RunPlan) -> tuple[str, ...] | None:
    """The scopes that a plan computes: those it names with those of its measures, or None for all."""
    measures = measures_of(plan.measures)
    if plan.scopes is None and any(measure.scopes is None for measure in measures):
        return None
    return _union(plan.scopes or (), (scope for measure in measures for scope in measure.scopes or ()), plan.maps)


def _union(*some: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain(*some)))


def _as_before(plan: RunPlan, runs: Path) -> tuple[RunPlan, Path]:
    """The run that is there already and has all that is wanted now, so that nothing is done again; else a new one,
    NAME-2 and so on where the earlier ones were made for fewer experiments."""
    for number in count(1):
        folder = runs / (plan.name if number == 1 else f"{plan.name}-{number}")
        if not (folder / "manifest.json").is_file():
            return plan, folder
        before = read_manifest(folder)["options"]
        measures, scopes, maps = before["measures"], before["scopes"], before["maps"]
        has_scopes = scopes is None or (plan.scopes is not None and set(plan.scopes) <= set(scopes))
        if has_scopes and set(plan.measures) <= set(measures) and set(plan.maps) <= set(maps):
            kept = None if scopes is None else tuple(scopes)
            return replace(plan, measures=tuple(measures), scopes=kept, maps=tuple(maps)), folder
    raise AssertionError("unreachable")


def _run(
    setting: Setting,
    plan: RunPlan,
    folder: Path,
    model: str | Path | ModelSource | Analyzer,
    progress: Callable[[int, int], None] | None,
    **options: Any,
) -> Run:
    summary = corpus_run(
        setting.data,
        model,
        folder,
        measures=plan.measures,
        maps=plan.maps,
        scopes=plan.scopes,
        mask_seed=setting.mask_seed if plan.masked else None,
        format=setting.format,
        reader=setting.reader,
        limit=setting.limit,
        progress=progress,
        **options,
    )
    if not summary.finished:
        raise StoppedError(f"Stopped in the run {plan.name!r} after {summary.done} of {summary.entries} entries.")
    run = open_run(folder)
    if summary.faults == summary.entries:
        first = run.scan("errors").first().collect().row(0, named=True)
        raise NormscopeError(f"No entry could be analysed. The first: {first['id']}: {first['reason']}")
    return run


def _named(paper: Paper, names: Sequence[str] | None) -> list[Experiment]:
    known = {experiment.name: experiment for experiment in paper.experiments}
    for name in names or ():
        if name not in known:
            raise NormscopeError(f"{paper.name} has no experiment {name!r}. It has: {', '.join(known)}.")
    return [experiment for experiment in paper.experiments if names is None or experiment.name in names]


def _able(
    paper: Paper, chosen: Sequence[Experiment], setting: Setting, strict: bool
) -> tuple[list[Experiment], list[tuple[str, str]]]:
    """The experiments that can run here, and the titles of the others with the reason. `strict`: all must."""
    able, skipped = [], []
    for experiment in chosen:
        why = NO_DATA if not setting.data and experiment.runs(setting) else experiment.missing(setting)
        if why is None:
            able.append(experiment)
        elif strict:
            raise NormscopeError(f"The experiment {experiment.name!r} cannot run here: {why}")
        else:
            skipped.append((experiment.title, why))
    if not able:
        reasons = " ".join(dict.fromkeys(f"{title}: {why}" for title, why in skipped))
        raise NormscopeError(f"No experiment of {paper.name} can run here. {reasons}")
    return able, skipped


def _read(
    lens: Analyzer, data: str, format: str | None, reader: Mapping[str, Any], limit: int | None
) -> Iterator[Entry | Fault]:
    given = dict(reader)
    if format == "pairs":
        given.setdefault("tokenizer", lens.tokenizer)
    return islice(read(data, format, **given), limit)


def _first_entries(entries: Iterable[Entry | Fault]) -> tuple[Entry, ...]:
    return tuple(islice((entry for entry in entries if isinstance(entry, Entry)), PEEK))
