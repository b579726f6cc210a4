"""Our own study: Shapley values instead of integrated gradients in the feed-forward (the papers' future work)."""

from __future__ import annotations

from normscope.models.scopes import scope_aliases
from normscope.papers.common import plan_run
from normscope.papers.shapley.sections import RUN, shapley_agreement_section, shapley_conclusion_section
from normscope.papers.study import Experiment, NoReadings, Paper, Setting


def _missing_middle_map(setting: Setting) -> str | None:
    if setting.lens.two_sided:
        return "This study does not cover encoder-decoders."
    aliases = scope_aliases(setting.lens.loaded.stacks[0].blocks)
    if aliases["attention-block"] == aliases["layer"]:
        return "In this model attention and feed-forward run in parallel, so there is no map between them."
    return None


SHAPLEY = plan_run(RUN, "shapley", scopes=("attention-block", "ff", "layer"))

PAPER = Paper(
    name="shapley",
    title="Shapley values against integrated gradients in the feed-forward",
    citation="A normscope study of what the FF paper names as future work.",
    readings=NoReadings,
    experiments=(
        Experiment("agreement", "How much the maps differ", shapley_agreement_section, SHAPLEY, _missing_middle_map),
        Experiment(
            "conclusion",
            "Does the paper's conclusion depend on the gate?",
            shapley_conclusion_section,
            SHAPLEY,
            _missing_middle_map,
        ),
    ),
)
