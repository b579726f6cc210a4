"""Contributions through the steps of a layer: those of the tokens that entered it, or of any other sources."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.attacks import algebra
from tests.attacks.layer_steps import Step
from tests.attacks.modules_read import zeros
from tests.attacks.recording import NoAnswer
from tests.helpers.layer_oracle import State
from tests.helpers.oracle_parts import OracleLayer


def own_contributions(x: Tensor, steps: Sequence[Step], remainder: bool) -> tuple[OracleLayer, int]:
    """Contributions of every token of the layer. Columns: virtual keys, the tokens, the encoder's tokens."""
    n = len(x)
    attentions = {step.cross: step for step in steps if step.role == "attention"}
    self_weights = attentions[False].weights
    assert self_weights is not None
    prefix = self_weights.shape[2] - n
    cross = attentions[True].weights if True in attentions else None
    columns = prefix + n + (0 if cross is None else cross.shape[2])
    vectors = zeros(n, columns, x.shape[1])
    vectors[torch.arange(n), prefix + torch.arange(n)] = x
    scopes = walk(State(vectors, torch.zeros_like(x), x), steps, own_attention(columns, prefix + n, remainder))
    norms = {kind: value_norms(step, remainder) for kind, step in attentions.items()}
    return OracleLayer(
        weights=self_weights,
        cross_weights=cross,
        value_norms=norms[False],
        cross_value_norms=norms.get(True),
        vectors={f"{scope}-N": state.vectors for scope, state in scopes.items()},
        bias={f"{scope}-N": state.bias for scope, state in scopes.items()},
        actual={f"{scope}-N": state.actual for scope, state in scopes.items()},
    ), prefix


def value_norms(step: Step, remainder: bool) -> Tensor:
    """(H, keys) ||v^h_j W_O^h||."""
    assert step.values is not None
    assert step.out is not None
    each = step.values.each
    if remainder and step.values.weight is not None:
        each = each - step.values.of_no_token()
    return torch.einsum("hjk,hkd->hjd", each, step.out).norm(dim=-1)


Attend = Callable[[Step, State], State]


def own_attention(columns: int, own: int, remainder: bool) -> Attend:
    """The keys of an attention are columns: its own tokens' first, or the encoder's last."""

    def attend(step: Step, state: State) -> State:
        assert step.weights is not None
        assert step.values is not None
        assert step.out is not None
        assert step.bias is not None
        assert step.actual is not None
        held = step.weights, step.values, step.out, step.bias, step.actual
        if not remainder:
            made = algebra.attend(step.weights, step.values.each, *held[2:])
        elif step.values.weight is None:
            raise NoAnswer("the values have no constant part: they are not an affine map")
        else:
            made = algebra.attend_without_constants(*held)
        gap = zeros(len(made.vectors), columns - made.vectors.shape[1], made.vectors.shape[2])
        return made._replace(vectors=torch.cat((gap, made.vectors) if step.cross else (made.vectors, gap), dim=1))

    return attend


def walk(state: State, steps: Sequence[Step], attend: Attend) -> dict[str, State]:
    """Contributions of any sources through a layer: scope -> state."""
    scopes: dict[str, State] = {}
    total = entered = state
    for step in steps:
        if step.role == "begin":
            total = entered = state
            continue
        if step.role == "branch":
            state = entered
            continue
        if step.role == "add":
            scale = 1 if step.scale is None else step.scale
            total = State(total.vectors + scale * state.vectors, total.bias + scale * state.bias, total.actual)
            continue
        assert step.actual is not None
        if step.role in ("norm", "unknown"):
            through = step.norm
            state = (
                state._replace(actual=step.actual)
                if through is None
                else algebra.normalise(state, through, step.actual)
            )
        elif step.role == "attention":
            state = attend(step, state)
        elif step.role == "ff":
            state = algebra.feed_forward(state, step.units, step.actual)
        else:
            state = total._replace(actual=step.actual)
        if step.scope is not None:
            scopes[step.scope] = state
    return scopes
