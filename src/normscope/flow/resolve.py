"""From a target as the user gives it to directions in the logits or in the last states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.flow.maps import FrozenModel
from normscope.flow.similarity import Similarity, similarity_target
from normscope.flow.spans import TokenSpan, find_token_span, is_span
from normscope.flow.target_names import (
    check_target_position,
    target_has_vocabulary_logits,
    target_logit_index,
    target_logit_name,
    target_logit_row,
)
from normscope.flow.targets import Baseline, Target
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel


@dataclass(frozen=True)
class TargetRequest:
    """A target as the arguments of `Analyzer.flow` give it."""

    target: Any = None
    position: Any = None
    against: Any = None
    log_prob: bool = False
    each: bool = False

    @property
    def in_states(self) -> bool:
        """Whether states are read instead of logits."""
        return isinstance(self.target, Tensor | np.ndarray | Similarity)


def check_target_request(request: TargetRequest) -> None:
    """Refuse arguments that do not fit together."""
    target = request.target
    for name in ("log_prob", "each"):
        if not isinstance(getattr(request, name), bool):
            raise NormscopeError(f"{name} must be True or False, not {getattr(request, name)!r}.")
    check_against(request.against)
    if request.in_states and (request.against is not None or request.log_prob or request.each):
        raise NormscopeError("against=, log_prob= and each= are for logits; this target is a direction in the states.")
    if isinstance(target, tuple):
        if len(target) != 2:
            raise NormscopeError(
                f"A target is one class, token or span, or a tuple of two for their difference, not {len(target)}."
            )
        if request.against is not None:
            raise NormscopeError("A tuple of two targets is a difference already: leave against= out.")
        if is_span(target[0]) != is_span(target[1]):
            raise NormscopeError("The difference of a span and a single logit is not defined: pass two spans.")
    spans = is_span(target[0] if isinstance(target, tuple) else target)
    if spans and request.position is not None:
        raise NormscopeError("A span is read at the positions before its tokens: leave position= out.")
    if request.each and not spans and not isinstance(target, str | tuple):
        raise NormscopeError("each=True explains every token of a span: pass a slice or a Passage as the target.")


def check_against(against: Any) -> None:
    """Refuse what cannot be contrasted with."""
    if isinstance(against, bool) or not isinstance(against, str | int | None):
        raise NormscopeError(
            "against must be 'runner-up', 'mean', a class or token (its id or text), another text, or None, not "
            f"{type(against).__name__} {against!r}."
        )


def resolve_target(loaded: LoadedModel, model: FrozenModel, item: Item, request: TargetRequest) -> Target:
    """The directions that a target means."""
    if isinstance(request.target, Similarity):
        return similarity_target(loaded, model, item, request.target, request.position)
    if request.in_states:
        return _vector_target(loaded, model, request.target, request.position)
    if model.logits is None:
        others = [name for name in model.outputs if name.endswith("logits")]
        has = f"outputs {' and '.join(others)} instead of logits" if others else "has no head"
        raise NormscopeError(
            f"{type(loaded.model).__name__} {has}, so there is no logit to explain. Load the model with another head, "
            "such as AutoModelForCausalLM or AutoModelForSequenceClassification, or leave the target out of flow()."
        )
    wanted = request.target
    if is_span(wanted) or (isinstance(wanted, tuple) and is_span(wanted[0])):
        found = _span_target(loaded, model.logits, item, request)
    else:
        found = _logit_target(loaded, model.logits, item, request)
    notes = "".join(f" ({note})" for note in model.notes)
    return _to_device(found, model.logits.device, notes)


def _logit_target(loaded: LoadedModel, logits: Tensor, item: Item, request: TargetRequest) -> Target:
    """One logit, or the difference of two, at one position."""
    if request.each:
        raise NormscopeError("each=True explains every token of a span: pass a slice or a Passage as the target.")
    row = target_logit_row(loaded, logits, item.sides[loaded.stacks[-1].side].names, request.position)
    wanted = request.target if isinstance(request.target, tuple) else (request.target,)
    indices = [target_logit_index(loaded, logits, row, one) for one in wanted]
    against = request.against if len(indices) == 1 else indices[1]
    rows, index = torch.tensor([row]), torch.tensor(indices[:1])
    if len(indices) == 2 and indices[0] == indices[1]:
        raise NormscopeError("The two targets are the same, so their difference is zero.")
    baseline, others = _find_baseline(loaded, logits, rows, index, against, request.log_prob)
    name = _describe_logit(loaded, logits, index[0], baseline, None if others is None else others[0])
    place = f" at position {row}" if len(logits) > 1 else ""
    one = torch.ones(1, dtype=torch.long)
    return Target((f"{name}{place}",), rows, one - 1, one, index, baseline, others)


def _span_target(loaded: LoadedModel, logits: Tensor, item: Item, request: TargetRequest) -> Target:
    """The logits of the tokens of a span added up or each by itself, or the difference of two spans."""
    if not target_has_vocabulary_logits(loaded, logits.shape[1]):
        raise NormscopeError(f"{type(loaded.model).__name__} has logits of classes, not of the tokens of a span.")
    wanted = request.target if isinstance(request.target, tuple) else (request.target,)
    spans = [find_token_span(loaded, item, logits, one) for one in wanted]
    _check_span_lengths(spans, request)
    rows, index = torch.cat([one.rows for one in spans]), torch.cat([one.ids for one in spans])
    baseline, others = _find_baseline(loaded, logits, rows, index, request.against, request.log_prob)
    signs = torch.cat([torch.full((len(one.ids),), sign) for one, sign in zip(spans, (1, -1), strict=False)])
    if request.each:
        count = len(spans[0].ids)
        owners = torch.cat([torch.arange(count)] * len(spans))
        names = [
            " minus ".join(
                f"{_describe_logit(loaded, logits, index[k], baseline, None if others is None else others[k])} "
                f"at position {int(rows[k])}"
                for k in range(n, len(index), count)
            )
            for n in range(count)
        ]
        order = owners.argsort(stable=True)
        rows, index, signs, owners = rows[order], index[order], signs[order], owners[order]
        others = None if others is None else others[order]
        return Target(tuple(names), rows, owners, signs, index, baseline, others, each=True)
    what = {"probabilities": "log-probabilities", "none": "logits", "logit": "logit differences"}.get(
        baseline, "logits above the mean"
    )
    described = [f"{what} of the tokens {' minus those of the tokens '.join(map(str, spans))}"]
    return Target(tuple(described), rows, torch.zeros_like(rows), signs, index, baseline, others)


def _check_span_lengths(spans: list[TokenSpan], request: TargetRequest) -> None:
    lengths = [len(one.ids) for one in spans]
    if len(spans) == 2 and torch.equal(spans[0].positions, spans[1].positions):
        raise NormscopeError("The two spans are the same, so their difference is zero.")
    if len(set(lengths)) == 1:
        return
    if request.each:
        raise NormscopeError(
            f"each=True pairs the tokens of two spans in order, but they have {lengths[0]} and {lengths[1]} tokens."
        )
    if not request.log_prob:
        raise NormscopeError(
            f"The spans have {lengths[0]} and {lengths[1]} tokens, and sums of so many logits cannot be compared. Pass "
            "log_prob=True: the log-probability of a text is a sum over its tokens, of any length."
        )


def _find_baseline(
    loaded: LoadedModel, logits: Tensor, rows: Tensor, index: Tensor, against: Any, log_prob: bool
) -> tuple[Baseline, Tensor | None]:
    """What is subtracted from the logits at some rows. In a difference of two log-probabilities at one position, the
    sum over all logits cancels, so it is the difference of the logits."""
    if against is None:
        return ("probabilities" if log_prob else "none"), None
    if isinstance(against, str) and against == "mean":
        return "mean", None
    if isinstance(against, str) and against == "runner-up":
        if logits.shape[1] < 2:
            raise NormscopeError("This model has one logit only: there is no runner-up.")
        return "logit", find_runner_up(logits, rows, index)
    other = target_logit_index(loaded, logits, int(rows[0]), against)
    if bool((index.to(logits.device) == other).all()):
        raise NormscopeError("The two targets are the same, so their difference is zero.")
    return "logit", torch.full_like(index, other)


def find_runner_up(logits: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """(reads,): the largest logit in each row other than `index`."""
    best = torch.stack([logits[row].topk(2).indices for row in rows.tolist()])
    given = index.to(best)
    return torch.where(best[:, 0] == given, best[:, 1], best[:, 0]).to(index.device)


def _describe_logit(
    loaded: LoadedModel, logits: Tensor, index: Tensor, baseline: Baseline, other: Tensor | None
) -> str:
    name = target_logit_name(loaded, logits, int(index))
    if baseline == "probabilities":
        return f"log-probability of {name}"
    if baseline == "mean":
        return f"logit of {name} minus the mean"
    return f"logit of {name}" + ("" if other is None else f" minus {target_logit_name(loaded, logits, int(other))}")


def _vector_target(loaded: LoadedModel, model: FrozenModel, given: Any, position: Any) -> Target:
    """The projection of the last layer's state at a position on a vector."""
    state = model.stacks[-1].states[-1]
    vector = torch.as_tensor(given).detach()
    if vector.shape != state.shape[1:] or vector.is_complex() or vector.dtype == torch.bool:
        raise NormscopeError(
            f"A vector as a target has {state.shape[1]} numbers, as the states of {type(loaded.model).__name__} do; "
            f"this one has the shape {tuple(vector.shape)} and the type {vector.dtype}."
        )
    if not bool(vector.isfinite().all()) or not bool(vector.any()):
        raise NormscopeError("The vector is zero or has numbers that are not finite.")
    if position is None and model.stacks[-1].side == "encoder" and len(state) > 1:
        raise NormscopeError("This model has a state at every token: pass position=.")
    row = check_target_position(-1 if position is None else position, len(state), "states")
    one = torch.ones(1, dtype=torch.long, device=state.device)
    return Target(
        (f"projection of the last state at position {row}",),
        one * row,
        one - 1,
        one,
        vectors=vector.to(state)[None],
        place="last layer",
    )


def _to_device(target: Target, device: torch.device, notes: str) -> Target:
    others = None if target.others is None else target.others.to(device)
    assert target.indices is not None
    return Target(
        tuple(f"{one}{notes}" for one in target.descriptions),
        target.rows.to(device),
        target.owners.to(device),
        target.signs.to(device),
        target.indices.to(device),
        target.baseline,
        others,
        each=target.each,
    )
