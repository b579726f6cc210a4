"""A study of our own: Shapley values instead of integrated gradients in the feed-forward (the papers' future work)."""

from __future__ import annotations

from normscope.models.scopes import aliases_of
from normscope.papers.runs import RunPlan
from normscope.papers.shapley.sections import RUN, gate_agreement_section, gate_conclusion_section
from normscope.papers.study import Experiment, NoReadings, Paper, Setting


def _missing_map_between(setting: Setting) -> str | None:
    if setting.lens.two_sided:
        return "It is for models with one side."
    aliases = aliases_of(setting.lens.loaded.stacks[0].blocks)
    if aliases["attention-block"] == aliases["layer"]:
        return "Attention and feed-forward of this model are one block: there is no map between them."
    return None


def _plan_shapley(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan(RUN, ("shapley",), ("attention-block", "ff", "layer")),)


PAPER = Paper(
    name="shapley",
    title="Shapley values against integrated gradients in the feed-forward",
    citation="A study of normscope's own, on what the FF paper names as future work.",
    readings=NoReadings,
    experiments=(
        Experiment(
            "agreement", "How much the maps differ", gate_agreement_section, _plan_shapley, _missing_map_between
        ),
        Experiment(
            "conclusion",
            "Does the paper's conclusion depend on the gate?",
            gate_conclusion_section,
            _plan_shapley,
            _missing_map_between,
        ),
    ),
)
