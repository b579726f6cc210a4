"""Our own study: Shapley values instead of integrated gradients in the feed-forward (the papers' future work)."""

from __future__ import annotations

from normscope.models.scopes import scope_aliases
from normscope.papers.common import plan_run
from normscope.papers.shapley.sections import RUN, gate_agreement_section, gate_conclusion_section
from normscope.papers.study import Experiment, NoReadings, Paper, Setting


def _missing_map_between(setting: Setting) -> str | None:
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
        Experiment("agreement", "How much the maps differ", gate_agreement_section, SHAPLEY, _missing_map_between),
        Experiment(
            "conclusion",
            "Does the paper's conclusion depend on the gate?",
            gate_conclusion_section,
            SHAPLEY,
            _missing_map_between,
        ),
    ),
)
