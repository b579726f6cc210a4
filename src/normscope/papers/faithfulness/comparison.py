"""Compare attribution methods on a model and a corpus: a corpus run, then a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch

from normscope.analyzer import Analyzer
from normscope.corpus.store import Run, fingerprint
from normscope.errors import NormscopeError
from normscope.models.source import ModelSource
from normscope.papers.faithfulness import results, sections
from normscope.papers.faithfulness.contexts import prediction_task
from normscope.papers.faithfulness.predictions import replacement_token
from normscope.papers.faithfulness.results import Results
from normscope.papers.faithfulness.scores import compared_methods, method_refusal
from normscope.papers.faithfulness.settings import Settings
from normscope.papers.runs import EngineOptions, complete_run, load_run_analyzer
from normscope.reports import facts
from normscope.reports.report import Report
from normscope.reports.write import write_report

SHARD = 16  # entries per shard; small, since each takes long
TASKS = {
    "class": "the class of a text",
    "next": "the next token, from the tokens before it",
    "masked": "a masked token, from the other tokens",
}
TITLE = "Which attribution to trust"
CITATION = (
    "Comprehensiveness, sufficiency and their areas: DeYoung et al., ERASER, ACL 2020. Shares and accuracy: Modarressi "
    "et al., DecompX, ACL 2023. Deletion and insertion: Petsiuk et al., RISE, BMVC 2018."
)


def compare_methods(
    model: str | Path | ModelSource | Analyzer,
    data: str | Path,
    out: str | Path,
    *,
    settings: Settings | None = None,
    format: str | None = None,
    reader: Mapping[str, Any] | None = None,
    limit: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **engine: Unpack[EngineOptions],
) -> tuple[Report, Path]:
    """Compare methods by how much predictions depend on the tokens they score highest; write a report to `out`.

    The model must classify texts or predict tokens; see `Settings` for the options. Repeating the call resumes an
    interrupted run. `engine`, `workers`, `threads` and `address` are those of `normscope.corpus.run`.
    """
    chosen = settings or Settings()
    lens = load_run_analyzer(model, engine)
    task = prediction_task(lens)
    replacement_token(lens, chosen.replacement)
    compared_methods(lens, chosen.methods)
    for method in chosen.methods:
        if reason := method_refusal(lens, method):
            raise NormscopeError(reason)
    run = complete_run(
        str(data),
        model if engine.get("engine") == "ray" else lens,
        Path(out) / "runs" / "faithfulness",
        measures=["faithfulness"],
        scopes=["weights"],
        settings=chosen.to_plain() | {"head": _head_fingerprint(lens)},
        format=format,
        reader=reader,
        limit=limit,
        shard_size=SHARD,
        progress=None if progress is None else lambda done, total: progress("entries", done, total),
        **engine,
    )
    found = results.read_results(run, chosen.erasures)
    agreement = sections.score_agreement_section(found)
    report = Report(
        paper="faithfulness",
        title=TITLE,
        citation=CITATION,
        facts=_comparison_facts(lens, str(data), found, chosen, run, task),
        readings=(),
        sections=(*(make(found, chosen.erasures) for make in sections.SECTIONS), *([agreement] if agreement else [])),
        skipped=tuple(found.refused.items()),
        command=_comparison_command(
            facts.model_arguments(model, lens), str(data), out, chosen, format, reader or {}, limit
        ),
    )
    return report, write_report(report, out)


def _comparison_facts(
    lens: Analyzer, data: str, found: Results, settings: Settings, run: Run, task: str
) -> tuple[tuple[str, str], ...]:
    entries = int(run.manifest["data"]["entries"])
    given = "the label" if task == "class" else "the actual token"
    target = given if settings.target == "given" else "the model's own prediction"
    where = "at the last position" if not settings.positions else f"at {settings.positions} random positions"
    return (
        ("model", f"{facts.fact_model_name(lens)} ({type(lens.model).__name__}, {lens.loaded.depths[0]} layers)"),
        ("data", data),
        (
            "contexts",
            f"{found.contexts:,} in {found.entries:,} entries, with {found.tokens:.1f} removable tokens on average; "
            f"{entries - found.entries:,} of {entries:,} entries could not be used",
        ),
        ("prediction", TASKS[task] + ("" if task == "class" else f", {where}")),
        ("target", f"{target}, with a probability of {found.probability:.3f} on average"),
        (
            "masking",
            f"tokens are replaced by {replacement_token(lens, settings.replacement).token!r}; special tokens are kept",
        ),
        *((f"no scores in {count:,} contexts", f"{name}: {why}") for name, (count, why) in found.partly.items()),
        ("versions", facts.package_version_facts()),
    )


def _comparison_command(
    model: list[tuple[str, str | None]],
    data: str,
    out: str | Path,
    settings: Settings,
    format: str | None,
    reader: Mapping[str, Any],
    limit: int | None,
) -> str:
    default = Settings()
    erasures = settings.erasures if settings.erasures != default.erasures else ()
    options: list[tuple[str, Any]] = [
        *model,
        ("--format", format),
        *facts.reader_arguments(reader),
        *(("--method", method) for method in settings.methods),
        ("--target", None if settings.target == default.target else settings.target),
        ("--positions", settings.positions or None),
        *(("--by", erasure) for erasure in erasures),
        ("--replacement", settings.replacement or None),
        ("--seed", settings.seed or None),
        ("--limit", limit),
        ("--out", out),
    ]
    return facts.shell_command(("faithfulness", data), options)


def _head_fingerprint(lens: Analyzer) -> str:
    """Fingerprint of the weights outside the base model, which affect all predictions."""
    base = {id(parameter) for parameter in lens.loaded.base.parameters()}

    def parts() -> Iterator[bytes]:
        for name, parameter in sorted(lens.model.named_parameters()):
            if id(parameter) not in base:
                yield name.encode()
                yield parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return fingerprint(parts())
