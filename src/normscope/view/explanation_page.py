"""An explanation as a self-contained page without scripts: the answer sentence by sentence, with what it rests on."""

from __future__ import annotations

import html
from collections.abc import Sequence

from normscope.explain.result import Explanation
from normscope.labels import Label, shorten_label, visible_label_text
from normscope.view.explained import (
    ExplainedPart,
    ExplainedSentence,
    explained_sentences,
    explained_shares,
    explained_tokens,
)
from normscope.view.html import css_shade, flow_scored_token_html
from normscope.view.scales import BLUE, ORANGE
from normscope.view.terminal.explanation import explanation_note
from normscope.view.tokens import side_spans

NAME = 80  # width of the name of a part


def explanation_html(told: Explanation) -> str:
    """The body of the page, which a notebook shows too."""
    model = html.escape(visible_label_text(f"{told.info.get('model', '')}: what the answer rests on"))
    lines = [f"<p><strong>{model}</strong></p>"]
    lines += [f"<p>Warning: {html.escape(text)}</p>" for text in told.warnings]
    lines.append(f"<p>{html.escape(explanation_note(told))}</p>")
    for sentence in explained_sentences(told):
        lines += _explained_sentence_html(told, sentence)
    lines.append('<h2 style="font-size: 1.1rem">The whole answer</h2>')
    lines.append(_explained_parts_html(explained_shares(told), told.value))
    lines.append(_explained_tokens_html(told))
    return '<div class="normscope-explanation">\n' + "\n".join(lines) + "\n</div>"


def _explained_sentence_html(told: Explanation, sentence: ExplainedSentence) -> list[str]:
    """The sentence, the strongest parts of the input, and the input coloured by its scores for the sentence."""
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
        _explained_parts_html(sentence.parts, sentence.value),
        f"<details><summary>The input by token</summary>{''.join(coloured)}</details>",
    ]


def _tint_tokens_html(labels: Sequence[Label], scores: Sequence[float], most: float) -> str:
    pairs = zip(labels, scores, strict=True)
    return " ".join(flow_scored_token_html(label, max(-most, min(score, most)), most, score) for label, score in pairs)


def _explained_parts_html(parts: Sequence[ExplainedPart], value: float) -> str:
    """A table of parts with their scores, as numbers and as bars."""
    most = max((abs(part.score) for part in parts), default=0.0) or 1.0
    rows = "".join(
        f"<tr><td>{_part_name_html(part)}</td>"
        f'<td style="text-align: right; padding: 0 0.6em">{part.score:+.4g}</td>'
        f'<td style="width: 14rem">{_score_bar_html(part.score, most)}</td></tr>'
        for part in parts
    )
    total = (
        '<tr><th style="text-align: left">value</th>'
        f'<th style="text-align: right; padding: 0 0.6em">{value:+.4g}</th><td></td></tr>'
    )
    return f"<table>{rows}{total}</table>"


def _part_name_html(part: ExplainedPart) -> str:
    name = shorten_label(visible_label_text(" ".join(part.name.split())), NAME)
    return f"<bdi>{html.escape(name)}</bdi>"


def _score_bar_html(score: float, most: float) -> str:
    """A bar as long as a score's share of the largest."""
    shade = css_shade(ORANGE if score >= 0 else BLUE, 1)
    return f'<div style="width: {100 * abs(score) / most:.0f}%; height: 0.7em; background: {shade}"></div>'


def _explained_tokens_html(told: Explanation) -> str:
    """Every token of the answer with its probability, the alternatives, and what it rests on."""
    lines = []
    values, rests = told.values.tolist(), explained_tokens(told)
    rows = zip(told.tokens, told.probabilities.tolist(), values, told.alternatives, rests, strict=True)
    for token, probability, value, others, parts in rows:
        named = ", ".join(f"{html.escape(visible_label_text(one.token))} {one.probability:.2f}" for one in others)
        strongest = ", ".join(f"{_part_name_html(part)} {part.score:+.3g}" for part in parts)
        cells = (f"<bdi>{html.escape(visible_label_text(token))}</bdi>", f"{probability:.2f}", f"{value:+.4g}")
        lines.append("".join(f"<td>{cell}</td>" for cell in (*cells, f"<bdi>{named}</bdi>", strongest)))
    titles = ("token", "probability", "target", "most probable tokens", "rests on")
    head = "".join(f'<th style="text-align: left">{title}</th>' for title in titles)
    body = "".join(f'<tr style="vertical-align: top">{line}</tr>' for line in lines)
    summary = "<summary>The tokens of the answer</summary>"
    return f'<details>{summary}<table style="border-spacing: 0.8em 0.2em"><tr>{head}</tr>{body}</table></details>'
