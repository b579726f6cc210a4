"""A paper as a list of experiments, which are run on the corpus engine and written into one report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

from normscope.analyzer import Analyzer
from normscope.corpus.entries import Entry, Fault
from normscope.corpus.readers.formats import read
from normscope.corpus.store import Run
from normscope.errors import NormscopeError
from normscope.models.source import ModelSource
from normscope.papers import published
from normscope.papers.readings import describe_readings, parse_readings
from normscope.papers.runs import (
    EngineOptions,
    RunPlan,
    complete_run,
    find_covering_run,
    load_run_analyzer,
    merge_run_plans,
)
from normscope.papers.verify import verify_numbers
from normscope.reports import facts
from normscope.reports.report import Report, Section
from normscope.reports.write import write_report

PAPERS = {  # name -> module; the last two are our own studies
    "emnlp2020": "emnlp2020",
    "emnlp2021": "emnlp2021",
    "ff": "feed_forward",
    "layers": "across_layers",
    "shapley": "shapley",
}
NO_DATA = "This experiment needs a corpus: pass DATA."
BATCH_SIZE = 16
PEEK = 1000  # entries inspected for the annotations of a corpus
Progress = Callable[[str, int, int], None]  # name of a run, or "sections"; number done; total
Runs = Mapping[str, Run]  # finished corpus runs by name


@dataclass(frozen=True)
class Setting:
    """The model, the data and the readings of one reproduction."""

    lens: Analyzer
    data: str  # empty without a corpus
    format: str | None
    reader: Mapping[str, Any]
    readings: Any  # the paper's dataclass of readings
    frequencies: Path | None  # a file of word frequencies
    example: str | None  # a text whose maps are shown
    entries: tuple[Entry, ...]  # the first readable ones, at most PEEK
    limit: int | None

    @property
    def has_entities(self) -> bool:
        """Whether entries have named entities."""
        return any(entry.entities for entry in self.entries)

    @property
    def has_target(self) -> bool:
        """Whether entries have a target text, as in parallel corpora."""
        return any(entry.target is not None for entry in self.entries)

    @property
    def has_links(self) -> bool:
        """Whether entries have word alignments."""
        return any(entry.possible for entry in self.entries)

    @property
    def side(self) -> str:
        """The side that papers analyse: the first, which is the encoder of an encoder-decoder."""
        return self.lens.loaded.stacks[0].side

    @property
    def depth(self) -> int:
        """The number of layers of that side."""
        return self.lens.loaded.depths[0]

    @property
    def mask_seed(self) -> int | None:
        """The seed of masked runs; None if the model cannot mask (two sides, or no mask token)."""
        if self.lens.two_sided or getattr(self.lens.tokenizer, "mask_token_id", None) is None:
            return None
        return int(getattr(self.readings, "mask_seed", 0))

    @property
    def mask_draw(self) -> str:
        """How masked tokens are drawn: "sequence", or "authors" for the draw of the papers' code."""
        return str(getattr(self.readings, "mask_draw", "sequence"))

    @property
    def masks(self) -> bool:
        """Whether the model was trained with masked tokens; never for causal models, even with a mask token."""
        return self.mask_seed is not None and self.side == "encoder"

    def read(self) -> Iterator[Entry | Fault]:
        """Read the entries of the data again, at most `limit`."""
        options = dict(self.reader)
        if self.format == "pairs":
            options.setdefault("tokenizer", self.lens.tokenizer)
        return islice(read(self.data, self.format, **options), self.limit)


@dataclass(frozen=True)
class Experiment:
    """One experiment of a paper."""

    name: str  # as on the command line: "dispersion"
    title: str
    section: Callable[[Setting, Runs], Section]
    runs: Callable[[Setting], tuple[RunPlan, ...]] = lambda setting: ()  # the corpus runs that it reads
    missing: Callable[[Setting], str | None] = lambda setting: None  # why it cannot run here, or None
    needs: str = "a corpus"  # shown by `--list`, such as "sentences with named entities"


@dataclass(frozen=True)
class Paper:
    """A paper, its readings and its experiments in the paper's order."""

    name: str  # as on the command line: "emnlp2020"
    title: str
    citation: str
    readings: type[Any]  # a frozen dataclass of `reading`s, including `mask_seed` if runs are masked
    experiments: tuple[Experiment, ...]


@dataclass(frozen=True)
class NoReadings:
    """The readings of a study without open choices."""


