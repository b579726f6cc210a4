"""Products of attention probabilities and values, seen below PyTorch's functions.

For attention that does not use the interface of transformers: `matmul`, `@`, `einsum`, `baddbmm` and fused attention
all become one of a few operators, whose left operand consists of probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDING = 1e-4  # how far the sums of probabilities may exceed one
aten = torch.ops.aten
FUSED = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_fused_attention_overrideable,
)
# Weights (B, i, j), values (B, j, d_h), their product (B, i, d_h) -> another product to use instead, or None.
OnProduct = Callable[[Tensor, Tensor, Tensor], Tensor | None]


class ProductRecorder(Protocol):
    """The part of a Recorder that products need."""

    attending: str | None  # path of the running attention whose products are watched
    current_call: Any

    def is_active(self) -> bool: ...

    def call_to_record(self) -> Any: ...


def product_watch(recorder: ProductRecorder) -> ProductWatch:
    """A context that keeps the first product of every watched attention in the layer call in progress."""

    def lengths() -> set[int]:
        call = None if recorder.attending is None else recorder.call_to_record()
        if call is None or recorder.attending in call.products:
            return set()
        return {one.shape[-2] for one in (call.input, call.encoder) if one is not None}

    def keep(weights: Tensor, values: Tensor, mixed: Tensor) -> None:
        call = recorder.current_call
        both = tuple(one.unflatten(0, (len(call.input), -1)) for one in (weights, values))
        call.products[recorder.attending] = both

    return ProductWatch(lengths, keep)


def attention_hooks(recorder: ProductRecorder, module: nn.Module, path: str) -> list[Any]:
    """Hooks that tell the recorder while an attention runs."""

    def hook(running: str | None) -> Callable[..., None]:
        def tell(module: nn.Module, *given: Any) -> None:
            if recorder.is_active():
                recorder.attending = running

        return tell

    return [module.register_forward_pre_hook(hook(path)), module.register_forward_hook(hook(None))]


def copy_tensors(value: Any) -> Any:
    """A copy of a tensor, or of the tensors in a tuple, for layers that change tensors in place."""
    if isinstance(value, tuple):
        return tuple(copy_tensors(one) for one in value)
    return value.clone() if isinstance(value, Tensor) else value


class ProductWatch(TorchDispatchMode):
    """Calls `on_product` for every product whose left operand consists of probabilities over as many tokens as
    `lengths` says at that moment."""

    def __init__(self, lengths: Callable[[], set[int]], on_product: OnProduct) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lengths, self.on_product = lengths, on_product

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is aten.bmm or packet is aten.mm:
            left, right, made = (one if one.dim() == 3 else one[None] for one in (args[0], args[1], result))
            if left.shape[-1] in self.lengths() and are_probabilities(left):
                other = self.on_product(left, right, made)
                return result if other is None else other.view_as(result)
        elif packet in FUSED and args[1].shape[-2] in self.lengths():
            values = args[2].repeat_interleave(args[0].shape[1] // args[2].shape[1], 1)
            weights = fused_probabilities(args, kwargs or {})
            other = self.on_product(*(one.flatten(0, 1) for one in (weights, values, result[0])))
            return result if other is None else (other.view_as(result[0]), *result[1:])
        return result


def are_probabilities(weights: Tensor) -> bool:
    """Whether rows are probabilities over at least two tokens: not negative, with sums of at most one (less if part of
    the attention goes to a sink)."""
    if not weights.is_floating_point():
        return False
    sums = weights.sum(-1)
    return bool((weights >= 0).all()) and bool(((sums > 0) & (sums < 1 + ROUNDING)).all())


def fused_probabilities(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """(b, H, i, j): the probabilities of a fused attention, from its queries, keys, mask and scale."""
    query, key = args[0], args[1]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    causal = next((one for one in args[3:] if isinstance(one, bool) and one), kwargs.get("is_causal", False))
    mask = kwargs.get("attn_mask", kwargs.get("attn_bias"))
    mask = mask if mask is not None else next((one for one in args[3:] if isinstance(one, Tensor)), None)
    scale = kwargs.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~ones, -math.inf)
    found: Tensor = scores.softmax(-1)
    return found
