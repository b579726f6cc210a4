"""The judge of flows: the input tokens as sources, carried through every layer call that happened, one after the other.

Attention weights, norm statistics, the shares of activations and routing are frozen, as in the judge's layers; biases
go to the remainder. Everything together must sum to the model's own states after the last layer.
"""

import torch
from torch import Tensor

from tests.attacks import algebra
from tests.attacks.contributions import walk
from tests.attacks.judge import JudgedLayer, Verdict, finite
from tests.attacks.layer_steps import Step
from tests.attacks.modules_read import close, zeros
from tests.attacks.recording import NoAnswer
from tests.helpers.layer_oracle import State


@torch.no_grad()
def flow_maps(verdict: Verdict, tolerance: float) -> tuple[Tensor, float]:
    """(layers, n, columns) of the last side: virtual keys, its own tokens, the encoder's; and by how much the sums
    miss."""
    sides = [side for side in ("decoder", "encoder") if side in verdict.layers]
    for layer in verdict.asked(None):
        if layer.reason:
            raise NoAnswer(layer.reason)
    virtual = {layer.prefix for layer in verdict.asked(None)}
    if len(virtual) > 1 or (len(sides) == 2 and virtual != {0}):
        raise NoAnswer("virtual keys of some layers or sides only")
    (prefix,) = virtual
    counts = [len(verdict.layers[side][0].x) for side in sides]
    encoder: State | None = None
    worst = 0.0
    found: list[State] = []
    for side in reversed(sides):
        begin = prefix if side == sides[0] else counts[0]
        found = through(verdict.layers[side], begin, prefix + sum(counts), encoder, tolerance)
        worst = max(worst, *(missing(state) for state in found))
        encoder = behind_encoder(found[-1], verdict) if len(sides) == 2 and side == "encoder" else None
    return torch.stack([state.vectors.norm(dim=-1) for state in found]), worst


def through(
    layers: list[JudgedLayer], begin: int, columns: int, encoder: State | None, tolerance: float
) -> list[State]:
    """The states after each layer of one side."""
    x = layers[0].x
    vectors = zeros(len(x), columns, x.shape[1])
    vectors[torch.arange(len(x)), begin + torch.arange(len(x))] = x
    state, found = State(vectors, torch.zeros_like(x), x), []

    def attend(step: Step, given: State) -> State:
        source = encoder if step.cross else given
        assert step.weights is not None
        assert step.values is not None
        assert step.out is not None
        assert step.bias is not None
        assert step.actual is not None
        assert step.read is not None
        if source is None or not close(source.actual, step.read, tolerance):
            raise NoAnswer("the values are read from something else")
        if step.values.weight is None:
            raise NoAnswer("the values are not an affine map")
        return algebra.carry(step.weights, source, step.values, step.out, step.bias, step.actual)

    for layer in layers:
        if not close(layer.x, state.actual, tolerance):
            raise NoAnswer("something lies between two layers")
        if any(step.role == "unknown" for step in layer.steps):
            raise NoAnswer("a norm is none")
        scopes = walk(state, layer.steps, attend)
        state = scopes[list(scopes)[-1]]
        found.append(state)
    return found


def behind_encoder(state: State, verdict: Verdict) -> State:
    if verdict.encoder_tail is None:
        return state
    norm, actual = verdict.encoder_tail
    return state._replace(actual=actual) if norm is None else algebra.normalise(state, norm, actual)


def missing(state: State) -> float:
    error = (state.vectors.sum(1) + state.bias - state.actual).norm(dim=-1)
    length = torch.maximum(state.actual.norm(dim=-1), state.vectors.norm(dim=-1).amax(1)).clamp_min(1e-30)
    return finite(float((error / length).max()))
