"""The judge: every contribution of an attacked model for one input, by the layer calls that really happened.

It claims an answer only if everything closes: at every scope of every call the vectors and the remainder sum to the
model's own vector, the last scope is what the call returned, and the copy with eager attention has the same output as
the model as given. Otherwise it has none, and the only right outcome is a refusal.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from tests.attacks.algebra import Norm
from tests.attacks.changes import settle
from tests.attacks.contributions import own_contributions
from tests.attacks.layer_steps import Reading, Step, steps_of
from tests.attacks.modules_read import norm
from tests.attacks.recording import Call, NoAnswer, callable_of, huggingface, recorded
from tests.helpers.layer_oracle import first
from tests.helpers.oracle_parts import OracleLayer


class Part(NamedTuple):
    """The requested part; None: all."""

    layers: Sequence[int] | None = None
    rows: Sequence[int] | None = None  # of the last side
    scopes: Sequence[str] | None = None


@dataclass(eq=False)
class JudgedLayer:
    """One layer call: its steps, and the contributions of the tokens that entered it; or the reason for having none."""

    x: Tensor
    y: Tensor
    steps: list[Step] = field(default_factory=list)
    prefix: int = 0  # virtual keys before the layer's own
    own: OracleLayer | None = None
    errors: dict[str, Tensor] = field(default_factory=dict)  # scope -> (n,) by how much, relative, its sums miss the
    # model's own vectors; "": by how much the last misses what the layer returned
    reason: str = ""


@dataclass
class Verdict:
    """The judge's findings; `error` is the error of the output with eager attention."""

    layers: dict[str, list[JudgedLayer]]
    error: float
    keep: dict[str, Tensor]
    output: Tensor | None = None  # of the model as given
    encoder_tail: tuple[Norm | None, Tensor] | None = None  # the norm after the encoder, and its output

    def asked(self, numbers: Sequence[int] | None) -> list[JudgedLayer]:
        """The layers with these numbers, on every side."""
        return [
            layer
            for layers in self.layers.values()
            for n, layer in enumerate(layers)
            if numbers is None or n in numbers
        ]

    def error_in(self, part: Part = Part()) -> float:  # noqa: B008  (it is frozen)
        """The largest error in the requested part."""
        last = list(self.layers.values())[-1]
        worst = self.error
        for layer in self.asked(part.layers):
            for scope in needed(layer, part.scopes):
                some = layer.errors.get(scope)
                if some is not None and part.rows is not None and layer in last:
                    some = some[list(part.rows)]
                worst = max(worst, float("inf") if some is None else finite(float(some.max())))
        return worst

    def reason_in(self, part: Part = Part()) -> str:  # noqa: B008
        reasons = [layer.reason for layer in self.asked(part.layers) if layer.reason]
        return reasons[0] if reasons else f"it does not close, {self.error_in(part):.1e}"


def needed(layer: JudgedLayer, scopes: Sequence[str] | None) -> list[str]:
    """The sums that must close for these scopes: their own, and those of all scopes before them."""
    known = [scope for scope in layer.errors if scope]
    if scopes is None:
        return [*known, ""]
    names = {known[0] if scope.endswith("-W") and known else scope for scope in scopes}
    if not names <= set(known):
        return ["unknown"]
    return known[: max(known.index(name) for name in names) + 1]


def plain(model: Any, encoding: Mapping[str, Any], **options: Any) -> Tensor:
    """The model's own output: logits, or the last hidden states."""
    with torch.no_grad():
        made = callable_of(model)(**encoding, **options)
    found = made if isinstance(made, tuple) else tuple(made.values())
    return next(one for one in found if isinstance(one, Tensor) and one.dim() > 1)


@torch.no_grad()
def judge(
    model: Any, name: str, encoding: Mapping[str, Any], expected: Tensor | None, remainder: bool = False, **options: Any
) -> Verdict:
    """The verdict on a copy of the attacked model, which is used up, and one input (batch 1).

    `expected` is the output of the model as given; `remainder`: value biases belong to no token.
    """
    inside = huggingface(model)
    eager(model)
    extra = {"output_attentions": True} if name in ("deberta-v2", "mpnet") else {}
    tails: list[tuple[Tensor, Tensor]] = []
    tail = encoder_norm(inside, name)
    if tail is not None:
        handle = tail.register_forward_hook(lambda module, args, made: tails.append((args[0], made)))
    with recorded(model, name) as calls:
        try:
            found = plain(model, encoding, **options, **extra)
        except Exception as error:
            raise NoAnswer(f"the model itself fails with eager attention: {type(error).__name__}") from error
    if not calls:
        raise NoAnswer("no layer was called")
    keep = kept(inside, calls, encoding)
    verdict = Verdict({}, output_error(found, expected, keep), keep, expected)
    settle(model)
    model.double()
    for call in calls:
        verdict.layers.setdefault(call.side, []).append(judged_call(call, keep, remainder))
    for layers in verdict.layers.values():
        same_columns(layers)
    if tail is not None:
        handle.remove()
        if len(tails) == 1:
            given, made = (one.reshape(-1, one.shape[-1])[keep["encoder"]].double() for one in tails[0])
            with contextlib.suppress(NoAnswer):
                verdict.encoder_tail = norm(tail, tails[0][0].shape, given, made, keep["encoder"]), made
    return verdict


