"""A study of our own: Shapley values in the place of integrated gradients in the feed-forward (the papers' future
work)."""

from __future__ import annotations

from dataclasses import dataclass

from normscope.models.scopes import aliases_of
from normscope.papers.experiments import Experiment, Paper, RunPlan, Setting
from normscope.papers.shapley.sections import RUN, agreement, conclusion


@dataclass(frozen=True)
class Readings:
    """Nothing is left open."""


def _missing(setting: Setting) -> str | None:
    if setting.lens.two_sided:
        return "It is for models with one side."
    aliases = aliases_of(setting.lens.stacks[0].blocks)
    if aliases["attention-block"] == aliases["layer"]:
        return "Attention and feed-forward of this model are one block: there is no map between them."
    return None


def _run(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan(RUN, ("shapley",), ("attention-block", "ff", "layer")),)


PAPER = Paper(
    name="shapley",
    title="Shapley values against integrated gradients in the feed-forward",
    citation="A study of normscope's own, on what the FF paper names as future work.",
    readings=Readings,
    experiments=(
        Experiment("agreement", "How much the maps differ", _missing, _run, agreement),
        Experiment("conclusion", "Does the paper's conclusion depend on the gate?", _missing, _run, conclusion),
    ),
)
