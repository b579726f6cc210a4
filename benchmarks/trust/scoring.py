"""The methods that are compared: each gives every source of a question one score for the answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.trust.tasks import Question
from normscope import Analyzer, NormscopeError

RANDOM, ABLATION = "random", "leave one out"


@dataclass(frozen=True)
class Scorer:
    """A method with its options, as keyword arguments of `Analyzer.flow`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


SCORERS = (
    Scorer("exact"),
    Scorer("exact, runner-up", {"against": "runner-up"}),
    Scorer("exact, log-probability", {"log_prob": True}),
    Scorer("exact, frozen gate", {"gate": "frozen"}),
    Scorer("exact, tangent gate", {"gate": "tangent"}),
    Scorer("decompx", {"method": "decompx"}),
    Scorer("alti", {"method": "alti"}),
    Scorer("alti_logit", {"method": "alti_logit"}),
    Scorer("rollout", {"method": "rollout"}),
    Scorer("rollout:attention", {"method": "rollout:attention"}),
    Scorer("rollout:layer", {"method": "rollout:layer"}),
    Scorer("value_zeroing", {"method": "value_zeroing"}),
    Scorer("gradient_x_input", {"method": "gradient_x_input"}),
    Scorer("gradient_x_input, runner-up", {"method": "gradient_x_input", "against": "runner-up"}),
    Scorer("integrated_gradients", {"method": "integrated_gradients:20"}),
    Scorer("integrated_gradients, runner-up", {"method": "integrated_gradients:20", "against": "runner-up"}),
)


@dataclass(frozen=True)
class Scored:
    """The scores of the sources and of the tokens, and the seconds of processor time; or why there are none."""

    sources: tuple[float, ...] = ()
    tokens: tuple[float, ...] = ()
    seconds: float = 0.0
    refusal: str = ""


def score_sources(lens: Analyzer, scorer: Scorer, question: Question, target: int) -> Scored:
    """The scores of one method: those of its tokens, added up over each source."""
    start = time.process_time()
    sources = {f"s{n}": span for n, span in enumerate(question.spans())}
    try:
        flow = lens.flow(question.text(), target=target, sources=sources, **scorer.options)
    except NormscopeError as error:
        return Scored(refusal=str(error))
    tokens = flow.scores.double()
    found = tuple(float(tokens[list(flow.sources[name])].sum()) for name in sources)
    return Scored(found, tuple(tokens.tolist()), time.process_time() - start)


def random_scores(question: Question, tokens: int) -> Scored:
    """Scores that know nothing, the same in every run."""
    random = Random(question.name)
    return Scored(tuple(random.random() for _ in question.sentences), tuple(random.random() for _ in range(tokens)))