def same_columns(layers: list[JudgedLayer]) -> None:
    """A layer with a window may see the last of the virtual keys only: the others are columns of zeros."""
    most = max(layer.prefix for layer in layers)
    for layer in layers:
        less = most - layer.prefix
        if less and layer.own is not None:
            own, layer.prefix = layer.own, most
            own.vectors = {scope: pad(some, (0, 0, less, 0)) for scope, some in own.vectors.items()}
            own.weights, own.value_norms = (pad(one, (less, 0)) for one in (own.weights, own.value_norms))


def output_error(found: Tensor, expected: Tensor | None, keep: Mapping[str, Tensor]) -> float:
    """How far the output with eager attention is from that of the model as given, at the real tokens."""
    if expected is None:
        return 0.0
    if found.shape != expected.shape:
        raise NoAnswer("eager attention gives an output of another shape")
    last = keep.get("decoder", keep.get("encoder"))
    if found.dim() == 3 and last is not None and found.shape[1] == len(last):
        found, expected = found[:, last], expected[:, last]
    return apart(found, expected)


def encoder_norm(inside: PreTrainedModel, name: str) -> Any:
    """The norm after the last layer of an encoder that a decoder reads."""
    encoder: Any = getattr(inside.base_model, "encoder", None)
    if name not in ("t5", "t5-gated", "whisper") or encoder is None:
        return None
    return getattr(encoder, "final_layer_norm", getattr(encoder, "layer_norm", None))


def eager(model: nn.Module) -> None:
    """Eager attention everywhere, also in a layer that has its own config."""
    for module in model.modules():
        config = vars(module).get("config")
        if getattr(config, "_attn_implementation", None) is not None:
            config._attn_implementation_internal = "eager"
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation("eager")
            if any(hasattr(inner, "experts") for inner in module.modules()):
                module.set_experts_implementation("eager")


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest number; NaN is infinitely far from anything but NaN."""
    finite_ = ~(found.isnan() & expected.isnan())
    found, expected = found.double()[finite_], expected.double()[finite_]
    if not expected.numel():
        return 0.0
    size = max(float(expected.abs().max()), 1e-30)
    worst = float((found - expected).abs().max() / size)
    return worst if worst == worst else float("inf")


def kept(inside: PreTrainedModel, calls: Sequence[Call], encoding: Mapping[str, Any]) -> dict[str, Tensor]:
    """side -> its real tokens; virtual tokens in front of those of the encoding are real."""
    found: dict[str, Tensor] = {}
    sides = {call.side: call for call in reversed(calls)}
    for side, call in sides.items():
        n = call.x.shape[-2]
        key = "decoder_attention_mask" if side == "decoder" and len(sides) == 2 else "attention_mask"
        mask = encoding.get(key)
        if mask is None or (key == "attention_mask" and "input_features" in encoding):
            found[side] = torch.ones(n, dtype=torch.bool)
            continue
        own = torch.as_tensor(mask).reshape(-1).bool()
        if len(own) > n:
            raise NoAnswer("fewer tokens than the mask has")
        found[side] = torch.cat([torch.ones(n - len(own), dtype=torch.bool), own])
    return found


def missing(own: OracleLayer) -> dict[str, Tensor]:
    """scope -> (n,): the distance of the sums from the model's own vectors."""
    found = {}
    for scope, actual in own.actual.items():
        error = (own.vectors[scope].sum(1) + own.bias[scope] - actual).norm(dim=-1)
        length = torch.maximum(actual.norm(dim=-1), own.vectors[scope].norm(dim=-1).amax(1)).clamp_min(1e-30)
        found[scope] = (error / length).detach()
    return found


def finite(value: float) -> float:
    return value if value == value else float("inf")


FORM = (
    LookupError,
    AttributeError,
    TypeError,
    RuntimeError,
    ValueError,
    AssertionError,
    ArithmeticError,
    StopIteration,
)


def judged_call(call: Call, keep: Mapping[str, Tensor], remainder: bool) -> JudgedLayer:
    """The steps of one call, and the contributions of the tokens that entered the layer."""
    try:
        read = Reading(call, keep)
        x, y = (one.reshape(-1, one.shape[-1])[read.keep].double() for one in (call.x, first(call.output)))
    except FORM as error:
        raise NoAnswer(f"a layer does not output vectors: {type(error).__name__}") from error
    judged = JudgedLayer(x, y)
    with reasoned(judged):
        for step in steps_of(read, y):  # as far as the layer is what it should be
            judged.steps.append(step)
    with reasoned(judged):
        judged.own, judged.prefix = own_contributions(x, judged.steps, remainder)
        judged.errors = missing(judged.own)
        last = judged.own.actual[list(judged.own.actual)[-1]]
        if not judged.reason:
            judged.errors[""] = (y - last).norm(dim=-1) / y.norm(dim=-1).clamp_min(1e-30)
    return judged


@contextlib.contextmanager
def reasoned(judged: JudgedLayer) -> Iterator[None]:
    """The reason why a layer has no answer, or none from some scope on."""
    try:
        yield
    except NoAnswer as error:
        judged.reason = judged.reason or str(error)
    except FORM as error:
        judged.reason = judged.reason or f"a layer is not of the family's form: {type(error).__name__} {error}"
