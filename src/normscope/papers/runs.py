"""Corpus runs of a study: what they compute, their folders, and the reuse of existing runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, TypedDict

from normscope.analyzer import Analyzer
from normscope.corpus.measure_registry import find_registered_measures
from normscope.corpus.runner import run as corpus_run
from normscope.corpus.store import Run, read_store_manifest
from normscope.corpus.store import open as open_run
from normscope.errors import NormscopeError
from normscope.model_loading import as_analyzer
from normscope.models.source import ModelSource


class StoppedError(NormscopeError):
    """A corpus run was interrupted; the same call resumes it."""


class EngineOptions(TypedDict, total=False):
    """Engine options of a corpus run; see `normscope.corpus.run`."""

    engine: Literal["local", "ray"]
    workers: int
    threads: int
    address: str | None


@dataclass(frozen=True)
class RunPlan:
    """A corpus run that an experiment reads. Plans with the same name are merged (see `merge_run_plans`)."""

    name: str  # its folder under DIR/runs
    measures: tuple[str, ...]
    scopes: tuple[str, ...] | None = None  # names or aliases; None: all
    maps: tuple[str, ...] = ()  # scopes whose maps are stored
    masked: bool = False  # 12 % masked if the model has a mask token (readings.mask_seed)


def load_run_analyzer(model: str | Path | ModelSource | Analyzer, engine: EngineOptions) -> Analyzer:
    """The Analyzer, loaded if given by name or path; the engine "ray" requires a name or path."""
    where = engine.get("engine", "local")
    if where == "ray" and isinstance(model, Analyzer):
        raise NormscopeError(
            "The engine 'ray' loads the model in each worker: pass its name or path instead of an Analyzer."
        )
    return as_analyzer(model, where)


def complete_run(
    data: str, model: str | Path | ModelSource | Analyzer, folder: Path, name: str = "", **options: Any
) -> Run:
    """Run a corpus to the end. An interrupted run, or one without any result, is an error."""
    summary = corpus_run(data, model, folder, **options)
    if not summary.finished:
        where = f" in the run {name!r}" if name else ""
        raise StoppedError(f"Stopped{where} after {summary.done} of {summary.entries} entries.")
    run = open_run(folder)
    if summary.faults == summary.entries:
        first = run.scan("errors").first().collect().row(0, named=True)
        raise NormscopeError(f"No entry could be analysed. First error: {first['id']}: {first['reason']}")
    return run


def merge_run_plans(plans: Iterable[RunPlan]) -> list[RunPlan]:
    """One plan per name with the union of measures, scopes and maps; plans of one name must agree on masking."""
    merged: dict[str, RunPlan] = {}
    for plan in plans:
        scopes = _scopes_of_plan(plan)
        before = merged.get(plan.name)
        if before is None:
            merged[plan.name] = replace(plan, scopes=scopes)
            continue
        if before.masked != plan.masked:
            raise NormscopeError(f"Two experiments disagree on whether the run {plan.name!r} masks tokens.")
        merged[plan.name] = RunPlan(
            plan.name,
            _ordered_union(before.measures, plan.measures),
            None if before.scopes is None or scopes is None else _ordered_union(before.scopes, scopes),
            _ordered_union(before.maps, plan.maps),
            plan.masked,
        )
    return list(merged.values())


def find_covering_run(plan: RunPlan, runs: Path) -> tuple[RunPlan, Path]:
    """An existing run that covers the plan, with the options it was made with; otherwise a new folder, called NAME, or
    NAME-2 and so on after earlier runs that cover fewer experiments."""
    for number in count(1):
        folder = runs / (plan.name if number == 1 else f"{plan.name}-{number}")
        if not (folder / "manifest.json").is_file():
            return plan, folder
        before = read_store_manifest(folder)["options"]
        measures, scopes, maps = before["measures"], before["scopes"], before["maps"]
        has_scopes = scopes is None or (plan.scopes is not None and set(plan.scopes) <= set(scopes))
        if has_scopes and set(plan.measures) <= set(measures) and set(plan.maps) <= set(maps):
            kept = None if scopes is None else tuple(scopes)
            return replace(plan, measures=tuple(measures), scopes=kept, maps=tuple(maps)), folder
    raise AssertionError("unreachable")


def _scopes_of_plan(plan: RunPlan) -> tuple[str, ...] | None:
    """The scopes that a plan computes: those it names and those of its measures, or None for all."""
    measures = find_registered_measures(plan.measures)
    if plan.scopes is None and any(measure.scopes is None for measure in measures):
        return None
    of_measures = (scope for measure in measures for scope in measure.scopes or ())
    return _ordered_union(plan.scopes or (), of_measures, plan.maps)


def _ordered_union(*some: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain(*some)))
