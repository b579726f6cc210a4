"""Compare methods on a model and a corpus: a corpus run that resumes and scales out, then a report."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers

from normscope._version import __version__
from normscope.corpus.running import run as corpus_run
from normscope.corpus.store import fingerprint
from normscope.corpus.store import open as open_run
from normscope.errors import NormscopeError
from normscope.faithfulness import results, sections
from normscope.faithfulness.contexts import task_of
from normscope.faithfulness.predicting import neutral
from normscope.faithfulness.results import Results
from normscope.faithfulness.scoring import methods_of, refusal
from normscope.faithfulness.settings import Settings
from normscope.model_source import ModelSource, analyzer_of
from normscope.papers.experiments import StoppedError
from normscope.papers.facts import model_name, model_options, typed
from normscope.papers.report import Report, Section, write

if TYPE_CHECKING:
    from normscope.analyzer import Analyzer
    from normscope.corpus.store import Run

SHARD = 16  # entries that are written together: they take long
TASKS = {
    "class": "the class of a text",
    "next": "the next token, from those before it",
    "masked": "a masked token, from the others",
}
TITLE = "Which attribution to trust"
CITATION = (
    "Comprehensiveness, sufficiency and their areas: DeYoung et al., ERASER, ACL 2020. Shares and accuracy: Modarressi "
    "et al., DecompX, ACL 2023. Deletion and insertion: Petsiuk et al., RISE, BMVC 2018."
)


def compare(
    model: str | Path | ModelSource | Analyzer,
    data: str | Path,
    out: str | Path,
    *,
    settings: Settings | None = None,
    format: str | None = None,
    reader: Mapping[str, Any] | None = None,
    limit: int | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: int = 2,
    threads: int = 1,
    address: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Report, Path]:
    """Compare methods by how much a model's predictions depend on the tokens they name, and write a report to `out`.

    The model classifies texts or predicts tokens; see `Settings` for what can be chosen. The same call goes on where it
    stopped.
    """
    using = settings or Settings()
    lens = analyzer_of(model, engine)
    task = task_of(lens)
    neutral(lens, using.replacement)
    methods_of(lens, using.methods)
    for method in using.methods:
        if refusal(lens, method):
            raise NormscopeError(refusal(lens, method))
    if engine == "ray" and not isinstance(model, str | Path | ModelSource):
        raise NormscopeError("The engine 'ray' loads the model in each worker: give its name or path.")
    folder = Path(out) / "runs" / "faithfulness"
    summary = corpus_run(
        data,
        lens if engine == "local" else model,
        folder,
        measures=["faithfulness"],
        scopes=["weights"],
        settings=using.plain() | {"head": _head(lens)},
        format=format,
        reader=reader,
        limit=limit,
        shard_size=SHARD,
        engine=engine,
        workers=workers,
        threads=threads,
        address=address,
        progress=None if progress is None else lambda done, total: progress("entries", done, total),
    )
    if not summary.finished:
        raise StoppedError(f"Stopped after {summary.done} of {summary.entries} entries.")
    run = open_run(folder)
    if summary.faults == summary.entries:
        first = run.scan("errors").first().collect().row(0, named=True)
        raise NormscopeError(f"No entry could be analysed. The first: {first['id']}: {first['reason']}")
    found = results.read(run, using.erasures)
    report = Report(
        paper="faithfulness",
        title=TITLE,
        citation=CITATION,
        facts=_facts(lens, str(data), found, using, run, task),
        readings=(),
        sections=_sections(found, using.erasures),
        skipped=tuple(found.refused.items()),
        command=_command(model, lens, str(data), out, using, format, reader or {}, limit),
    )
    return report, write(report, out)


def _sections(found: Results, erasures: Sequence[str]) -> tuple[Section, ...]:
    made = [
        sections.aopc(found, erasures),
        sections.accuracy(found, erasures),
        sections.curves(found, erasures),
        sections.agreement(found),
    ]
    return tuple(section for section in made if section is not None)


def _facts(
    lens: Analyzer, data: str, found: Results, settings: Settings, run: Run, task: str
) -> tuple[tuple[str, str], ...]:
    entries = int(run.manifest["data"]["entries"])
    target = {
        "top": "what the model itself predicts",
        "given": "the label" if task == "class" else "the token that is really there",
    }
    where = "at the last position" if not settings.positions else f"at {settings.positions} positions drawn at random"
    token = neutral(lens, settings.replacement).token
    facts = [
        ("model", f"{model_name(lens)} ({type(lens.model).__name__}, {lens.depths[0]} layers)"),
        ("data", data),
        (
            "contexts",
            f"{found.contexts:,} in {found.entries:,} entries, with {found.tokens:.1f} tokens to take away on average; "
            f"{entries - found.entries:,} of {entries:,} entries could not be used",
        ),
        ("prediction", TASKS[task] + ("" if task == "class" else f", {where}")),
        ("target", f"{target[settings.target]}, with a probability of {found.probability:.3f} on average"),
        ("masking", f"a token is replaced by {token!r}; special tokens stay"),
        *((f"without scores in {count:,} contexts", f"{name}: {why}") for name, (count, why) in found.partly.items()),
        (
            "versions",
            f"normscope {__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
        ),
    ]
    return tuple(facts)


def _command(
    model: str | Path | ModelSource | Analyzer,
    lens: Analyzer,
    data: str,
    out: str | Path,
    settings: Settings,
    format: str | None,
    reader: Mapping[str, Any],
    limit: int | None,
) -> str:
    plain = Settings()
    options: list[tuple[str, Any]] = [
        *model_options(model, lens),
        ("--format", format),
        *(("--reader", f"{key}={typed(value)}") for key, value in reader.items()),
        *(("--method", method) for method in settings.methods),
        ("--target", None if settings.target == plain.target else settings.target),
        ("--positions", settings.positions or None),
        *(("--by", erasure) for erasure in (settings.erasures if settings.erasures != plain.erasures else ())),
        ("--replacement", settings.replacement or None),
        ("--seed", settings.seed or None),
        ("--limit", limit),
        ("--out", out),
    ]
    parts = ["normscope", "faithfulness", data]
    return shlex.join([*parts, *(str(part) for pair in options if pair[1] is not None for part in pair)])


def _head(lens: Analyzer) -> str:
    """A fingerprint of the weights outside the base model, on which all predictions depend."""
    base = {id(parameter) for parameter in lens.base.parameters()}

    def parts() -> Iterator[bytes]:
        for name, parameter in sorted(lens.model.named_parameters()):
            if id(parameter) not in base:
                yield name.encode()
                yield parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return fingerprint(parts())
