"""Our own study: how much each input token contributes to the states of every layer (the papers' future work)."""

from __future__ import annotations

from normscope.papers.across_layers.sections import (
    RUN,
    across_layers_agreement_section,
    across_layers_first_token_section,
    across_layers_source_share_section,
    across_layers_spread_section,
)
from normscope.papers.common import plan_run
from normscope.papers.study import Experiment, NoReadings, Paper, Setting


def _across_layers_paper_missing_side(setting: Setting) -> str | None:
    return None if setting.lens.two_sided else "This experiment needs an encoder-decoder."


FLOW = plan_run(RUN, "flow", scopes=("layer",))
FLOW_AGREEMENT = plan_run(RUN, "flow_agreement", scopes=("layer",))


PAPER = Paper(
    name="layers",
    title="Across layers: how inputs contribute to the states of each layer",
    citation="A normscope study, based on the exact decomposition of the whole model.",
    readings=NoReadings,
    experiments=(
        Experiment("spread", "How inputs spread", across_layers_spread_section, FLOW),
        Experiment("first", "The first token", across_layers_first_token_section, FLOW),
        Experiment(
            "sides",
            "Source and target",
            across_layers_source_share_section,
            FLOW,
            _across_layers_paper_missing_side,
            "a translation model and parallel text",
        ),
        Experiment(
            "agreement",
            "Comparison of other methods with the exact flow",
            across_layers_agreement_section,
            FLOW_AGREEMENT,
        ),
    ),
)
