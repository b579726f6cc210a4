"""One report on several models, each with a full report of its own, and on finished reports of the same paper."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError
from normscope.models.source import ModelSource
from normscope.papers.published import published_for_models
from normscope.papers.study import Paper, Progress, report_command, reproduce
from normscope.reports import facts
from normscope.reports.joint import joint_report
from normscope.reports.joint_numbers import short_name
from normscope.reports.report import Report
from normscope.reports.saved import load_reports
from normscope.reports.write import write_report

MODELS = "models"  # folder of the models' own reports
UNSAID = ("verify", "engine", "workers", "threads", "address")  # options that do not change what a report says


def compare_models(
    paper: Paper,
    models: Sequence[str | Path | ModelSource | Analyzer],
    data: str | Path | None,
    out: str | Path,
    *,
    beside: Sequence[str | Path] = (),
    progress: Progress | None = None,
    **options: Any,
) -> tuple[Report, Path]:
    """Run a paper's experiments on several models, and write a report that compares them into the folder `out`.

    Each model's own report is in `out`/models/NAME, the same as `reproduce` writes for it alone, with its corpus runs:
    the same call resumes. `beside`: folders of finished reports of the same paper, on other models or corpora, which
    are compared too; a joint report counts as the reports that it compares. `options` are those of `reproduce`.

    Returns:
        The joint report, whose `members` are the reports compared, and the path of its page.
    """
    finished = _load_beside(paper, beside)
    root = Path(out)
    sources = [_source(model) for model in models]
    names = _folder_names(sources)
    if not names and not finished:
        raise NormscopeError("There is nothing to compare: give a model or a finished report.")
    reports, folders = [], []
    for model, name in zip(models, names, strict=True):
        report, _ = reproduce(paper, model, data, root / MODELS / name, progress=_named(progress, name), **options)
        reports.append(report)
        folders.append(f"{MODELS}/{name}")
    for report, place in finished:
        reports.append(report)
        folders.append(Path(os.path.relpath(place, root)).as_posix())
    published, whose = published_for_models(paper.name, [report.model for report in reports])
    said = {key: value for key, value in options.items() if key not in UNSAID}
    command = report_command(paper.name, _model_options(sources), data, out, beside=beside, **said)
    report = joint_report(reports, folders, published, whose, command)
    return report, write_report(report, root)


def _load_beside(paper: Paper, beside: Sequence[str | Path]) -> list[tuple[Report, Path]]:
    """The finished reports with their folders."""
    found = [(folder, report, place) for folder in beside for report, place in load_reports(folder)]
    for folder, report, _ in found:
        if report.paper != paper.name:
            raise NormscopeError(f"{folder} is a report of {report.paper!r}, not of {paper.name!r}.")
    return [(report, place) for _, report, place in found]


def _source(model: str | Path | ModelSource | Analyzer) -> ModelSource:
    return ModelSource(model.model_name) if isinstance(model, Analyzer) else ModelSource.of(model)


def _folder_names(sources: Sequence[ModelSource]) -> list[str]:
    """The names of the models' folders: a model's short name, numbered if it was used before."""
    names: list[str] = []
    for n, source in enumerate(sources):
        if source in sources[:n]:
            raise NormscopeError(f"The model {source.name} is given twice.")
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", short_name(facts.model_label(source.name))).strip(".-") or "model"
        numbered = (name if k == 1 else f"{name}-{k}" for k in range(1, len(sources) + 1))
        names.append(next(one for one in numbered if one not in names))
    return names


def _named(progress: Progress | None, name: str) -> Progress | None:
    """Progress whose counts are named after the model."""
    if progress is None:
        return None
    return lambda what, done, total: progress(f"{name}: {what}", done, total)


def _model_options(sources: Sequence[ModelSource]) -> list[tuple[str, Any]]:
    """--model for each, then the options that they share."""
    given = [facts.source_arguments(source) for source in sources]
    shared = dict.fromkeys(option for some in given for option in some[1:])
    return [*(some[0] for some in given), *shared]
