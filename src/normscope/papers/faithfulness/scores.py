"""Token scores of a context: by the methods of `flow`, and by references that only need predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError
from normscope.flow.methods import METHODS
from normscope.flow.resolve import TargetRequest
from normscope.flow.run import find_method, run_flow
from normscope.models.scopes import scope_names
from normscope.papers.faithfulness.contexts import Context

LEAVE_ONE_OUT = "leave_one_out"
RANDOM = "random"
REFERENCES = (LEAVE_ONE_OUT, RANDOM)
GRADIENT = "gradient_x_input"


@dataclass(frozen=True)
class TokenScores:
    """The scores of the removable tokens, or the reason why a method has none."""

    values: tuple[float, ...] = ()
    reason: str = ""


def compared_methods(lens: Analyzer, wanted: Sequence[str] = ()) -> tuple[str, ...]:
    """The methods to compare, by default all of `flow` with rollout of every scope; then the references."""
    known = [name for name in METHODS if name != "rollout-raw"]
    # "rollout" without a scope already uses the weights with half a residual connection.
    scopes = [f"rollout:{scope}" for scope in scope_names(lens.loaded.stacks[-1].blocks) if not scope.endswith("RES-W")]
    for name in wanted:
        plain = name.partition(":")[0]
        if plain not in METHODS and name not in REFERENCES:
            raise NormscopeError(f"Unknown method {name!r}. Known: {', '.join((*known, *scopes, *REFERENCES))}.")
    # Random scores, the baseline, are always included.
    return tuple(dict.fromkeys([*(wanted or (*known, *scopes, LEAVE_ONE_OUT)), RANDOM]))


def method_refusal(lens: Analyzer, method: str) -> str:
    """Why a method does not apply to a model; empty if it does."""
    if method in REFERENCES:
        return ""
    try:
        find_method(lens.loaded, method)
    except NormscopeError as error:
        return str(error)
    return ""


def flow_token_scores(lens: Analyzer, context: Context, method: str, target: int) -> TokenScores:
    """The scores of a `flow` method for the target's logit."""
    try:
        request = TargetRequest(target, context.position)
        found = run_flow(lens.loaded, context.item, method, request, "ig", lens.workspace)
    except NormscopeError as error:
        return TokenScores(reason=str(error))
    places = {label.position: n for n, label in enumerate(found.columns)}
    scores = found.scores.double().cpu()[torch.tensor([places[n] for n in context.removable])]
    if not bool(torch.isfinite(scores).all()):
        return TokenScores(reason="some scores are not finite")
    return TokenScores(tuple(scores.tolist()))


def leave_one_out_scores(full: float, without: Mapping[int, float], context: Context) -> TokenScores:
    """``p(x) - p(x without the token)`` for each token."""
    return TokenScores(tuple(full - without[n] for n in context.removable))
