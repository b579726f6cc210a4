"""An explanation as a self-contained page without scripts: the answer sentence by sentence, with what it rests on."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

from normscope.explain.result import Explanation
from normscope.files import check_suffix, write_atomically
from normscope.labels import Label, visible_label_text
from normscope.view.explained import ExplainedPart, ExplainedSentence, explained_sentences, explained_shares
from normscope.view.html import FLOW_PAGE, flow_scored_token_html
from normscope.view.terminal.explanation import explanation_note
from normscope.view.tokens import side_spans


def write_explanation_page(told: Explanation, path: str | os.PathLike[str]) -> Path:
    """Write the page."""
    check_suffix(path, ".html", ".htm")
    made = FLOW_PAGE.format(title=html.escape(visible_label_text(repr(told))), body=explanation_html(told))
    with write_atomically(path) as temporary:
        temporary.write_text(made, encoding="utf-8", errors="backslashreplace")  # lone surrogates in tokens
    return Path(path)


def explanation_html(told: Explanation) -> str:
    """The body of the page, which a notebook shows too."""
    lines = [f"<p>Warning: {html.escape(text)}</p>" for text in told.warnings]
    for sentence in explained_sentences(told):
        lines += _explained_sentence_html(told, sentence)
    lines.append("<h2>The whole answer</h2>")
    lines.append(_explained_parts_html(explained_shares(told), told.value))
    lines.append(f"<p>{html.escape(explanation_note(told))}</p>")
    lines += _explained_tokens_html(told)
    return '<div class="normscope-explanation">\n' + "\n".join(lines) + "\n</div>"


def _explained_sentence_html(told: Explanation, sentence: ExplainedSentence) -> list[str]:
    """The sentence, the strongest parts of the input, and the input coloured by its scores for the sentence."""
    parts = [
        *sentence.parts,
        ExplainedPart("(answer)", sentence.answer),
        ExplainedPart("(first token)", sentence.first),
        ExplainedPart("(no input)", sentence.nothing),
    ]
    scores = told.scores.double()[list(sentence.tokens)].sum(0).tolist()
    ordinary = [abs(score) for score in scores[1:]]  # the first token would hide the others
    most = max(ordinary, default=0.0) or 1.0
    coloured = [
        f'<p style="line-height: 1.9">{html.escape(span.side)}: '
        f"{_tint_tokens_html(told.columns[span.start : span.stop], scores[span.start : span.stop], most)}</p>"
        for span in side_spans(told.columns)
    ]
    return [
        f'<h2 style="font-size: 1.1rem"><bdi>{html.escape(visible_label_text(sentence.text))}</bdi></h2>',
        _explained_parts_html(parts, sentence.value),
        f"<details><summary>The input by token</summary>{''.join(coloured)}</details>",
    ]


def _tint_tokens_html(labels: Sequence[Label], scores: Sequence[float], most: float) -> str:
    pairs = zip(labels, scores, strict=True)
    return " ".join(flow_scored_token_html(label, max(-most, min(score, most)), most, score) for label, score in pairs)


def _explained_parts_html(parts: Sequence[ExplainedPart], value: float) -> str:
    rows = "".join(
        f"<tr><td><bdi>{html.escape(visible_label_text(' '.join(part.name.split())))}</bdi></td>"
        f'<td style="text-align: right">{part.score:+.4g}</td></tr>'
        for part in parts
    )
    total = f'<tr><th style="text-align: left">value</th><th style="text-align: right">{value:+.4g}</th></tr>'
    return f"<table>{rows}{total}</table>"


def _explained_tokens_html(told: Explanation) -> list[str]:
    """Every token of the answer with its probability and the alternatives."""
    lines = []
    rows = zip(told.tokens, told.probabilities.tolist(), told.values.tolist(), told.alternatives, strict=True)
    for token, probability, value, others in rows:
        named = ", ".join(f"{html.escape(visible_label_text(one.token))} {one.probability:.2f}" for one in others)
        lines.append(
            f"<tr><td><bdi>{html.escape(visible_label_text(token))}</bdi></td><td>{probability:.2f}</td>"
            f"<td>{value:+.4g}</td><td><bdi>{named}</bdi></td></tr>"
        )
    head = "<tr><th>token</th><th>probability</th><th>target</th><th>most probable tokens</th></tr>"
    return [f"<details><summary>The tokens of the answer</summary><table>{head}{''.join(lines)}</table></details>"]
