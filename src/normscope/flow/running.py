"""`Analyzer.flow`: one input, one method, one target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from normscope.analysis import Label
from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError, nearest
from normscope.flow import exact
from normscope.flow.freezing import FrozenModel, freeze
from normscope.flow.result import Flow
from normscope.flow.targets import Aim, aim
from normscope.inputs import Item

INCOMPLETE = 1e-2  # scores that miss the target by this much are no decomposition of it

Method = Callable[[Analyzer, Item, FrozenModel, Aim | None, Flow], Flow]


def _exact(lens: Analyzer, item: Item, model: FrozenModel, aim: Aim | None, empty: Flow) -> Flow:
    found = None if aim is None else exact.scores(model, aim)
    if found is not None and not found.completeness <= INCOMPLETE:
        raise NormscopeError(
            f"The scores miss the {found.target} by {found.completeness:.1e}: the head of {type(lens.model).__name__} "
            "is not what it seems. Leave the target out to get the flow to the hidden states."
        )
    return replace(empty, to=found, _maps=lambda: exact.maps(model))


METHODS: dict[str, Method] = {"exact": _exact}


def flow(lens: Analyzer, item: Item, method: str, target: Any, position: int | None, gate: str) -> Flow:
    """How much of the last states, or of a target, comes from each input token."""
    if method not in METHODS:
        raise NormscopeError(f"Unknown method {method!r}.{nearest(method, METHODS)} Known: {', '.join(METHODS)}.")
    if target is None and position is not None:
        raise NormscopeError("A position is where the target's logit is read: give a target too, such as 'top'.")
    model = freeze(lens, item, gate)  # type: ignore[arg-type]  # checked by the Analyzer
    sides = [lens.stacks[-1], *lens.stacks[:-1]]
    labels = {
        stack.side: tuple(
            Label(token, stack.side, n)
            for n, (token, real) in enumerate(
                zip(item.sides[stack.side].names, item.sides[stack.side].real.tolist(), strict=True)
            )
            if real
        )
        for stack in sides
    }
    empty = Flow(
        method=method,
        rows=labels[sides[0].side],
        columns=tuple(label for stack in sides for label in labels[stack.side]),
        layers=tuple(range(lens.depths[-1])),
        info={"model": lens.model_name, "family": lens.family.name, "gate": gate, "target": target},
    )
    chosen = None if target is None else aim(lens, model, item.sides[sides[0].side].names, target, position)
    return METHODS[method](lens, item, model, chosen, empty)
