"""Run one method on one input: the work of `Analyzer.flow`."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, get_args

from normscope.decompose.activations import Gate
from normscope.engine.request import parse_gate
from normscope.engine.run import INCOMPLETE, INEXACT, Workspace
from normscope.errors import NormscopeError, NormscopeWarning, did_you_mean
from normscope.flow.freeze import freeze_model
from normscope.flow.interface import FlowMaps, Method, MethodRun
from normscope.flow.methods import METHODS
from normscope.flow.output_head import freeze_with_output_head
from normscope.flow.result import Flow, Scores
from normscope.flow.targets import build_target_scores, resolve_target, target_row_of_map
from normscope.inputs.item import Item
from normscope.labels import Label
from normscope.models.loaded import LoadedModel

NO_PROMPT = ("value_zeroing", "gradient_x_input", "integrated_gradients")  # would leave a soft prompt out


def run_flow(
    loaded: LoadedModel,
    item: Item,
    method: str,
    target: Any,
    position: int | None,
    gate: str,
    workspace: Workspace,
) -> Flow:
    """How much of the last states, or of a target, comes from each input token."""
    chosen, option = find_method(loaded, method)
    _check_flow_request(loaded, item, method, chosen, target, position)
    freeze = freeze_model if target is None else freeze_with_output_head
    model = freeze(loaded, item, gate)  # type: ignore[arg-type]  # see check_flow_gate
    run = MethodRun(loaded, workspace, item, model, option)
    sides = [loaded.stacks[-1], *loaded.stacks[:-1]]
    labels = {stack.side: _real_token_labels(item, stack.side) for stack in sides}
    found = Flow(
        method=method,
        rows=labels[sides[0].side],
        columns=tuple(label for stack in sides for label in labels[stack.side]),
        layers=tuple(range(loaded.depths[-1])),
        info={
            "model": loaded.name,
            "family": loaded.family.name,
            "derived": loaded.family.derived,
            "gate": gate,
            "target": target,
        }
        | ({"warnings": list(item.warnings)} if item.warnings else {}),
        _maps=None if chosen.maps is None else lambda: _check_maps(loaded, gate, chosen.maps(run)),  # type: ignore[misc]
    )
    if target is not None:
        found = _add_scores(found, run, chosen, target, position, gate)
    for text in found.warnings:
        warnings.warn(text, NormscopeWarning, stacklevel=3)  # at the call of Analyzer.flow
    return found


def find_method(loaded: LoadedModel, method: Any) -> tuple[Method, str]:
    """The method and option for "name" or "name:option", checked against the model."""
    name, _, option = str(method).partition(":")
    if name not in METHODS:
        raise NormscopeError(f"Unknown method {method!r}.{did_you_mean(name, METHODS)} Known: {', '.join(METHODS)}.")
    found = METHODS[name]
    option = option.strip().lower() or found.options[0]
    if option not in found.options and not found.free_option:
        known = ", ".join(f"{name}:{one}" if one else name for one in found.options)
        raise NormscopeError(f"Unknown method {method!r}. Known: {known}.")
    reason = found.refusal(loaded, option) if found.refusal else ""
    if reason:
        raise NormscopeError(f"The method {method!r} is not for {loaded.family.name}: {reason}.")
    return found, option


def check_flow_gate(gate: Any) -> None:
    """Refuse a gate that is unknown or not linear in the input."""
    if gate not in get_args(Gate):
        parse_gate(gate)  # refuses an unknown one
        raise NormscopeError(
            "flow() needs gates that are linear in the input; Shapley values are not. Use gate='ig', or analyze()."
        )


def _check_flow_request(
    loaded: LoadedModel, item: Item, method: str, chosen: Method, target: Any, position: int | None
) -> None:
    """Refuse what a method cannot do with this model and input."""
    if item.virtual:
        raise NormscopeError(
            "A flow starts at the input, but prefix tuning adds keys and values in every layer. Use analyze(), whose "
            "maps have columns for them."
        )
    if loaded.prompt is not None and method.partition(":")[0] in NO_PROMPT:
        loaded.refuse_prompt(f"The method {method}")
    if target is None and position is not None:
        raise NormscopeError("position= is the token of the target's logit: give a target, such as 'top', too.")
    if target is None and chosen.maps is None:
        raise NormscopeError(f"The method {method!r} explains a logit and has no maps: give a target, such as 'top'.")


def _add_scores(found: Flow, run: MethodRun, method: Method, target: Any, position: int | None, gate: str) -> Flow:
    """The flow with the scores of its target."""
    loaded, model = run.loaded, run.model
    logit = resolve_target(loaded, model, run.item.sides[loaded.stacks[-1].side].names, target, position)
    if method.scores is None:
        assert model.logits is not None
        maps = found.maps, found.completeness
        to = build_target_scores(logit, model.logits, target_row_of_map(logit, model, found.map))
        return replace(found, to=to, _maps=lambda: maps)
    to = method.scores(run, logit)
    if method.maps is not None and gate != "tangent":
        found = _warn_of_inexact_scores(found, loaded, to)
    return replace(found, to=to)


def _warn_of_inexact_scores(found: Flow, loaded: LoadedModel, to: Scores) -> Flow:
    """The flow with a warning if its scores do not quite add up; refused if they are far off."""
    missed = f"The scores miss the {to.target} by {to.completeness:.1e}"
    if not to.completeness <= INCOMPLETE:
        raise NormscopeError(
            f"{missed}: the head of {type(loaded.model).__name__} computes something else than its modules show. Leave "
            "the target out to get the flow to the hidden states."
        )
    if to.completeness <= INEXACT:
        return found
    return replace(found, info={**found.info, "warnings": [*found.warnings, _inexact_warning(loaded, missed)]})


def _check_maps(loaded: LoadedModel, gate: str, maps: FlowMaps) -> FlowMaps:
    """The same maps, refused if the contributions do not add up to the model's own states."""
    _, error = maps
    worst = 0.0 if error is None or gate == "tangent" else float(error.max())
    missed = f"The contributions of the input tokens miss the model's own states by {worst:.1e} of their length"
    if not worst <= INCOMPLETE:
        raise NormscopeError(
            f"{missed}: {type(loaded.model).__name__} does not compute what the family {loaded.family.name} says."
        )
    if worst > INEXACT:
        warnings.warn(_inexact_warning(loaded, missed), NormscopeWarning, stacklevel=2)
    return maps


def _inexact_warning(loaded: LoadedModel, missed: str) -> str:
    return (
        f"{missed}, more than rounding in {str(loaded.dtype).removeprefix('torch.')} explains. Do not rely on small "
        "numbers. Load the model with dtype=torch.float64, and try `normscope check`."
    )


def _real_token_labels(item: Item, side: str) -> tuple[Label, ...]:
    """The labels of the tokens that are not masked."""
    tokens = item.sides[side]
    pairs = zip(tokens.names, tokens.real.tolist(), strict=True)
    return tuple(Label(token, side, n) for n, (token, real) in enumerate(pairs) if real)
