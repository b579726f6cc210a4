"""Run a model with uniform attention in some layers: every output attends equally to all tokens that are not masked.

Uniform attention changes little because attention mixes little, as the mixing ratio explains (EMNLP 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.inputs.encode import forward_inputs
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import MATMUL, has_recurrence, layer_attribute, layer_modules
from normscope.models.scopes import layer_steps
from normscope.models.spec import Attention, Stack
from normscope.tracing.model_state import active_trace, attention_stand_in, model_lock
from normscope.tracing.products import ProductWatch


def run_uniform_attention(loaded: LoadedModel, item: Item, layers: Sequence[int], *, logits: bool = False) -> Tensor:
    """(n, d): the final hidden states, or with `logits` the logits, with uniform attention in `layers` (none: the plain
    forward pass)."""
    loaded.refuse_prompt("Uniform attention")
    stack = loaded.stacks[0]
    if has_recurrence(stack):
        raise NormscopeError("Uniform attention is not defined for a model whose layers mix tokens by a recurrence.")
    model = loaded.model if logits else loaded.base
    with model_lock(loaded.base), torch.no_grad(), _attend_uniformly(loaded, stack, frozenset(layers)):
        output = model(**forward_inputs(loaded, [item]))
    if logits:
        found = output.logits
    elif loaded.two_sided:
        found = output.encoder_last_hidden_state
    else:
        found = output.last_hidden_state
    real = item.sides[stack.side].real
    return found[0][real.to(found.device)].to(loaded.dtype).cpu()  # type: ignore[no-any-return]


@contextmanager
def _attend_uniformly(loaded: LoadedModel, stack: Stack, layers: frozenset[int]) -> Iterator[None]:
    if not layers:
        yield
        return
    uniform = _UniformAttention(layers)
    probabilities = next(
        (s.part.probabilities for s in layer_steps(stack.blocks) if isinstance(s.part, Attention) and not s.part.cross),
        None,
    )

    def is_active() -> bool:  # False for passes of the same model in other threads
        return getattr(active_trace, "recorder", None) is uniform

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_active():
            uniform.index += 1
            uniform.inside = True
            uniform.tokens = (args[0] if args else kwargs["hidden_states"]).shape[-2]

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if is_active():
            uniform.inside = False

    def replace_probabilities(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return (_uniform_attention_weights(args[0]), *args[1:]) if is_active() and uniform.applies() else None

    def lengths() -> set[int]:
        tokens = uniform.tokens if is_active() and uniform.applies() else 0
        return {tokens} if tokens else set()

    def mix_uniformly(weights: Tensor, values: Tensor, mixed: Tensor) -> Tensor:
        return torch.bmm(_uniform_attention_weights(weights), values)

    products = ProductWatch(lengths, mix_uniformly) if probabilities == MATMUL else nullcontext()
    with attention_stand_in(loaded.base, uniform) as handles, products:
        for layer in layer_modules(loaded.base, stack):
            handles.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(layer.register_forward_hook(end))
            if probabilities not in (None, MATMUL):
                handles.append(layer_attribute(layer, probabilities).register_forward_pre_hook(replace_probabilities))
        yield


class _UniformAttention:
    """Takes the place of a Recorder and makes the attention of some layers uniform."""

    def __init__(self, layers: frozenset[int]) -> None:
        self.layers = layers
        self.index = -1  # index of the current layer
        self.inside = False
        self.tokens = 0  # that the current layer reads

    def applies(self) -> bool:
        """True inside a layer whose attention is to be uniform."""
        return self.inside and self.index in self.layers

    def attend(
        self,
        eager: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """Attend with zero queries, which give every key the same score, and without additive biases in the mask."""
        if not self.applies():
            return eager(module, query, key, value, mask, **kwargs)
        return eager(
            module,
            torch.zeros_like(query),
            key,
            value,
            _uniform_attention_mask(mask),
            **_uniform_attention_kwargs(kwargs),
        )


def _uniform_attention_mask(mask: Tensor | None) -> Tensor | None:
    """The mask with zeros for all keys that it does not forbid."""
    if mask is None or not mask.is_floating_point():
        return mask
    forbidden = mask <= torch.finfo(torch.float32).min / 2
    return torch.zeros_like(mask).masked_fill(forbidden, torch.finfo(torch.float32).min)


def _uniform_attention_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: None if key == "position_bias" else value for key, value in kwargs.items()}


def _uniform_attention_weights(probabilities: Tensor) -> Tensor:
    """Equal weights for all keys with a positive weight, which for an unpadded item are those that are not masked."""
    visible = (probabilities > 0).to(probabilities.dtype)
    return visible / visible.sum(-1, keepdim=True)
