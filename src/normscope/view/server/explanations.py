"""Explanations of what a model of the server writes: checked, run and described for the viewer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError
from normscope.explain.answers import Question, find_answers
from normscope.explain.groups import TokenGroup, group_tokens
from normscope.explain.result import Explanation
from normscope.explain.run import ExplainOptions, run_explanation, steps_to_explain
from normscope.labels import visible_label_text
from normscope.step_progress import follow_steps
from normscope.view.document import SCORE_DIGITS, describe_document_tokens, round_document_numbers
from normscope.view.server.analyses import model_kind, target_kind
from normscope.view.server.jobs import ProgressReport
from normscope.view.server.schemas import ContrastRequest, ExplanationRequest
from normscope.view.wording import VIEWER

ALTERNATIVES = 10  # tokens listed for every token of the answer
GRAINS = ("word", "sentence", "line")


@dataclass(frozen=True)
class ToldExplanation:
    """An explanation as JSON, made in the thread that computes it."""

    body: bytes

    @property
    def size(self) -> int:
        return len(self.body)


def check_explanation_request(lens: Analyzer, request: ExplanationRequest) -> None:
    """Raise if the model writes nothing, or if the request cannot be run."""
    if model_kind(lens) not in ("causal", "encoder-decoder") or target_kind(lens) != "tokens":
        raise NormscopeError("This model does not write text, so it has no answer to explain. Choose one that does.")
    if not request.text.strip():
        raise NormscopeError("The text is empty. Give at least one word.")
    if (request.generate is None) == (request.answer is None):
        raise NormscopeError("Give either a number of tokens to generate or an answer.")


def explanation_request_id(request: ExplanationRequest) -> str:
    """The id of a request; equal requests have the same id."""
    return hashlib.sha256(b"explain" + request.model_dump_json().encode("utf-8", "surrogatepass")).hexdigest()[:32]


def run_server_explanation(
    lens: Analyzer, request: ExplanationRequest, report: ProgressReport[ToldExplanation]
) -> ToldExplanation:
    """Explain every token of the answer; with `contrast`, one of them against another token."""
    loaded = lens.loaded
    options = ExplainOptions(alternatives=ALTERNATIVES)
    try:
        with follow_steps(report, steps_to_explain(loaded, request.generate)):
            (answered,) = find_answers(
                loaded, Question(request.text), request.generate, request.answer, None, options.against
            )
            if request.contrast is not None:
                place = request.contrast.position
                answered = replace(answered, span=slice(place, place + 1))
                options = replace(options, against=_find_token(lens, request.contrast))
            told = run_explanation(loaded, [answered], options)
    except NormscopeError as error:
        raise NormscopeError(VIEWER.reword(str(error))) from error
    return ToldExplanation(json.dumps(describe_explanation(told), allow_nan=False).encode("ascii"))


def _find_token(lens: Analyzer, contrast: ContrastRequest) -> int:
    """The id of a token by its name."""
    tokenizer = lens.loaded.tokenizer
    known = {} if tokenizer is None else tokenizer.get_vocab()
    if contrast.token not in known:
        raise NormscopeError(f"{contrast.token!r} is not a token of this model.")
    return int(known[contrast.token])


def describe_explanation(told: Explanation) -> dict[str, Any]:
    """The explanation for the viewer: tokens, signed scores, and the groups by which they are added up."""

    def rounded(values: Any) -> Any:
        return round_document_numbers(values, SCORE_DIGITS)

    return {
        "columns": describe_document_tokens(told.columns, {}, False),
        "rows": describe_document_tokens(told.rows, {}, False),
        "targets": [visible_label_text(target) for target in told.targets],
        "scores": rounded(told.scores.double()),
        "values": rounded(told.values),
        "remainder": rounded(told.remainder),
        "completeness": rounded(told.completeness),
        "probabilities": rounded(told.probabilities),
        "alternatives": [
            [{"token": one.token, "probability": _round_probability(one.probability)} for one in others]
            for others in told.alternatives
        ],
        "groups": {grain: _group_places(group_tokens(told.columns, told.texts, grain)) for grain in GRAINS},
        "answer_words": _group_places(group_tokens(told.rows, told.texts, "word")),
        "warnings": list(told.warnings),
    }


def _round_probability(probability: float) -> float:
    return float(f"{probability:.4g}")


def _group_places(groups: Sequence[TokenGroup]) -> list[dict[str, Any]]:
    return [{"name": visible_label_text(group.name), "places": list(group.places)} for group in groups]
