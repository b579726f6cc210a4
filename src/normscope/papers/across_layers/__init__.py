"""Our own study: how much each input token contributes to the states of every layer (the papers' future work)."""

from __future__ import annotations

from normscope.papers.across_layers import sections
from normscope.papers.common import plan_run
from normscope.papers.study import Experiment, NoReadings, Paper, Setting


def _missing_second_side(setting: Setting) -> str | None:
    return None if setting.lens.two_sided else "This experiment needs an encoder-decoder."


FLOW = plan_run(sections.RUN, "flow", scopes=("layer",))
FLOW_AGREEMENT = plan_run(sections.RUN, "flow_agreement", scopes=("layer",))

PAPER = Paper(
    name="layers",
    title="Across layers: how inputs contribute to the states of each layer",
    citation="A normscope study, based on the exact decomposition of the whole model.",
    readings=NoReadings,
    experiments=(
        Experiment("spread", "How inputs spread", sections.input_spread_section, FLOW),
        Experiment("first", "The first token", sections.first_token_section, FLOW),
        Experiment(
            "sides",
            "Source and target",
            sections.source_share_section,
            FLOW,
            _missing_second_side,
            "a translation model and parallel text",
        ),
        Experiment(
            "agreement",
            "Comparison of other methods with the exact flow",
            sections.flow_agreement_section,
            FLOW_AGREEMENT,
        ),
    ),
)
