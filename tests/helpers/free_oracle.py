"""A reference without descriptions: any layer's own code, run on tensors that know which token they come from.

The model runs once in float64, every call of a layer is recorded, and each is then replayed on `Traced` tensors, under
the rules of `free_rules`: softmax, norm statistics, routing, gates on attention and all of a recurrence but its values
are held at what the forward pass made of them, an elementwise nonlinear function is split by integrated gradients from
zero, and the rest is linear.
Nothing here knows how any layer is built, and nothing is shared with the library that it judges or with other oracles.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from tests.helpers.free_parts import Broken, Held, Linear, Run, UntraceableError
from tests.helpers.free_recurrences import held_recurrences
from tests.helpers.free_rules import Traced, is_complete

SOURCES = ("hidden_states", "encoder_hidden_states")  # arguments of a layer, whatever their order


@dataclass
class Shares:
    """sum over columns of parts + rest = actual. Columns: the layer's own tokens, then the encoder's."""

    parts: Tensor  # (columns, ...)
    rest: Tensor
    actual: Tensor


@dataclass
class FreeLayer:
    """One call of a layer."""

    output: Shares
    modules: dict[str, list[Shares]]  # path in the layer -> what each call of that module returned, if it has parts
    inputs: dict[str, list[Shares]]  # the same of the first argument


@dataclass
class LayerCall:
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor = field(default_factory=lambda: torch.empty(0))


@torch.no_grad()
def free_oracle(model: PreTrainedModel, encoding: Mapping[str, Tensor], **options: Any) -> dict[str, list[FreeLayer]]:
    """The calls of each list of layers, in order, by the list's path; `options` as for `decompose_call`."""
    model = copy.deepcopy(model).double().eval()
    model.set_attn_implementation("eager")
    model.config.use_cache = False  # into which recurrences write
    if any(hasattr(module, "experts") for module in model.modules()):
        model.set_experts_implementation("eager")  # the default, a grouped product, refuses float64
    calls: dict[str, list[LayerCall]] = {}
    handles = []
    for path, layers in layer_lists(model).items():
        calls[path] = []
        for layer in layers:
            handles += record_calls(layer, calls[path])
    model(**encoding)
    for handle in handles:
        handle.remove()
    batch = len(next(iter(encoding.values())))
    found = {}
    for path, some in calls.items():
        states = [source_tensors(call)[0].shape for call in some]
        if some and states == [call.output.shape for call in some]:  # a list of layers, not of something else
            if any(len(shape) == 3 and shape[0] != batch for shape in states):
                raise UntraceableError(f"the first axis of the states in {path} is not the batch")
            found[path] = [decompose_call(call, **options) for call in some]
    if not found:
        raise UntraceableError("the model calls no list of layers")
    return found


def layer_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The outermost lists of modules."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in found):
            found[path] = module
    return found


def record_calls(layer: nn.Module, calls: list[LayerCall]) -> list[Any]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(LayerCall(module, *copy.deepcopy((args, kwargs))))  # the cache as it is before the call

    def after(module: nn.Module, args: Any, output: Any) -> None:
        calls[-1].output = first(output).clone()

    return [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]


def first(output: Any) -> Any:
    return (output[0] if output else None) if isinstance(output, tuple | list) else output


@torch.no_grad()
def decompose_call(call: LayerCall, **options: Any) -> FreeLayer:
    """Replay one call of a layer; `options` are the switches of `Run`."""
    sources = source_tensors(call)
    run = Run(sum(source.shape[-2] for source in sources), **options)
    traced = trace_sources(sources, run)

    def swap(leaf: Any) -> Any:
        return next((one for source, one in zip(sources, traced, strict=True) if leaf is source), leaf)

    modules: dict[str, list[Shares]] = {}
    inputs: dict[str, list[Shares]] = {}
    with sdpa_kernel([SDPBackend.MATH]), held_recurrences(call.layer), watched(call.layer, run, modules, inputs):
        output = first(call.layer(*tree_map(swap, call.args), **tree_map(swap, call.kwargs)))
    if not isinstance(output, Traced):
        raise UntraceableError("the layer's output does not depend on its input")
    size = float(call.output.abs().max())
    torch.testing.assert_close(output.value, call.output, rtol=0, atol=1e-12 * size)  # the replay is the call
    return FreeLayer(shares(output), modules, inputs)


def source_tensors(call: LayerCall) -> list[Tensor]:
    """The states that enter the layer: (batch, tokens, d)."""
    bound = inspect.signature(call.layer.forward).bind(*call.args, **call.kwargs).arguments
    bound |= bound.get("kwargs", {})
    named = [bound[name] for name in SOURCES if isinstance(bound.get(name), Tensor)]
    return named or [next(leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor))]


def trace_sources(sources: list[Tensor], run: Run) -> list[Traced]:
    """Part j is token j's own vector, and zero elsewhere; the rest is zero."""
    traced, offset = [], 0
    for source in sources:
        pieces = [torch.zeros_like(source) for _ in range(run.columns + 1)]
        for j in range(source.shape[-2]):
            pieces[offset + j][..., j, :] = source[..., j, :]
        traced.append(Traced(source.clone(), Linear(pieces), run))
        offset += source.shape[-2]
    return traced


@contextmanager
def watched(
    layer: nn.Module, run: Run, modules: dict[str, list[Shares]], inputs: dict[str, list[Shares]]
) -> Iterator[None]:
    """Keep `run.path` at the module being called, and what enters and leaves every module."""
    handles = []
    for path, module in layer.named_modules():

        def enter(module: nn.Module, args: Any, path: str = path) -> None:
            run.path.append(path)
            keep(first(args), path, inputs)

        def leave(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
            run.path.pop()
            keep(first(output), path, modules)

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def keep(tensor: Any, path: str, kept: dict[str, list[Shares]]) -> None:
    if isinstance(tensor, Traced) and not isinstance(divided(tensor).state, Held | Broken):
        kept.setdefault(path, []).append(shares(tensor, path))


def divided(tensor: Traced) -> Traced:
    """The same, but not as a function, which any operation that is not elementwise divides among the tokens."""
    same: Traced = tensor[None][0]  # type: ignore[assignment]
    return same


def shares(tensor: Traced, path: str = "the layer itself") -> Shares:
    found = divided(tensor)
    if isinstance(found.state, Broken):
        raise UntraceableError(found.state.reason)
    if not isinstance(found.state, Linear):
        raise UntraceableError(f"the output is held: {path}")
    if not is_complete(found, tensor.run.rounding):
        raise UntraceableError(f"the parts do not sum to the model's own tensor: {path}")
    *parts, rest = found.state.pieces
    return Shares(torch.stack(parts), rest, tensor.value.double())
