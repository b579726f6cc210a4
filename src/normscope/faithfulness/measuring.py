"""The corpus measure behind `normscope faithfulness`: all contexts of an entry, all methods, all shares of tokens."""

from __future__ import annotations

from math import nan
from typing import Any

from normscope.corpus.measuring import Columns, Sample, register
from normscope.faithfulness.contexts import Context, contexts, random_of
from normscope.faithfulness.predicting import Erased, Prediction, logits_of, neutral, predictions
from normscope.faithfulness.scoring import (
    LEAVE_ONE_OUT,
    RANDOM,
    Scored,
    by_flow,
    leave_one_out,
    methods_of,
    refusal,
)
from normscope.faithfulness.settings import Settings, from_plain
from normscope.measures.faithfulness import all_but, ranking, removed

# Shares of the tokens that are taken away, or kept: those of ERASER (1, 5, 10, 20, 50 %), those of DecompX (10 to
# 90 %), nothing and everything.
SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
NOTHING = Erased("mask", frozenset())


@register("faithfulness", scopes=("weights",), whole=True)
def faithfulness(sample: Sample) -> Columns:
    """position, method -> scores of the tokens; the target's probability and the model's choice without the top share
    of the tokens and with nothing else, by masking and by deletion; or the reason why the method has no scores"""
    settings = from_plain(sample.settings)
    rows: list[dict[str, Any]] = []
    for context in contexts(sample.lens, sample.item, sample.entry.label, sample.entry.id, settings):
        rows += _rows(sample, context, settings)
    return {key: [row[key] for row in rows] for key in rows[0]}


def _rows(sample: Sample, context: Context, settings: Settings) -> list[dict[str, Any]]:
    lens = sample.lens
    replacement = neutral(lens, settings.replacement)
    (logits,) = logits_of(lens, context, [NOTHING], replacement)
    choice = int(logits.argmax())
    target = choice if settings.target == "top" or context.given is None else context.given
    full = Prediction(float(logits.softmax(-1)[target]), choice)
    found = {method: _scored(sample, context, method, target, full, settings) for method in _methods(sample, settings)}
    asked = {
        (method, erasure): _removals(one, context, erasure)
        for method, one in found.items()
        if not one.reason
        for erasure in settings.erasures
    }
    distinct = [one for both in asked.values() for some in both for one in some if one.tokens]
    known = predictions(lens, context, target, distinct, replacement)
    common = {
        "position": -1 if context.position is None else context.position,
        "tokens": len(context.removable),
        "target": target,
        "given": -1 if context.given is None else context.given,
        "choice": full.choice,
        "probability": full.probability,
    }
    rows = []
    for method, one in found.items():
        row = {"method": method, **common, "reason": one.reason, "scores": list(one.scores)}
        for erasure in settings.erasures:
            both = asked.get((method, erasure), ([], []))
            for name, some in zip(("without", "only"), both, strict=True):
                after = [known.get(erased, full) for erased in some] or [Prediction(nan, -1)] * len(SHARES)
                row[f"{erasure}_{name}"] = [prediction.probability for prediction in after]
                row[f"{erasure}_{name}_choice"] = [prediction.choice for prediction in after]
        rows.append(row)
    return rows


def _methods(sample: Sample, settings: Settings) -> tuple[str, ...]:
    return methods_of(sample.lens, settings.methods)


def _scored(sample: Sample, context: Context, method: str, target: int, full: Prediction, settings: Settings) -> Scored:
    lens = sample.lens
    if method == RANDOM:
        generator = random_of(settings.seed, sample.entry.id, context.position, RANDOM)
        return Scored(tuple(generator.random(len(context.removable)).tolist()))
    if method == LEAVE_ONE_OUT:
        replacement = neutral(lens, settings.replacement)
        each = {n: Erased("mask", frozenset([n])) for n in context.removable}
        known = predictions(lens, context, target, list(each.values()), replacement)
        return leave_one_out(full.probability, {n: known[one].probability for n, one in each.items()}, context)
    reason = refusal(lens, method)
    return Scored(reason=reason) if reason else by_flow(lens, context, method, target)


def _removals(scored: Scored, context: Context, erasure: str) -> tuple[list[Erased], list[Erased]]:
    """What is taken away at each share: the top of the ranking, and all but it."""
    order = [context.removable[n] for n in ranking(scored.scores)]
    return (
        [Erased(erasure, removed(order, share)) for share in SHARES],
        [Erased(erasure, all_but(order, share)) for share in SHARES],
    )
