"""Corpus measures that explain: every token of an answer by its sources, and a target by input token.

Their settings are arguments of `Analyzer.explain` and `Analyzer.flow`, by the name of the measure:
``settings={"explain": {"generate": 20}, "target_scores": {"target": "top"}}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from normscope.corpus.measure_registry import Columns, Sample, register_measure
from normscope.errors import NormscopeError
from normscope.flow.resolve import TargetRequest
from normscope.flow.run import check_flow_gate, run_flow

EXPLANATION = ("answer", "position", "token", "target", "source", "score", "value", "completeness", "probability")
SCORES = ("target", "input_side", "position", "token", "score", "value", "remainder", "completeness")
NO_INPUT = "(no input)"
EXPLAIN_OPTIONS = ("generate", "against", "gate", "sources", "template", "truncation")
FLOW_OPTIONS = ("target", "position", "against", "log_prob", "method", "gate")


@register_measure("explain", scopes=("layer",), whole=True)
def measure_explanation(sample: Sample) -> Columns:
    """answer, position, token, target, source -> how much of each token of an answer comes from each source, from the
    answer so far and, as "(no input)", from no token; the answer is the target text of the entry, or is generated"""
    rows: list[tuple[Any, ...]] = []
    if _is_last_side(sample):
        options = _settings_of_measure(sample, "explain", EXPLAIN_OPTIONS)
        text, target = sample.entry.text, sample.entry.target
        if text is None:
            raise NormscopeError("Explaining needs entries with a text, not pairs or lists of words.")
        if "generate" not in options:
            if target is None:
                raise NormscopeError(
                    "There is no answer to explain: name the column of the answers with the reader's option target, or "
                    'let the model write one with settings={"explain": {"generate": 20}}.'
                )
            options["answer"] = target if isinstance(target, str) else " ".join(target)
        found = sample.lens.explain(text, alternatives=0, **options)
        sums = {name: found.scores.double()[:, list(columns)].sum(-1) for name, columns in found.sources.items()}
        for n, label in enumerate(found.rows):
            given = (found.answer, label.position, label.token, found.targets[n])
            ends = (float(found.values[n]), float(found.completeness[n]), float(found.probabilities[n]))
            parts = {**{name: float(one[n]) for name, one in sums.items()}, NO_INPUT: float(found.remainder[n])}
            rows += [(*given, source, score, *ends) for source, score in parts.items()]
    return {name: [row[n] for row in rows] for n, name in enumerate(EXPLANATION)}


@register_measure("target_scores", scopes=("layer",), whole=True)
def measure_target_scores(sample: Sample) -> Columns:
    """target, input_side, position, token -> how much of a logit, by default the largest, comes from each input token
    across all layers; the scores and the remainder add up to the value"""
    rows: list[tuple[Any, ...]] = []
    if _is_last_side(sample):
        options: dict[str, Any] = {"target": "top", "method": "exact", "gate": "ig"}
        options |= _settings_of_measure(sample, "target_scores", FLOW_OPTIONS)
        method, gate = options.pop("method"), options.pop("gate")
        check_flow_gate(gate)
        loaded = sample.lens.loaded
        found = run_flow(loaded, sample.item, method, TargetRequest(**options), gate, sample.lens.workspace)
        assert found.to is not None
        ends = (found.to.value, found.to.remainder, found.to.completeness)
        for label, score in zip(found.columns, found.to.scores.double().tolist(), strict=True):
            rows.append((found.to.target, label.side, label.position, label.token, score, *ends))
    return {name: [row[n] for row in rows] for n, name in enumerate(SCORES)}


def _is_last_side(sample: Sample) -> bool:
    """Whether this is the side that has the logits; the encoder of an encoder-decoder is a part of its decoder's."""
    return bool(sample.analysis.info["side"] == sample.lens.loaded.stacks[-1].side)


def _settings_of_measure(sample: Sample, name: str, known: Sequence[str]) -> dict[str, Any]:
    given = sample.settings.get(name, {})
    wrong = sorted(set(given) - set(known)) if isinstance(given, Mapping) else [str(given)]
    if wrong:
        raise NormscopeError(f"The measure {name!r} has no setting {', '.join(wrong)}. It takes {', '.join(known)}.")
    return dict(given)
