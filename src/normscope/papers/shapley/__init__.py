"""A study of our own: Shapley values instead of integrated gradients in the feed-forward (the papers' future work)."""

from __future__ import annotations

from normscope.models.scopes import scope_aliases
from normscope.papers.runs import RunPlan
from normscope.papers.shapley.sections import RUN, agreement, conclusion
from normscope.papers.study import Experiment, NoReadings, Paper, Setting


def _missing(setting: Setting) -> str | None:
    if setting.lens.two_sided:
        return "It is for models with one side."
    aliases = scope_aliases(setting.lens.loaded.stacks[0].blocks)
    if aliases["attention-block"] == aliases["layer"]:
        return "Attention and feed-forward of this model are one block: there is no map between them."
    return None


def _run(setting: Setting) -> tuple[RunPlan, ...]:
    return (RunPlan(RUN, ("shapley",), ("attention-block", "ff", "layer")),)


PAPER = Paper(
    name="shapley",
    title="Shapley values against integrated gradients in the feed-forward",
    citation="A study of normscope's own, on what the FF paper names as future work.",
    readings=NoReadings,
    experiments=(
        Experiment("agreement", "How much the maps differ", agreement, _run, _missing),
        Experiment("conclusion", "Does the paper's conclusion depend on the gate?", conclusion, _run, _missing),
    ),
)
