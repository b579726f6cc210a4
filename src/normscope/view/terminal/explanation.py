"""An explanation in the terminal: the answer, sentence by sentence, with the strongest sources beside it."""

from __future__ import annotations

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from normscope.explain.result import Explanation
from normscope.labels import shorten_label, visible_label_text
from normscope.view.explained import explained_sentences, explained_shares
from normscope.view.pictures import picture_names, scores_on_pictures
from normscope.view.terminal.flow import score_tint

NAME = 36  # width of the name of a source


def terminal_explanation(told: Explanation) -> RenderableType:
    """The answer with its sources, and the shares of the whole answer."""
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("answer", ratio=1)
    table.add_column("rests on", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    for sentence in explained_sentences(told):
        names, scores = Text(), Text()
        for n, part in enumerate(sentence.parts):
            style = "dim" if part.name.startswith("(") else ""
            names.append(shorten_label(visible_label_text(" ".join(part.name.split())), NAME), style)
            scores.append(f"{part.score:+.3g}", "dim" if style else ("dark_orange" if part.score > 0 else "blue"))
            if n < len(sentence.parts) - 1:
                names.append("\n")
                scores.append("\n")
        table.add_row(Text(visible_label_text(sentence.text)), names, scores)
        table.add_row("", "", "")
    whole = Text("The whole answer", "bold")
    return Group(table, whole, _share_table(told), *_picture_cells(told), Text(explanation_note(told), "dim"))


def explanation_note(told: Explanation) -> str:
    """How to read the numbers."""
    against = told.info.get("against")
    logit = {"runner-up": "logit minus that of the runner-up", "mean": "logit minus the mean", None: "logit"}
    if isinstance(against, str) and against not in logit:
        what = f"log-probability minus that of the answer {against!r}"
    else:
        what = logit.get(against, f"logit minus that of {against!r}")
    ends = " A patch is what the vision tower made of it, from other patches too." if picture_names(told.info) else ""
    return (
        f"Scores explain each token's {what}; with (no input), the biases, they add up to it. Worst completeness error "
        f"{float(told.completeness.max()):.0e}.{ends}"
    )


def _share_table(told: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for part in explained_shares(told):
        table.add_row(shorten_label(visible_label_text(part.name), NAME), f"{part.score:+.4g}")
    table.add_row("sum", f"{told.value:+.4g}", style="bold")
    return table


def _picture_cells(told: Explanation) -> list[Text]:
    """Each picture as cells: the scores of its patches in per cent of the largest, orange or blue."""
    found = scores_on_pictures(told)
    most = max((float(np.abs(one.values).max()) for one in found), default=0.0) or 1.0
    lines = []
    for one in found:
        lines.append(Text(f"{one.name}: {one.total:+.4g}, by patch in % of {most:.3g}"))
        for row in one.values:
            line = Text(no_wrap=True, overflow="ellipsis")
            for value in row:
                line.append(f"{100 * value / most:+4.0f}", score_tint(value / most))
            lines.append(line)
    return lines
