"""Run an attacked model as its user would, on a copy with eager attention, and record every layer call as it happens.

A layer that was cut out is never called, one that stands in the list twice is called twice; both show here. Hooks are
put in last, so that they see what hooks of others have made of inputs and outputs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.attacks.families import family_stacks, layer_classes
from tests.helpers.layer_oracle import Attention, FeedForward, Stack


class NoAnswer(Exception):  # noqa: N818  (not an error: the model no longer consists of the family's layers)
    """The model is not of a form that can be decomposed, for a reason that is given."""


@dataclass
class Call:
    """One call of one layer: the inputs and outputs of its parts, in order."""

    side: str
    layer: nn.Module
    stack: Stack
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    seen: dict[str, list[tuple[Any, Any]]] = field(default_factory=dict)  # path -> inputs and outputs
    cached: dict[str, Tensor] = field(default_factory=dict)  # path of an attention -> values that were there before

    @property
    def x(self) -> Tensor:
        return input_of(self.args, self.kwargs)


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states", kwargs.get("hidden_state"))


def huggingface(model: Any) -> PreTrainedModel:
    """The Hugging Face model inside its wrappers."""
    if isinstance(model, PreTrainedModel):
        return model
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise NoAnswer(f"no Hugging Face model in {type(model).__name__}")


def callable_of(model: Any) -> Any:
    """What torch.compile has wrapped: compiled or not, it computes the same."""
    return getattr(model, "_orig_mod", model)


def part(module: nn.Module, path: str) -> nn.Module:
    """The module at a path, also inside wrappers that have put another name in between."""
    for name in path.split(".") if path else ():
        module = child(module, name, path)
    return module


def child(module: nn.Module, name: str, path: str) -> nn.Module:
    level = [module]
    while level:
        for one in level:
            found = one._modules.get(name)
            if found is not None:
                return found
        level = [inner for one in level for inner in one.children()]
    raise NoAnswer(f"{type(module).__name__} has no {path}")


def side_of(path: str, stacks: Mapping[str, Stack]) -> str:
    if len(stacks) == 1:
        return next(iter(stacks))
    return "decoder" if "decoder" in path.split(".") else "encoder"


def paths_of(layer: nn.Module, stack: Stack) -> dict[str, bool]:
    """The parts of a layer whose inputs and outputs are needed; True for those that attend."""
    paths: dict[str, bool] = {}
    for block in stack.blocks:
        for branch in block.branches:
            op = branch.op
            for path in (branch.pre, branch.post, branch.scale):
                paths |= {path: False} if path else {}
            if isinstance(op, Attention):
                paths |= {op.module: True, op.value: False, op.output: False}
            else:
                dense = dense_layer(layer, op)
                paths |= dict.fromkeys(
                    (dense.output, dense.router) if dense.experts else (*dense.inputs, dense.output), False
                )
                if dense.experts:
                    paths[dense.experts] = False
        paths |= {block.after: False} if block.after else {}
    return {path: attends for path, attends in paths.items() if path}


def dense_layer(layer: nn.Module, ff: FeedForward) -> FeedForward:
    """A model of experts may have dense layers as well."""
    if ff.experts:
        try:
            part(layer, ff.experts)
        except NoAnswer:
            return ff._replace(output="mlp.down_proj", experts="", router="")
    return ff


def parts_of(layer: nn.Module, stack: Stack) -> list[tuple[str, nn.Module, bool]]:
    """Path, module and whether it attends; none of a layer that lacks some."""
    try:
        return [(path, part(layer, path), attends) for path, attends in paths_of(layer, stack).items()]
    except NoAnswer:
        return []


@contextmanager
def recorded(model: nn.Module, name: str) -> Iterator[list[Call]]:
    """While this lasts, the calls of the model's layers are appended to a list."""
    calls: list[Call] = []
    open_calls: list[Call] = []
    handles: list[Any] = []
    stacks = family_stacks(name)
    known: set[int] = set()

    def begin(side: str, layer: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            open_calls.append(Call(side, layer, stacks[side], args, kwargs))
            calls.append(open_calls[-1])

        return hook

    def see(layer: nn.Module, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if open_calls and open_calls[-1].layer is layer:
                open_calls[-1].seen.setdefault(path, []).append((input_of(args, kwargs), output))

        return hook

    def remember(layer: nn.Module, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if open_calls and open_calls[-1].layer is layer:
                found = cached_values(module, args, kwargs)
                if found is not None:
                    open_calls[-1].cached[path] = found.clone()

        return hook

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        open_calls.pop().output = output

    try:
        for path, layer in model.named_modules():
            if type(layer) not in layer_classes(name) or id(layer) in known:
                continue
            known.add(id(layer))
            side = side_of(path, stacks)
            handles.append(layer.register_forward_pre_hook(begin(side, layer), with_kwargs=True))
            for inner, module, attends in parts_of(layer, stacks[side]):
                handles.append(module.register_forward_hook(see(layer, inner), with_kwargs=True))
                if attends:
                    handles.append(module.register_forward_pre_hook(finite_mask, with_kwargs=True))
                    handles.append(module.register_forward_pre_hook(remember(layer, inner), with_kwargs=True))
            handles.append(layer.register_forward_hook(end, with_kwargs=True))
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def cached_values(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """(1, H, keys, width): the values that a cache holds for an attention before it adds its own: virtual tokens'."""
    caches = [getattr(one, "self_attention_cache", one) for one in (*args, *kwargs.values())]
    layers = next((one.layers for one in caches if hasattr(one, "layers") and hasattr(one, "get_seq_length")), [])
    number = getattr(module, "layer_idx", None)
    values = getattr(layers[number], "values", None) if number is not None and number < len(layers) else None
    return values if isinstance(values, Tensor) and values.dim() == 4 and values.shape[2] else None


def finite_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A float64 mask of finfo.min is -inf to a float32 softmax, and a row of nothing else is NaN."""

    def finite(value: Any) -> Any:
        lowest = isinstance(value, Tensor) and value.dtype == torch.float64 and value.dim() == 4
        return value.clamp_min(-1e30) if lowest else value

    return tuple(finite(one) for one in args), {key: finite(one) for key, one in kwargs.items()}