def find_paper(name: str) -> Paper:
    """A paper by its name on the command line."""
    if name not in PAPERS:
        raise NormscopeError(f"Unknown paper {name!r}. Known: {', '.join(PAPERS)}.")
    _require_report_packages()
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
    batch_size: int = BATCH_SIZE,
    verify: bool = False,
    progress: Progress | None = None,
    **engine: Unpack[EngineOptions],
) -> tuple[Report, Path]:
    """Run a paper's experiments on a model and a corpus, and write the report into the folder `out`.

    Runs the named experiments, by default all that the model and the data allow. Their corpus runs are kept in
    `out`/runs, so that the same call resumes and nothing is computed twice. `readings` are strings "key=value". `data`
    may be None if no experiment needs a corpus. With `verify` the model must be one of the paper's models, and the
    authors' own masked tokens are used unless `readings` says otherwise. `engine`, `workers`, `threads` and `address`
    are those of `normscope.corpus.run`. `papers.several.compare_models` does the same for several models.
    """
    _require_report_packages()
    chosen = _chosen_experiments(paper, experiments)
    readings = _readings_to_verify(paper, readings) if verify else readings
    parsed = parse_readings(paper.readings, readings)
    lens = load_run_analyzer(model, engine)
    key = _published_key_of_model(paper, lens, required=verify)
    file = None if frequencies is None else Path(frequencies)
    setting = Setting(lens, str(data or ""), format, dict(reader or {}), parsed, file, example, (), limit)
    setting = replace(setting, entries=_first_entries(setting))
    able, skipped = _split_by_ability(paper, chosen, setting, strict=experiments is not None)
    plans = merge_run_plans(plan for experiment in able for plan in experiment.runs(setting))
    source = model if engine.get("engine") == "ray" else lens
    runs = _run_plans(setting, plans, source, Path(out) / "runs", progress, batch_size=batch_size, **engine)
    sections = _compute_sections(setting, able, runs, progress)
    lengths = facts.sequence_lengths(next(iter(runs.values()))) if runs else []
    numbers = {name: value for section in sections for name, value in section.numbers.items()}
    figures = published.published_numbers(paper.name, key, published.published_corpus_key(lengths, key))
    command = report_command(
        paper.name, facts.model_arguments(model, lens), data, out, format=format, reader=reader, readings=readings,
        experiments=experiments, frequencies=frequencies, example=example, limit=limit, batch_size=batch_size,
    )  # fmt: skip
    report = Report(
        paper.name,
        paper.title,
        paper.citation,
        _setting_facts(setting, plans, runs, lengths),
        describe_readings(parsed),
        sections,
        tuple(skipped),
        command,
        verify_numbers(numbers, figures),
        bool(published.published_models(paper.name)),
    )
    path = write_report(report, out)
    if verify and not report.checks:
        known = "; ".join(published.CORPORA[name].name for name in published.published_corpora(paper.name, key or ""))
        raise NormscopeError(f"No numbers were published for {key} on this data. Data with published numbers: {known}.")
    return report, path


def report_command(
    paper: str,
    models: Iterable[tuple[str, Any]],
    data: str | Path | None,
    out: str | Path,
    **given: Any,
) -> str:
    """The command that makes a report: the options that select its models, then those `given` to `reproduce` or
    `compare_models`."""
    batch_size = given.get("batch_size", BATCH_SIZE)
    options: list[tuple[str, Any]] = [
        *models,
        ("--format", given.get("format")),
        *facts.reader_arguments(given.get("reader") or {}),
        *(("--experiment", entry) for entry in given.get("experiments") or ()),
        *(("--reading", entry) for entry in given.get("readings", ())),
        *((f"--{name}", given.get(name)) for name in ("frequencies", "example", "limit")),
        ("--batch-size", None if batch_size == BATCH_SIZE else batch_size),
        *(("--beside", entry) for entry in given.get("beside", ())),
        ("--out", out),
    ]
    return facts.shell_command(("paper", paper, *([str(data)] if data else [])), options)


def _published_key_of_model(paper: Paper, lens: Analyzer, required: bool) -> str | None:
    """The key of a model with published numbers, or None; with `required`, other models are an error."""
    key = published.published_model_key(lens)
    known = published.published_models(paper.name)
    if required and key not in known:
        raise NormscopeError(
            f"{lens.model_name} is not one of the models with published numbers: {', '.join(known) or 'none'}."
        )
    return key


