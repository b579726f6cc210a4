"""Run one method on one input: the work of `Analyzer.flow`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from normscope.decompose.activations import Gate
from normscope.engine.request import parse_gate
from normscope.engine.run import INCOMPLETE, INEXACT, Workspace
from normscope.errors import NormscopeError, NormscopeWarning, did_you_mean
from normscope.flow.continuations import contrast_flows, find_continuations
from normscope.flow.freeze import freeze_model
from normscope.flow.interface import FlowMaps, Method, MethodRun
from normscope.flow.logit_rows import logit_rows_of_target
from normscope.flow.maps import FrozenModel
from normscope.flow.methods import METHODS
from normscope.flow.output_head import freeze_to_end, freeze_with_output_head, read_inputs_and_logits
from normscope.flow.resolve import TargetRequest, check_target_request, resolve_target
from normscope.flow.result import Flow, ScoreMatrix, Scores
from normscope.flow.similarity import Similarity
from normscope.flow.targets import build_target_scores, refuse_target_of_method, target_row_of_map
from normscope.inputs.item import Item, describe_pictures
from normscope.inputs.marked_text import REST
from normscope.labels import Label
from normscope.models.loaded import LoadedModel

NO_PROMPT = ("value_zeroing", "gradient_x_input", "integrated_gradients")  # would leave a soft prompt out


def run_flow(
    loaded: LoadedModel, item: Item, method: str, request: TargetRequest, gate: str, workspace: Workspace
) -> Flow:
    """How much of the last states, or of a target, comes from each input token."""
    chosen, option = find_method(loaded, method)
    _check_flow_request(loaded, item, method, chosen, request)
    texts = [] if request.target is None else find_continuations(loaded, item, request)
    given = [(one.item, one.request) for one in texts] or [(item, request)]
    flows = [_flow_of_item(loaded, one, method, chosen, option, wanted, gate, workspace) for one, wanted in given]
    found = flows[0]
    if len(flows) == 2:
        shared = int(item.sides["decoder"].real.sum())
        found = contrast_flows(flows[0], flows[1], shared, request.target)
    for text in dict.fromkeys(text for flow in flows for text in flow.warnings):
        warnings.warn(text, NormscopeWarning, stacklevel=3)  # at the call of Analyzer.flow
    return found


def _flow_of_item(
    loaded: LoadedModel,
    item: Item,
    method: str,
    chosen: Method,
    option: str,
    request: TargetRequest,
    gate: str,
    workspace: Workspace,
) -> Flow:
    if chosen.frozen or item.pictures:  # features of pictures may be added before several layers
        model = freeze_for_target(loaded, item, request, gate, every_row=method != "exact")
    else:
        model = read_inputs_and_logits(loaded, item)
    if method != "exact" and any(stack.added for stack in model.stacks):
        raise NormscopeError(
            f"{type(loaded.model).__name__} adds features of its pictures before several layers, which only "
            "method='exact' follows. Use it, or leave the pictures out."
        )
    run = MethodRun(loaded, workspace, item, model, option)
    columns = flow_columns(loaded, item)
    found = Flow(
        method=method,
        rows=tuple(label for label in columns if label.side == loaded.stacks[-1].side),
        columns=columns,
        layers=tuple(range(loaded.depths[-1])),
        sources=source_columns(item, columns),
        info=flow_info(loaded, item, gate) | {"target": request.target},
        _maps=None if chosen.maps is None else lambda: _check_maps(loaded, gate, chosen.maps(run)),  # type: ignore[misc]
    )
    return found if request.target is None else _add_scores(found, run, chosen, request, gate)


def freeze_for_target(
    loaded: LoadedModel, item: Item, request: TargetRequest, gate: str, every_row: bool = False
) -> FrozenModel:
    """The model frozen as far as the target needs it; with `every_row`, with all its logits."""
    if isinstance(request.target, Similarity):
        return freeze_to_end(loaded, item, gate)  # type: ignore[arg-type]  # see check_flow_gate
    if request.target is None or request.in_states:
        return freeze_model(loaded, item, gate, recompute=request.target is not None)  # type: ignore[arg-type]
    rows = None if every_row else logit_rows_of_target(loaded, item, request)
    return freeze_with_output_head(loaded, item, gate, rows)  # type: ignore[arg-type]


def steps_to_freeze(loaded: LoadedModel, generate: int | None) -> dict[str, int]:
    """The steps before a target is known, by part: tokens that the model writes and layers that are frozen."""
    layers = {f"layers of the {stack.side}": depth for stack, depth in zip(loaded.stacks, loaded.depths, strict=True)}
    return layers if generate is None else {"tokens written": generate} | layers


def flow_columns(loaded: LoadedModel, item: Item) -> tuple[Label, ...]:
    """The tokens of the last side, then the encoder's; masked tokens are left out."""
    sides = [loaded.stacks[-1], *loaded.stacks[:-1]]
    return tuple(label for stack in sides for label in _real_token_labels(item, stack.side))


