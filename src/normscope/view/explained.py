"""What all views of an explanation show: each sentence of the answer, with the strongest parts of the input."""

from __future__ import annotations

from dataclasses import dataclass

from normscope.explain.groups import TokenGroup
from normscope.explain.result import FIRST, NOTHING, PROMPT, Explanation
from normscope.inputs.item import ANSWER
from normscope.inputs.marked_text import REST

STRONGEST = 4  # parts of the input listed beside a sentence


@dataclass(frozen=True)
class ExplainedPart:
    """A part of the input, and its score."""

    name: str
    score: float


@dataclass(frozen=True)
class ExplainedSentence:
    """A sentence of the answer with what it rests on."""

    text: str
    tokens: tuple[int, ...]  # places in the answer
    value: float
    parts: tuple[ExplainedPart, ...]  # the parts with the largest scores, the largest first
    first: float  # the first token of the text, apart
    answer: float  # the answer so far
    nothing: float  # the remainder


def explained_sentences(told: Explanation) -> tuple[ExplainedSentence, ...]:
    """The sentences of the answer, each with the sources that raise or lower it most; the sentences of the input if no
    sources were given. The first token of the text and the answer so far are apart."""
    rows = told.grouped("sentence").rows
    table, remainders = told.scores.double(), told.remainder.double()
    first = next(n for n, label in enumerate(told.columns) if label.side == told.rows[0].side)
    answer = [k for k in told.sources.get(ANSWER, ()) if k != first]
    found = []
    for row in rows:
        scores = table[list(row.places)].sum(0)
        parts = [
            ExplainedPart(one.name, float(scores[[k for k in one.places if k != first]].sum()))
            for one in explained_groups(told)
            if any(k != first for k in one.places)
        ]
        left = float(remainders[list(row.places)].sum())
        parts.sort(key=lambda part: -abs(part.score))
        found.append(
            ExplainedSentence(
                "".join(row.name.splitlines()),
                row.places,
                float(scores.sum()) + left,
                tuple(parts[:STRONGEST]),
                float(scores[first]),
                float(scores[answer].sum()),
                left,
            )
        )
    return tuple(found)


def explained_groups(told: Explanation) -> tuple[TokenGroup, ...]:
    """The parts of the input: its sources, or its pictures and sentences if none were given."""
    named = [name for name in told.sources if name not in (PROMPT, ANSWER, REST)]
    if PROMPT not in told.sources:
        return tuple(TokenGroup(name, told.sources[name]) for name in (*named, REST) if told.sources.get(name))
    places = set(told.sources[PROMPT])
    groups = told.grouped(inputs="sentence").columns
    pictures = [TokenGroup(name, told.sources[name]) for name in named]
    return (*pictures, *(TokenGroup(one.name, one.places) for one in groups if set(one.places) <= places))


def explained_shares(told: Explanation) -> list[ExplainedPart]:
    """`Explanation.shares` in the order in which views list them."""
    last = (REST, ANSWER, FIRST, NOTHING)
    shares = told.shares
    order = [name for name in shares if name not in last] + [name for name in last if name in shares]
    return [ExplainedPart(name, shares[name]) for name in order]
