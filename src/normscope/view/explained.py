"""What all views of an explanation show: each sentence and token of the answer, with the strongest parts of the
input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.explain.groups import TokenGroup
from normscope.explain.result import FIRST, NOTHING, PROMPT, Explanation
from normscope.inputs.item import ANSWER
from normscope.inputs.marked_text import REST

STRONGEST = 4  # parts of the input listed beside a sentence
STRONGEST_OF_TOKEN = 3
OTHERS = "(other parts)"


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
    parts: tuple[ExplainedPart, ...]  # those with the largest scores, the others, and what is apart; they add up


@dataclass(frozen=True)
class InputParts:
    """The parts of the input that views list, the first token of the text apart."""

    columns: tuple[TokenGroup, ...]
    apart: tuple[str, ...]  # the last columns: the answer so far, the first token, and nothing
    scores: Tensor  # (answer tokens, columns), float64


def explained_sentences(told: Explanation) -> tuple[ExplainedSentence, ...]:
    """The sentences of the answer, each with the sources that raise or lower it most; the sentences of the input if no
    sources were given. The first token of the text and the answer so far are apart."""
    parts = explained_parts(told)
    found = []
    for row in told.grouped("sentence").rows:
        scores = parts.scores[list(row.places)].sum(0)
        listed = _strongest_parts(parts, scores, STRONGEST)
        found.append(ExplainedSentence("".join(row.name.splitlines()), row.places, float(scores.sum()), listed))
    return tuple(found)


def explained_tokens(told: Explanation) -> list[tuple[ExplainedPart, ...]]:
    """For each token of the answer, the parts with the largest scores, the answer so far and the first token among
    them."""
    parts = explained_parts(told)
    names = [one.name for one in parts.columns]
    best = parts.scores.abs().topk(min(STRONGEST_OF_TOKEN, len(names))).indices.tolist()
    rows = zip(parts.scores.tolist(), best, strict=True)
    return [tuple(ExplainedPart(names[k], scores[k]) for k in some if scores[k]) for scores, some in rows]


def explained_parts(told: Explanation, grain: str = "sentence") -> InputParts:
    """The sources, or without sources the prompt's parts of a grain, and what is apart."""
    table = told.scores.double()
    first = next(n for n, label in enumerate(told.columns) if label.side == told.rows[0].side)
    groups = [*_input_groups(told, grain), TokenGroup(ANSWER, tuple(told.sources.get(ANSWER, ())))]
    kept = [TokenGroup(one.name, tuple(k for k in one.places if k != first)) for one in groups]
    columns = [one for one in kept if one.places or one.name == ANSWER]
    scores = [table[:, list(one.places)].sum(-1) for one in columns]
    columns += [TokenGroup(FIRST, (first,)), TokenGroup(NOTHING, ())]
    scores += [table[:, first], told.remainder.double().to(table.device)]
    return InputParts(tuple(columns), (ANSWER, FIRST, NOTHING), torch.stack(scores, dim=1))


def _strongest_parts(parts: InputParts, scores: Tensor, most: int) -> tuple[ExplainedPart, ...]:
    """The parts with the largest scores, the sum of the others, and what is apart, if it is not zero."""
    pairs = zip(parts.columns, scores.tolist(), strict=True)
    every = [ExplainedPart(column.name, score) for column, score in pairs]
    count = len(every) - len(parts.apart)
    ranked = sorted(every[:count], key=lambda part: -abs(part.score))
    others = [ExplainedPart(OTHERS, _total(ranked[most:]))] if len(ranked) > most else []
    return (*ranked[:most], *(part for part in (*others, *every[count:]) if part.score))


def _total(parts: Sequence[ExplainedPart]) -> float:
    return sum(part.score for part in parts)


def _input_groups(told: Explanation, grain: str) -> tuple[TokenGroup, ...]:
    """The parts of the input before the answer: its sources, or if none were given its pictures and its words,
    sentences or lines."""
    named = [name for name in told.sources if name not in (PROMPT, ANSWER, REST)]
    if has_named_sources(told):
        return tuple(TokenGroup(name, told.sources[name]) for name in (*named, REST) if told.sources.get(name))
    places = set(told.sources.get(PROMPT, ()))
    groups = told.grouped(inputs=grain).columns
    pictures = [TokenGroup(name, told.sources[name]) for name in named]
    return (*pictures, *(TokenGroup(one.name, one.places) for one in groups if set(one.places) <= places))


def has_named_sources(told: Explanation) -> bool:
    """Whether the user gave sources."""
    return PROMPT not in told.sources


def explained_shares(told: Explanation) -> list[ExplainedPart]:
    """`Explanation.shares` in the order in which views list them."""
    last = (REST, ANSWER, FIRST, NOTHING)
    shares = told.shares
    order = [name for name in shares if name not in last] + [name for name in last if name in shares]
    return [ExplainedPart(name, shares[name]) for name in order]
