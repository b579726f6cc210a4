"""Corpus measure of `normscope faithfulness`: all contexts of an entry, all methods, all shares of tokens."""

from __future__ import annotations

from math import nan
from typing import Any

from normscope.corpus.measure_registry import Columns, Sample, register_measure
from normscope.measures.faithfulness import (
    faithfulness_all_but_top_tokens,
    faithfulness_token_ranking,
    faithfulness_top_tokens,
)
from normscope.papers.faithfulness import scores
from normscope.papers.faithfulness.contexts import Context, named_generator, prediction_contexts
from normscope.papers.faithfulness.predictions import (
    Erased,
    Prediction,
    erased_logits,
    erased_predictions,
    replacement_token,
)
from normscope.papers.faithfulness.scores import LEAVE_ONE_OUT, RANDOM, TokenScores
from normscope.papers.faithfulness.settings import Settings, settings_from_plain

# Shares of the tokens that are removed or kept: those of ERASER (1, 5, 10, 20, 50 %) and of DecompX (10 to 90 %), none
# and all.
SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
NOTHING = Erased("mask", frozenset())


@register_measure("faithfulness", scopes=("weights",), whole=True)
def measure_faithfulness(sample: Sample) -> Columns:
    """position, method -> token scores; the target's probability and the model's choice without the top share of tokens
    and with only these, by masking and by deletion; or the reason why the method has no scores"""
    settings = settings_from_plain(sample.settings)
    rows: list[dict[str, Any]] = []
    for context in prediction_contexts(sample.lens, sample.item, sample.entry.label, sample.entry.id, settings):
        rows += _method_rows(sample, context, settings)
    return {key: [row[key] for row in rows] for key in rows[0]}


def _method_rows(sample: Sample, context: Context, settings: Settings) -> list[dict[str, Any]]:
    lens = sample.lens
    replacement = replacement_token(lens, settings.replacement)
    (logits,) = erased_logits(lens, context, [NOTHING], replacement)
    choice = int(logits.argmax())
    target = choice if settings.target == "top" or context.given is None else context.given
    full = Prediction(float(logits.softmax(-1)[target]), choice)
    methods = scores.compared_methods(lens, settings.methods)
    found = {method: _method_scores(sample, context, method, target, full, settings) for method in methods}
    asked = {
        (method, erasure): _erased_tops(one, context, erasure)
        for method, one in found.items()
        if not one.reason
        for erasure in settings.erasures
    }
    distinct = [one for both in asked.values() for some in both for one in some if one.tokens]
    known = erased_predictions(lens, context, target, distinct, replacement)
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
        row = {"method": method, **common, "reason": one.reason, "scores": list(one.values)}
        for erasure in settings.erasures:
            both = asked.get((method, erasure), ([], []))
            for name, some in zip(("without", "only"), both, strict=True):
                after = [known.get(erased, full) for erased in some] or [Prediction(nan, -1)] * len(SHARES)
                row[f"{erasure}_{name}"] = [prediction.probability for prediction in after]
                row[f"{erasure}_{name}_choice"] = [prediction.choice for prediction in after]
        rows.append(row)
    return rows


def _method_scores(
    sample: Sample, context: Context, method: str, target: int, full: Prediction, settings: Settings
) -> TokenScores:
    lens = sample.lens
    if method == RANDOM:
        generator = named_generator(settings.seed, sample.entry.id, context.position, RANDOM)
        return TokenScores(tuple(generator.random(len(context.removable)).tolist()))
    if method == LEAVE_ONE_OUT:
        replacement = replacement_token(lens, settings.replacement)
        each = {n: Erased("mask", frozenset([n])) for n in context.removable}
        known = erased_predictions(lens, context, target, list(each.values()), replacement)
        return scores.leave_one_out_scores(
            full.probability, {n: known[one].probability for n, one in each.items()}, context
        )
    reason = scores.method_refusal(lens, method)
    return TokenScores(reason=reason) if reason else scores.flow_token_scores(lens, context, method, target)


def _erased_tops(found: TokenScores, context: Context, erasure: str) -> tuple[list[Erased], list[Erased]]:
    """The tokens removed at each share: the top of the ranking, and everything except the top."""
    order = [context.removable[n] for n in faithfulness_token_ranking(found.values)]
    return (
        [Erased(erasure, faithfulness_top_tokens(order, share)) for share in SHARES],
        [Erased(erasure, faithfulness_all_but_top_tokens(order, share)) for share in SHARES],
    )