def source_columns(item: Item, columns: Sequence[Label]) -> dict[str, tuple[int, ...]]:
    """The columns of each source of an item and of the rest; empty if it has no sources."""
    if item.sources is None:
        return {}
    found = item.sources.columns((label.side, label.position) for label in columns).tolist()
    names = (*item.sources.names, REST)
    return {name: tuple(k for k, one in enumerate(found) if one % len(names) == n) for n, name in enumerate(names)}


def flow_info(loaded: LoadedModel, item: Item, gate: str) -> dict[str, Any]:
    """Where a result comes from."""
    info = {"model": loaded.name, "family": loaded.family.name, "derived": loaded.family.derived, "gate": gate}
    if item.pictures:
        info |= describe_pictures(item)
    return info | ({"warnings": list(item.warnings)} if item.warnings else {})


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


def _check_flow_request(loaded: LoadedModel, item: Item, method: str, chosen: Method, request: TargetRequest) -> None:
    """Refuse what a method cannot do with this model and input."""
    refuse_virtual_columns(item)
    if loaded.prompt is not None and method.partition(":")[0] in NO_PROMPT:
        loaded.refuse_prompt(f"The method {method}")
    if request.target is not None:
        check_target_request(request)
        return
    for name in ("position", "against", "log_prob", "each"):
        if getattr(request, name) not in (None, False):
            raise NormscopeError(f"{name}= needs a target: give a target, such as 'top', too.")
    if chosen.maps is None:
        raise NormscopeError(f"The method {method!r} explains a logit and has no maps: give a target, such as 'top'.")


def refuse_virtual_columns(item: Item) -> None:
    """Refuse prefix tuning, whose keys and values are no input."""
    if item.virtual:
        raise NormscopeError(
            "A flow starts at the input, but prefix tuning adds keys and values in every layer. Use analyze(), whose "
            "maps have columns for them."
        )


def _add_scores(found: Flow, run: MethodRun, method: Method, request: TargetRequest, gate: str) -> Flow:
    """The flow with the scores of its target."""
    loaded, model = run.loaded, run.model
    target = resolve_target(loaded, model, run.item, request)
    refuse_target_of_method(target, found.method, method.scores is not None)
    if method.scores is None:
        maps = found.maps, found.completeness
        to = build_target_scores(target, model, target_row_of_map(target, model, found.map))
        return replace(found, to=to, _maps=lambda: maps)
    scores = method.scores(run, target)
    each = scores if isinstance(scores, ScoreMatrix) else None
    to = scores.total() if isinstance(scores, ScoreMatrix) else scores
    if method.maps is not None and gate != "tangent":
        found = _warn_of_inexact_scores(found, loaded, to, each)
    return replace(found, to=to, each=each)


def _warn_of_inexact_scores(found: Flow, loaded: LoadedModel, to: Scores, each: ScoreMatrix | None) -> Flow:
    """The flow with a warning if its scores do not quite add up; refused if they are far off."""
    worst = to.completeness if each is None else float(each.completeness.max())
    warning = inexact_scores_warning(loaded, to.target, worst)
    if not warning:
        return found
    return replace(found, info={**found.info, "warnings": [*found.warnings, warning]})


def inexact_scores_warning(loaded: LoadedModel, target: str, worst: float) -> str:
    """A warning if scores do not quite add up to the target; "" if they do. Refuses them if they are far off."""
    missed = f"The scores miss the {target} by {worst:.1e}"
    if not worst <= INCOMPLETE:
        raise NormscopeError(
            f"{missed}: the head of {type(loaded.model).__name__} computes something else than its modules show. Leave "
            "the target out to get the flow to the hidden states."
        )
    return "" if worst <= INEXACT else _inexact_warning(loaded, missed)


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
