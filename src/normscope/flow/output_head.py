"""The output head of a model as a chain of maps, from the last layer's states to the logits.

The modules that ran after the last layer are followed from input to output. Linear modules and norms are compared with
their outputs; a step between two of them must have a known form (`output_head_steps`). Anything else is refused, with
the name of the module where it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope.decompose.activations import Gate
from normscope.errors import NormscopeError
from normscope.flow.freeze import freeze_layers, log_outputs_to_freeze
from normscope.flow.maps import FrozenMap, FrozenModel, FrozenNorm, FrozenRows, FrozenStack
from normscope.flow.module_calls import (
    LayerOutputs,
    ModuleCall,
    ModuleCalls,
    describe_broken_module_call,
    encoder_tail_of_module_calls,
    log_module_calls,
    module_call_is_linear,
    module_call_is_linear_or_norm,
    module_call_map,
)
from normscope.flow.output_head_steps import HeadStep, StepCandidates, find_output_head_steps, head_step_candidates
from normscope.inputs.encode import forward_inputs
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_modules
from normscope.tracing.hooks import only_in_this_thread
from normscope.tracing.model_state import model_lock
from normscope.tracing.recorded import closeness_rows, coarser
from normscope.tracing.trace import module_to_call

FORMS = "linear map, norm, named activation, softcap, factor, constant, pooling of tokens"


@dataclass(frozen=True)
class HeadPass:
    """The part of a forward pass that belongs to the output head."""

    state: Tensor  # (n, d): the output of the last layer
    calls: Sequence[ModuleCall]  # at the rows of the logits
    whole: Sequence[ModuleCall]  # the same, at all tokens where the model computed them
    logits: Tensor  # (rows, classes)
    dtype: torch.dtype  # the least precise dtype involved in the logits


@dataclass(frozen=True)
class HeadChain:
    """The maps from the last layer's states to the logits."""

    maps: tuple[FrozenMap, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _ChainPoint:
    """A tensor that the chain has reached. `number` is the call that computed it; -1: the last layer."""

    number: int
    value: Tensor
    dtype: torch.dtype
    links: tuple[_ChainLink, ...] = ()


@dataclass(frozen=True)
class _ChainLink:
    """From one point to the next: a step to the input of a linear module or norm and the map of that module, or a step
    to the output of another module or to the logits."""

    source: int  # the `number` of the point it starts from
    steps: list[HeadStep]  # several if the step is ambiguous
    number: int | None = None  # the call of the module; None: the logits
    map: FrozenMap | None = None


def freeze_with_output_head(
    loaded: LoadedModel, item: Item, gate: Gate = "ig", rows: Tensor | None = None
) -> FrozenModel:
    """The model with its output head, frozen at this input; without a head, `logits` is None.

    With `rows`, only these rows of the logits are computed, and the maps of the head are for these rows only.
    """
    found = freeze_layers(loaded, item, gate, head=True, logit_rows=rows)
    outputs = tuple(found.output) if isinstance(found.output, dict) else ()
    logits = find_output_head_logits(found.output)
    if logits is None:
        return FrozenModel(found.stacks, outputs=outputs)
    last = found.stacks[-1]
    if rows is not None and logits.shape[:-1] != (1, len(rows)):
        return freeze_with_output_head(loaded, item, gate)  # the model reads `logits_to_keep` in another way
    seen = _read_output_head_pass(loaded, found.calls[last.side], logits, last.states[-1], rows)
    candidates = head_step_candidates(loaded.model, last.real, loaded.dtype)
    with torch.no_grad():
        chain = build_output_head_chain(
            seen, candidates, loaded.model, lambda: _run_noisy_output_head_pass(loaded, item, rows)
        )
    norms = next((n for n, one in enumerate(chain.maps) if not isinstance(one, FrozenNorm)), len(chain.maps))
    stacks = (*found.stacks[:-1], replace(last, tail=chain.maps[:norms]))
    head = chain.maps[norms:]
    if rows is None:
        return FrozenModel(stacks, head, seen.logits, chain.notes, outputs)
    some = tuple(FrozenRows(one, rows) for one in head)
    return FrozenModel(stacks, some, spread_logit_rows(seen.logits, rows, len(last.real)), chain.notes, outputs)


def spread_logit_rows(logits: Tensor, rows: Tensor, tokens: int) -> Tensor:
    """(tokens, classes): logits (rows, classes) at their positions, zero elsewhere. On the CPU the other rows take no
    memory: the system provides zeroed pages when they are touched."""
    shape = tokens, logits.shape[1]
    if logits.device.type == "cpu":
        made = torch.from_numpy(np.zeros(shape, dtype=np.float64 if logits.dtype == torch.float64 else np.float32))
    else:
        made = logits.new_zeros(shape)
    made[rows] = logits
    return made


def freeze_to_end(loaded: LoadedModel, item: Item, gate: Gate = "ig") -> FrozenModel:
    """The model without its output head, but with the norms between the last layer and its output."""
    found = freeze_layers(loaded, item, gate, head=True)
    last = found.stacks[-1]
    tail, _ = encoder_tail_of_module_calls(found.calls[last.side], last.states[-1])
    return FrozenModel((*found.stacks[:-1], replace(last, tail=tail)))


def find_output_head_logits(output: Any) -> Tensor | None:
    """The logits among the outputs of a model; those of the tokens if it also has logits for the whole text."""
    found = (getattr(output, name, None) for name in ("logits", "prediction_logits"))
    return next((one for one in found if isinstance(one, Tensor)), None)


def _read_output_head_pass(
    loaded: LoadedModel, calls: Sequence[ModuleCall], logits: Tensor, state: Tensor, rows: Tensor | None
) -> HeadPass:
    found = _output_head_logit_rows(logits, calls, len(state)).to(loaded.dtype)
    dtype = coarser(loaded.dtype, logits.dtype)
    if rows is None:
        return HeadPass(state, calls, calls, found, dtype)

    def some(x: Tensor) -> Tensor:
        return x[rows] if len(x) == len(state) else x

    few = [replace(call, input=some(call.input), output=some(call.output)) for call in calls]
    return HeadPass(state[rows], few, calls, found, dtype)


def _output_head_logit_rows(logits: Tensor, calls: Sequence[ModuleCall], tokens: int) -> Tensor:
    """(rows, classes) of one item's logits: a row for each token, or one for all. A head with one number per token has
    one class."""
    single = any(module_call_is_linear(call.module) and call.output.shape == (tokens, 1) for call in calls)
    return logits.reshape(-1, 1) if single and logits.shape == (1, tokens) else closeness_rows(logits[0])


def read_inputs_and_logits(loaded: LoadedModel, item: Item) -> FrozenModel:
    """A model with nothing frozen, for methods that run it again: the states before the first layers and after the
    last ones, and the logits."""
    inputs: dict[str, Tensor] = {}

    def keep_input(side: str, x: Tensor) -> Tensor:
        inputs[side] = closeness_rows(x.detach().to(loaded.dtype)).clone()
        return x

    output, outputs, calls = _run_with_changed_inputs(loaded, item, keep_input)
    reals = [item.sides[stack.side].real.to(loaded.base.device) for stack in loaded.stacks]
    stacks = tuple(
        FrozenStack(stack.side, (inputs[stack.side], outputs.latest[stack.side]), (), (), real)
        for stack, real in zip(loaded.stacks, reals, strict=True)
    )
    names, logits, last = tuple(output) if isinstance(output, dict) else (), find_output_head_logits(output), stacks[-1]
    if logits is not None:
        logits = _output_head_logit_rows(logits, calls[last.side], len(last.real)).to(loaded.dtype)
    return FrozenModel(stacks, logits=logits, outputs=names)


def _run_noisy_output_head_pass(loaded: LoadedModel, item: Item, rows: Tensor | None) -> HeadPass:
    """A pass over the same input with noise added to the input of the first layers, so that all states differ."""
    generator = torch.Generator().manual_seed(0)

    def add_noise(side: str, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=generator).to(x)
        return x + noise * x.square().mean().sqrt()

    kept = {} if rows is None else {"logits_to_keep": rows}
    output, outputs, calls = _run_with_changed_inputs(loaded, item, add_noise, **kept)
    logits, side = find_output_head_logits(output), loaded.stacks[-1].side
    assert logits is not None
    return _read_output_head_pass(loaded, calls[side], logits, outputs.latest[side], rows)


def _run_with_changed_inputs(
    loaded: LoadedModel, item: Item, change: Callable[[str, Tensor], Tensor], **kept: Tensor
) -> tuple[Any, LayerOutputs, ModuleCalls]:
    """The output of a pass with other inputs of the first layers, those of the layers, and the calls after them."""
    model = module_to_call(loaded, head=True)
    with (
        model_lock(loaded.base),
        torch.no_grad(),
        log_outputs_to_freeze(loaded) as outputs,
        log_module_calls(loaded, outputs) as calls,
        change_inputs_before_output_head(loaded, change),
    ):
        return model(**forward_inputs(loaded, [item]), **kept), outputs, calls


@contextmanager
def change_inputs_before_output_head(loaded: LoadedModel, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Replace the input x of the first layer of each side by ``change(side, x)`` while the context is open, in this
    thread only."""
    handles, seen = [], set()

    def first_layer_hook(side: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if side in seen:  # the layer is called again
                return None
            seen.add(side)
            changed = change(side, args[0] if args else kwargs["hidden_states"])
            return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": changed})

        return hook

    try:
        for stack in loaded.stacks:
            first = layer_modules(loaded.base, stack)[0]
            handles.append(
                first.register_forward_pre_hook(only_in_this_thread(first_layer_hook(stack.side)), with_kwargs=True)
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


def build_output_head_chain(
    seen: HeadPass, candidates: StepCandidates, model: nn.Module, run_again: Callable[[], HeadPass]
) -> HeadChain:
    """The maps from the last layer's states to the logits. If a step is ambiguous in this pass, it must also hold in
    the pass of `run_again`, which has other states."""
    points = [_ChainPoint(-1, seen.state, coarser(seen.state.dtype, seen.dtype))]
    broken = []
    for number, call in enumerate(seen.calls):
        has_map = module_call_is_linear_or_norm(call.module)
        found = _find_output_head_source(points, call.input if has_map else call.output, call.dtype, candidates)
        if found is None:
            continue  # not computed from the chain, or in an unknown way
        point, steps = found
        one = module_call_map(seen.whole[number]) if has_map else None
        if has_map and one is None:
            broken.append(call)
            continue
        link = _ChainLink(point.number, steps, number, one)
        points.append(_ChainPoint(number, call.output, call.dtype, (*point.links, link)))
    found = _find_output_head_source(points, seen.logits, seen.dtype, candidates)
    if found is None:
        raise _unknown_output_head_error(model, _locate_output_head_gap(seen, points, broken, candidates))
    point, steps = found
    return _resolve_output_head_chain((*point.links, _ChainLink(point.number, steps)), seen, model, run_again)


def _find_output_head_source(
    points: Sequence[_ChainPoint], t: Tensor, dtype: torch.dtype, candidates: StepCandidates
) -> tuple[_ChainPoint, list[HeadStep]] | None:
    """The point that a tensor was computed from, the latest if several are possible, and the steps from there."""
    best = None
    for point in reversed(points):
        steps = find_output_head_steps(point.value, t, coarser(point.dtype, dtype), candidates)
        if steps and not steps[0].maps:
            return point, steps
        best = best or ((point, steps) if steps else None)
    return best


def _resolve_output_head_chain(
    links: Sequence[_ChainLink], seen: HeadPass, model: nn.Module, run_again: Callable[[], HeadPass]
) -> HeadChain:
    """The chain of maps, with every ambiguous step decided by a second pass."""
    if any(len(link.steps) > 1 or not link.steps[0].sure for link in links):
        other = run_again()
        if [call.module for call in other.calls] != [call.module for call in seen.calls]:
            raise _unknown_output_head_error(model, "other modules run when its input changes")
        links = [replace(link, steps=_resolve_output_head_link(link, seen, other, model)) for link in links]
    maps: list[FrozenMap] = []
    for link in links:
        maps += link.steps[0].maps
        if link.map is not None:
            maps.append(link.map)
    return HeadChain(tuple(maps), tuple(link.steps[0].note for link in links if link.steps[0].note))


def _resolve_output_head_link(link: _ChainLink, seen: HeadPass, other: HeadPass, model: nn.Module) -> list[HeadStep]:
    """The one step of a link that also holds in another pass."""
    if len(link.steps) == 1 and link.steps[0].sure:
        return link.steps
    s = other.state if link.source < 0 else other.calls[link.source].output
    call = None if link.number is None else other.calls[link.number]
    t = other.logits if call is None else call.output if link.map is None else call.input
    holding = [step for step in link.steps if step.fits(s, t)]
    if len(holding) == 1:
        return holding
    reason = "may read any of several equal tokens" if holding else "depends on the input in an unknown way"
    raise _unknown_output_head_error(model, f"{_describe_output_head_link(seen, link.source, link.number)} {reason}")


def _unknown_output_head_error(model: nn.Module, where: str) -> NormscopeError:
    return NormscopeError(
        f"The head of {type(model).__name__} cannot be decomposed: {where}. Leave the target out of flow() to get "
        "the flow to the hidden states."
    )


def _locate_output_head_gap(
    seen: HeadPass, points: Sequence[_ChainPoint], broken: Sequence[ModuleCall], candidates: StepCandidates
) -> str:
    """Where the first step without a known form is."""
    if broken:
        return describe_broken_module_call(broken[0])
    last = points[-1]
    for call in seen.calls[last.number + 1 :]:  # a module without children whose input, but not output, is reached
        leaf = not any(True for _ in call.module.children())
        reached = leaf and _find_output_head_source(points, call.input, call.dtype, candidates)
        if reached and not _find_output_head_source(points, call.output, call.dtype, candidates):
            return f"{call} has none of the known forms ({FORMS})"
    later = range(last.number + 1, len(seen.calls))
    following = next((n for n in later if module_call_is_linear_or_norm(seen.calls[n].module)), None)
    return f"{_describe_output_head_link(seen, last.number, following)} has none of the known forms ({FORMS})"


def _describe_output_head_link(seen: HeadPass, source: int, target: int | None) -> str:
    start = "the last layer" if source < 0 else str(seen.calls[source])
    end = "the logits" if target is None else str(seen.calls[target])
    return f"the step between {start} and {end}"
