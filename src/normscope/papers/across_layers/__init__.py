"""A study of our own: what the states of each layer are made of, counted from the input (the papers' future work)."""

from __future__ import annotations

from normscope.papers.across_layers.sections import (
    RUN,
    first_token_section,
    flow_agreement_section,
    input_spread_section,
    source_share_section,
)
from normscope.papers.runs import RunPlan
from normscope.papers.study import Experiment, NoReadings, Paper, Setting


def _missing_second_side(setting: Setting) -> str | None:
    return None if setting.lens.two_sided else "It is for encoder-decoders: this model has one side."


def _plan_flow(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan(RUN, ("flow",), ("layer",)),)


def _plan_flow_agreement(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan(RUN, ("flow_agreement",), ("layer",)),)


PAPER = Paper(
    name="layers",
    title="Across layers: what the states of each layer are made of",
    citation="A study of normscope's own, with the exact whole-model decomposition.",
    readings=NoReadings,
    experiments=(
        Experiment("spread", "How inputs spread", input_spread_section, _plan_flow),
        Experiment("first", "The first token", first_token_section, _plan_flow),
        Experiment(
            "sides",
            "Source and target",
            source_share_section,
            _plan_flow,
            _missing_second_side,
            "a translation model and parallel text",
        ),
        Experiment("agreement", "Other methods against the exact flow", flow_agreement_section, _plan_flow_agreement),
    ),
)