def _readings_to_verify(paper: Paper, readings: Sequence[str]) -> Sequence[str]:
    """The readings with the authors' draw of masked tokens, if the paper has that reading and none is given."""
    known = any(entry.name == "mask_draw" for entry in fields(paper.readings))
    given = any(reading.partition("=")[0].strip().replace("-", "_") == "mask_draw" for reading in readings)
    return readings if given or not known else (*readings, "mask_draw=authors")


def _require_report_packages() -> None:
    for package, extra in (("matplotlib", "plot"), ("polars", "corpus")):
        if find_spec(package) is None:
            raise NormscopeError(f"Reports need {package}: pip install 'normscope[{extra}]'.")


def _chosen_experiments(paper: Paper, names: Sequence[str] | None) -> list[Experiment]:
    """The experiments with these names, or all."""
    known = {experiment.name: experiment for experiment in paper.experiments}
    for name in names or ():
        if name not in known:
            raise NormscopeError(f"{paper.name} has no experiment {name!r}. It has: {', '.join(known)}.")
    return [experiment for experiment in paper.experiments if names is None or experiment.name in names]


def _split_by_ability(
    paper: Paper, chosen: Sequence[Experiment], setting: Setting, strict: bool
) -> tuple[list[Experiment], list[tuple[str, str]]]:
    """The experiments that can run, and the titles of the others with the reason; with `strict` all must run."""
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


def _first_entries(setting: Setting) -> tuple[Entry, ...]:
    """The first readable entries of the data, at most PEEK; empty without data."""
    entries = (entry for entry in setting.read() if isinstance(entry, Entry)) if setting.data else ()
    return tuple(islice(entries, PEEK))


def _run_plans(
    setting: Setting,
    plans: Sequence[RunPlan],
    model: str | Path | ModelSource | Analyzer,
    root: Path,
    progress: Progress | None,
    **options: Any,
) -> dict[str, Run]:
    """The corpus runs by name."""
    runs = {}
    for plan in plans:
        # Runs with the authors' masks stand beside those with ours, so that --verify can follow a report without it.
        place = root / "authors-masks" if plan.masked and setting.mask_draw == "authors" else root
        known, folder = find_covering_run(plan, place)
        runs[plan.name] = complete_run(
            setting.data,
            model,
            folder,
            plan.name,
            measures=known.measures,
            maps=known.maps,
            scopes=known.scopes,
            mask_seed=setting.mask_seed if plan.masked else None,
            mask_draw=setting.mask_draw,
            format=setting.format,
            reader=setting.reader,
            limit=setting.limit,
            progress=None if progress is None else partial(progress, plan.name),
            **options,
        )
    return runs


def _compute_sections(
    setting: Setting, experiments: Sequence[Experiment], runs: Runs, progress: Progress | None
) -> tuple[Section, ...]:
    sections = []
    for number, experiment in enumerate(experiments, 1):
        own = {plan.name: runs[plan.name] for plan in experiment.runs(setting)}
        sections.append(experiment.section(setting, own))
        if progress is not None:
            progress("sections", number, len(experiments))
    return tuple(sections)


def _setting_facts(
    setting: Setting, plans: Sequence[RunPlan], runs: Runs, lengths: Sequence[int]
) -> tuple[tuple[str, str], ...]:
    lens = setting.lens
    found = [
        ("model", facts.fact_model_name(lens)),
        ("layers", facts.layer_facts(lens)),
        ("precision", str(lens.dtype).split(".")[-1]),
    ]
    if setting.data:
        options = ", ".join(f"{key}={value}" for key, value in setting.reader.items())
        read_as = ", ".join(text for text in (setting.format and f"read as {setting.format}", options) if text)
        found.append(("data", f"{setting.data} ({read_as})" if read_as else setting.data))
    if lengths:
        found.append(("sequences", facts.sequence_facts(lengths, setting.limit)))
    if setting.frequencies is not None:
        found.append(("word frequencies", str(setting.frequencies)))
    for plan in plans:
        masked = "no tokens masked"
        if plan.masked and setting.mask_seed is None:
            masked += " (the model has no mask token)"
        elif plan.masked:
            draw = ", drawn in corpus order as in the paper's code" if setting.mask_draw == "authors" else ""
            masked = f"12 % of the tokens masked (seed {setting.mask_seed}{draw})"
        found.append((f"run \u201c{plan.name}\u201d", f"{masked}; {facts.run_facts(runs[plan.name])}"))
    return (*found, ("versions", facts.package_version_facts()))
