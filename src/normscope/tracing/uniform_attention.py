"""A model whose attention is uniform in some layers: every output attends alike to all tokens that it may see.

The report that the mixing ratio explains (EMNLP 2021): little is lost, because attention mixes little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normscope.inputs.encode import forward_inputs
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_attribute, layer_modules
from normscope.models.scopes import layer_steps
from normscope.models.spec import Attention, Stack
from normscope.tracing.trace import active_trace, attention_stand_in, model_lock


def run_uniform(loaded: LoadedModel, item: Item, layers: Sequence[int], *, logits: bool = False) -> Tensor:
    """(n, d): the final hidden states, or with `logits` the head's output, where the attention of these layers is
    uniform over the tokens it may see. No layers: the plain forward pass."""
    loaded.refuse_prompt("Uniform attention")
    stack = loaded.stacks[0]
    model = loaded.model if logits else loaded.base
    with model_lock(loaded.base), torch.no_grad(), _attend_uniformly(loaded, stack, frozenset(layers)):
        made = model(**forward_inputs(loaded, [item]))
    if logits:
        found = made.logits
    elif loaded.two_sided:
        found = made.encoder_last_hidden_state
    else:
        found = made.last_hidden_state
    real = item.sides[stack.side].real
    return found[0][real.to(found.device)].to(loaded.dtype).cpu()  # type: ignore[no-any-return]


@contextmanager
def _attend_uniformly(loaded: LoadedModel, stack: Stack, layers: frozenset[int]) -> Iterator[None]:
    if not layers:
        yield
        return
    replaced = _Uniform(layers)
    probabilities = next(
        (s.part.probabilities for s in layer_steps(stack.blocks) if isinstance(s.part, Attention) and not s.part.cross),
        None,
    )

    def mine() -> bool:  # and not a pass of the same model in another thread
        return getattr(active_trace, "recorder", None) is replaced

    def begin(module: nn.Module, args: Any) -> None:
        if mine():
            replaced.count += 1
            replaced.inside = True

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if mine():
            replaced.inside = False

    def even(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return (_uniform_probabilities(args[0]), *args[1:]) if mine() and replaced.wanted() else None

    with attention_stand_in(loaded.base, replaced) as handles:
        for layer in layer_modules(loaded.base, stack):
            handles.append(layer.register_forward_pre_hook(begin))
            handles.append(layer.register_forward_hook(end))
            if probabilities is not None:
                handles.append(layer_attribute(layer, probabilities).register_forward_pre_hook(even))
        yield


class _Uniform:
    """Stands where a Recorder does, and lets the attention of some layers see all keys alike."""

    def __init__(self, layers: frozenset[int]) -> None:
        self.layers = layers
        self.count = -1  # the layer that is running
        self.inside = False

    def wanted(self) -> bool:
        return self.inside and self.count in self.layers

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
        """A query of zeros has the same score with every key; a mask keeps what it forbids and loses its biases."""
        if not self.wanted():
            return eager(module, query, key, value, mask, **kwargs)
        return eager(module, torch.zeros_like(query), key, value, _forbidding_mask(mask), **_drop_position_bias(kwargs))


def _forbidding_mask(mask: Tensor | None) -> Tensor | None:
    if mask is None or not mask.is_floating_point():
        return mask
    forbidden = mask <= torch.finfo(torch.float32).min / 2
    return torch.zeros_like(mask).masked_fill(forbidden, torch.finfo(torch.float32).min)


def _drop_position_bias(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: None if key == "position_bias" else value for key, value in kwargs.items()}


def _uniform_probabilities(probabilities: Tensor) -> Tensor:
    """Equal weights for all keys that have any: of one unpadded item, those that a mask does not forbid."""
    seen = (probabilities > 0).to(probabilities.dtype)
    return seen / seen.sum(-1, keepdim=True)
