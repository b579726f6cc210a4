"""An answer of the library against the judge's."""

from typing import Any

from tests.attacks.comparing import Difference, differences, places
from tests.attacks.flowing import flow_maps
from tests.attacks.judge import Verdict
from tests.attacks.judging import NEAR, limit
from tests.attacks.outcome import RIGHT, WARNED, Outcome
from tests.attacks.question import Question
from tests.attacks.recording import NoAnswer
from tests.attacks.subject import Subject


def decide(
    outcome: Outcome, made: Any, said: list[str], verdicts: list[Verdict], question: Question, subject: Subject
) -> None:
    if not verdicts:
        outcome.why = f"a result although there is no answer: {outcome.judged}"
        return
    apart: list[Difference] = []
    for verdict in verdicts:
        try:
            compare(made, verdict, question, subject)
        except Difference as error:
            apart.append(error)
        except NoAnswer as error:
            apart.append(Difference(f"a result although there is no answer: {error}"))
        else:
            apart.append(Difference("", 0.0))
    best = min(apart, key=lambda one: one.size)
    closes = verdicts[0].error_in(question.part) <= limit(subject)
    if closes and best.size == 0:
        outcome.kind = RIGHT
    elif best.size <= NEAR and any(incomplete(message) for message in said):
        outcome.kind, outcome.why = WARNED, "nearly complete"
    elif not closes:
        outcome.why = f"a result although there is no answer: {outcome.judged}"
    else:
        outcome.why = f"differs: {best}"


def incomplete(message: str) -> bool:
    """True if a warning is the library's about a slightly incomplete decomposition."""
    return "miss" in message and "own vector" in message


def compare(made: Any, verdict: Verdict, question: Question, subject: Subject) -> None:
    exact = limit(subject) < 1e-4
    tolerance = max(1e-7 if exact else 1e-5, 30 * verdict.error_in(question.part))
    if question.kind == "flow":
        compare_flow(made, verdict, subject, tolerance)
        return
    if question.kind == "vectors":
        compare_vectors(made, verdict, question.options["layers"][0], tolerance)
        return
    heads = question.options.get("heads")
    differences(made, verdict, tolerance, question.part, heads if isinstance(heads, list) else None)


def compare_vectors(made: Any, verdict: Verdict, layer: int, tolerance: float) -> None:
    result, scope, parts = made
    judged = list(verdict.layers.values())[-1][layer].own
    assert judged is not None
    across, down = places(result.columns), places(result.rows)
    for name, found, expected in (
        ("vectors", parts.contributions[down][:, across], judged.vectors[scope]),
        ("bias", parts.bias[down], judged.bias[scope]),
        ("actual", parts.actual[down], judged.actual[scope]),
    ):
        if found.shape != expected.shape:
            raise Difference(f"{name} of {scope}: {tuple(found.shape)}, expected {tuple(expected.shape)}")
        size = max(float(one[scope].norm(dim=-1).max()) for one in (judged.vectors, judged.bias, judged.actual))
        off = float((found.double() - expected).norm(dim=-1).max()) / max(size, 1e-30)
        if not off <= 10 * tolerance:
            raise Difference(f"{name} of {scope}", off if off == off else float("inf"))


def compare_flow(made: Any, verdict: Verdict, subject: Subject, tolerance: float) -> None:
    flow, maps = made
    expected, error = flow_maps(verdict, limit(subject) * 10)
    if error > 10 * limit(subject):
        raise NoAnswer(f"the flow does not close, {error:.1e}")
    maps = maps[:, places(flow.rows)][:, :, places(flow.columns)]
    if maps.shape != expected.shape:
        raise Difference(f"flow of the shape {tuple(maps.shape)}, expected {tuple(expected.shape)}")
    size = float(((maps.double() - expected).abs() / expected.amax(-1, keepdim=True).clamp_min(1e-30)).max())
    if not size <= 10 * tolerance + 30 * error:
        raise Difference("flow", size)
    if flow.to is not None:
        compare_target(flow, verdict, 1e-5 if tolerance < 1e-5 else 1e-3)


def compare_target(flow: Any, verdict: Verdict, tolerance: float) -> None:
    """The value must be the model's own logit, and the scores must sum to it."""
    assert verdict.output is not None
    logits = verdict.output[0]
    own = logits.reshape(-1, logits.shape[-1])[-1, flow.info["target"]]
    size = max(abs(float(own)), float(flow.scores.abs().sum()))
    for found in (flow.value, float(flow.scores.sum()) + flow.remainder):
        off = abs(found - float(own)) / max(size, 1e-30)
        if not off <= tolerance:
            raise Difference("the target", off if off == off else float("inf"))
