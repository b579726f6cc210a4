"""A head as a chain of maps, from the last layer's states to the logits.

The modules that ran after the last layer are followed from what they read to what they made: linear modules and norms
are compared with what they put out, and what lies between two of them must have a known form (`forms`). What is not
understood is refused, with the name of the module where it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.flow.forms import Known, Link, between
from normscope.flow.frozen import Map
from normscope.flow.modules import is_linear, is_norm, linear, norm
from normscope.flow.passes import Pass
from normscope.flow.watch import Call
from normscope.tracing.closeness import coarser, equal

FORMS = "linear map, norm, named activation, softcap, factor, constant, pooling of tokens"


@dataclass(frozen=True)
class Head:
    """A chain of maps to the logits."""

    maps: tuple[Map, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    """A tensor that the chain has come to. `number` is the call that made it; -1: the last layer."""

    number: int
    value: Tensor
    dtype: torch.dtype
    steps: tuple[_Step, ...] = ()


@dataclass(frozen=True)
class _Step:
    """From one place to what the next module reads and through that module; or to what it makes, if it has no map of
    its own; or to the logits."""

    source: int  # a number as in `_Place`
    links: list[Link]  # what lies between; several where it might be any of these
    number: int | None = None  # the call of the module; None: the logits
    map: Map | None = None


def head_of(run: Pass, known: Known, model: nn.Module, again: Callable[[], Pass]) -> Head:
    """The maps from the last layer's states to the logits. Where this pass leaves open what a step is, `again` gives
    another one, whose states are others: it must be the same step there."""
    start = _Place(-1, run.state, coarser(run.state.dtype, run.dtype))
    places, broken = [start], []
    for number, call in enumerate(run.calls):
        known_map = _has_map(call.module)
        found = _from(places, call.given if known_map else call.made, call.dtype, known)
        if found is None:
            continue  # it reads something else, or is not known
        place, links = found
        one = _map(call) if known_map else None
        if known_map and one is None:
            broken.append(call)
            continue
        step = _Step(place.number, links, number, one)
        places.append(_Place(number, call.made, call.dtype, (*place.steps, step)))
    found = _from(places, run.logits, run.dtype, known)
    if found is None:
        raise _unknown(model, _where(run, places, broken, known))
    place, links = found
    return _settled((*place.steps, _Step(place.number, links)), run, model, again)


def _from(places: Sequence[_Place], t: Tensor, dtype: torch.dtype, known: Known) -> tuple[_Place, list[Link]] | None:
    """The place that a tensor was made from, the latest where several would do, and how."""
    best = None
    for place in reversed(places):
        links = between(place.value, t, coarser(place.dtype, dtype), known)
        if links and not links[0].maps:
            return place, links
        best = best or ((place, links) if links else None)
    return best


def _settled(steps: Sequence[_Step], run: Pass, model: nn.Module, again: Callable[[], Pass]) -> Head:
    """The chain, when every step can be one thing only."""
    if any(len(step.links) > 1 or not step.links[0].sure for step in steps):
        other = again()
        if [call.module for call in other.calls] != [call.module for call in run.calls]:
            raise _unknown(model, "other modules run when its input changes")
        steps = [replace(step, links=_holding(step, run, other, model)) for step in steps]
    maps: list[Map] = []
    for step in steps:
        maps += step.links[0].maps
        if step.map is not None:
            maps.append(step.map)
    return Head(tuple(maps), tuple(step.links[0].note for step in steps if step.links[0].note))


def _holding(step: _Step, run: Pass, other: Pass, model: nn.Module) -> list[Link]:
    """What a step can be in view of another pass: one thing."""
    if len(step.links) == 1 and step.links[0].sure:
        return step.links
    s = other.state if step.source < 0 else other.calls[step.source].made
    call = None if step.number is None else other.calls[step.number]
    t = other.logits if call is None else call.made if step.map is None else call.given
    left = [link for link in step.links if link.fits(s, t)]
    if len(left) == 1:
        return left
    reason = "may read any of several equal tokens" if left else "depends on the input in a way that is not known"
    raise _unknown(model, f"{_gap(run, step.source, step.number)} {reason}")


def tail_of(calls: Sequence[Call], state: Tensor) -> tuple[tuple[Map, ...], Tensor]:
    """The norms that the last states of an encoder go through, and what the model made of the states there."""
    chain: list[Map] = []
    for call in calls:
        if is_norm(call.module) and equal(state, call.given, call.dtype):
            one = _map(call)
            if one is None:
                raise NormscopeError(f"The states cannot be followed: {_broken(call)}.")
            chain.append(one)
            state = call.made
    return tuple(chain), state


def _unknown(model: nn.Module, where: str) -> NormscopeError:
    return NormscopeError(
        f"The head of {type(model).__name__} cannot be decomposed: {where}. Leave the target out to get the flow to "
        "the hidden states."
    )


def _where(run: Pass, places: Sequence[_Place], broken: Sequence[Call], known: Known) -> str:
    """Where the unknown begins."""
    if broken:
        return _broken(broken[0])
    last = places[-1]
    for call in run.calls[last.number + 1 :]:  # a module without parts, which the chain leads into and not out of
        whole = not any(True for _ in call.module.children())
        if whole and _from(places, call.given, call.dtype, known) and not _from(places, call.made, call.dtype, known):
            return f"{call} has none of the forms that are known ({FORMS})"
    behind = range(last.number + 1, len(run.calls))
    following = next((n for n in behind if _has_map(run.calls[n].module)), None)
    return f"{_gap(run, last.number, following)} has none of the forms that are known ({FORMS})"


def _has_map(module: nn.Module) -> bool:
    return is_linear(module) or is_norm(module)


def _map(call: Call) -> Map | None:
    read = linear if is_linear(call.module) else norm
    return read(call.module, call.given, call.made, call.dtype)


def _broken(call: Call) -> str:
    what = "x W + b" if is_linear(call.module) else "the LayerNorm or RMSNorm"
    return f"{call} does not output {what} of its input; a hook, a wrapper or its class does something else"


def _gap(run: Pass, source: int, target: int | None) -> str:
    begin = "the last layer" if source < 0 else str(run.calls[source])
    end = "the logits" if target is None else str(run.calls[target])
    return f"the step between {begin} and {end}"
