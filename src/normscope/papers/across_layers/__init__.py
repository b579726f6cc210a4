"""A study of our own: what the states of each layer are made of, counted from the input (the papers' future work)."""

from __future__ import annotations

from normscope.papers.across_layers.sections import RUN, agreement, first, sides, spread
from normscope.papers.runs import RunPlan
from normscope.papers.study import Experiment, NoReadings, Paper, Setting


def _missing_side(setting: Setting) -> str | None:
    return None if setting.lens.two_sided else "It is for encoder-decoders: this model has one side."


def _flow(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan(RUN, ("flow",), ("layer",)),)


def _methods(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan(RUN, ("flow_agreement",), ("layer",)),)


PAPER = Paper(
    name="layers",
    title="Across layers: what the states of each layer are made of",
    citation="A study of normscope's own, with the exact whole-model decomposition.",
    readings=NoReadings,
    experiments=(
        Experiment("spread", "How inputs spread", spread, _flow),
        Experiment("first", "The first token", first, _flow),
        Experiment("sides", "Source and target", sides, _flow, _missing_side, "a translation model and parallel text"),
        Experiment("agreement", "Other methods against the exact flow", agreement, _methods),
    ),
)
