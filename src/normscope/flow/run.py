"""`Analyzer.flow`: one input, one method, one target."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import Tensor

from normscope.engine.run import INCOMPLETE, INEXACT, Workspace
from normscope.errors import NormscopeError, NormscopeWarning
from normscope.flow.freeze import freeze
from normscope.flow.methods import Run, chosen
from normscope.flow.result import Flow
from normscope.flow.targets import aim, row_of, scored
from normscope.inputs.item import Item
from normscope.labels import Label, token_labels
from normscope.models.loaded import LoadedModel


def flow(
    loaded: LoadedModel,
    item: Item,
    method: str,
    target: Any,
    position: int | None,
    gate: str,
    workspace: Workspace,
) -> Flow:
    """How much of the last states, or of a target, comes from each input token."""
    found = _flow(loaded, item, method, target, position, gate, workspace)
    for text in found.warnings:
        warnings.warn(text, NormscopeWarning, stacklevel=3)  # where Analyzer.flow is called
    return found


def _flow(
    loaded: LoadedModel,
    item: Item,
    method: str,
    target: Any,
    position: int | None,
    gate: str,
    workspace: Workspace,
) -> Flow:
    way, option = chosen(loaded, method)
    if item.virtual:
        raise NormscopeError(
            "A flow begins at the input, and prefix tuning brings keys and values into every layer: use analyze(), "
            "whose maps have columns for them."
        )
    if loaded.prompt is not None and method.partition(":")[0] in (
        "value_zeroing",
        "gradient_x_input",
        "integrated_gradients",
    ):
        loaded.refuse_prompt(f"The method {method}")
    if target is None and position is not None:
        raise NormscopeError("A position is where the target's logit is read: give a target too, such as 'top'.")
    if target is None and way.maps is None:
        raise NormscopeError(f"The method {method!r} explains a logit and has no maps: give a target, such as 'top'.")
    model = freeze(loaded, item, gate, head=target is not None)  # type: ignore[arg-type]  # checked by the LoadedModel
    run = Run(loaded, workspace, item, model, option)
    sides = [loaded.stacks[-1], *loaded.stacks[:-1]]
    labels = {stack.side: _labels(item, stack.side) for stack in sides}
    found = Flow(
        method=method,
        rows=labels[sides[0].side],
        columns=tuple(label for stack in sides for label in labels[stack.side]),
        layers=tuple(range(loaded.depths[-1])),
        info={"model": loaded.name, "family": loaded.family.name, "gate": gate, "target": target}
        | ({"warnings": list(item.warnings)} if item.warnings else {}),
        _maps=None if way.maps is None else lambda: _complete(loaded, gate, *way.maps(run)),  # type: ignore[misc]
    )
    if target is None:
        return found
    aimed = aim(loaded, model, item.sides[sides[0].side].names, target, position)
    if way.scores is None:
        assert model.logits is not None
        maps = found.maps, found.completeness
        to = scored(aimed, model.logits, row_of(aimed, model, found.map))
        return replace(found, to=to, _maps=lambda: maps)
    to = way.scores(run, aimed)
    if way.maps is not None and gate != "tangent" and not to.completeness <= INCOMPLETE:
        raise NormscopeError(
            f"The scores miss the {to.target} by {to.completeness:.1e}: the head of {type(loaded.model).__name__} "
            "is not what it seems. Leave the target out to get the flow to the hidden states."
        )
    if way.maps is not None and gate != "tangent" and to.completeness > INEXACT:
        text = _inexact(loaded, f"The scores miss the {to.target} by {to.completeness:.1e}")
        return replace(found, to=to, info={**found.info, "warnings": [*found.warnings, text]})
    return replace(found, to=to)


def _complete(loaded: LoadedModel, gate: str, maps: Tensor, error: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Maps of a flow, refused where their contributions do not add up to the model's own states."""
    worst = 0.0 if error is None or gate == "tangent" else float(error.max())
    missed = f"The contributions of the input tokens miss the model's own states by {worst:.1e} of their length"
    if not worst <= INCOMPLETE:
        raise NormscopeError(
            f"{missed}: {type(loaded.model).__name__} does not compute what the family {loaded.family.name} says."
        )
    if worst > INEXACT:
        warnings.warn(_inexact(loaded, missed), NormscopeWarning, stacklevel=2)
    return maps, error


def _inexact(loaded: LoadedModel, missed: str) -> str:
    return (
        f"{missed}, more than rounding in {str(loaded.dtype).removeprefix('torch.')} explains. Do not rely on small "
        "numbers. Load the model with dtype=torch.float64, and try `normscope check`."
    )


def _labels(item: Item, side: str) -> tuple[Label, ...]:
    labels = token_labels(item, side)
    return tuple(labels[n] for n in item.sides[side].real.nonzero().flatten().tolist())
