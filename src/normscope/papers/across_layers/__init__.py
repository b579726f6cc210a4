"""A study of our own: what the states of each layer are made of, counted from the input (the papers' future work)."""

from __future__ import annotations

from dataclasses import dataclass

from normscope.papers.across_layers.sections import RUN, agreement, first, sides, spread
from normscope.papers.experiments import Experiment, Paper, RunPlan, Setting


@dataclass(frozen=True)
class Readings:
    """Nothing is left open."""


def _always(setting: Setting) -> str | None:
    return None


def _two_sides(setting: Setting) -> str | None:
    return None if setting.lens.two_sided else "It is for encoder-decoders: this model has one side."


def _flow(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan(RUN, ("flow",), ("layer",)),)


def _methods(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan(RUN, ("flow_agreement",), ("layer",)),)


PAPER = Paper(
    name="layers",
    title="Across layers: what the states of each layer are made of",
    citation="A study of normscope's own, with the exact whole-model decomposition.",
    readings=Readings,
    experiments=(
        Experiment("spread", "How inputs spread", _always, _flow, spread),
        Experiment("first", "The first token", _always, _flow, first),
        Experiment("sides", "Source and target", _two_sides, _flow, sides, "a translation model and parallel text"),
        Experiment("agreement", "Other methods against the exact flow", _always, _methods, agreement),
    ),
)
