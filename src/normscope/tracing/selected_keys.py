"""What models pass to attention functions that they do not know, such as the stand-in of a trace.

Sparse attention (DeepSeek V3.2 and its relatives) selects keys for every query. Models fold the selection into the mask
if their attention implementation is called "eager" or "sdpa", and pass the indices to any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError

SELECTED = "indices"  # argument with the selected keys, (b, i, k)
# Tensors that eager attention may ignore: queries, keys and masks already depend on them, or only the head reads them.
WITHOUT_EFFECT = frozenset(
    [
        "position_ids",
        "cache_position",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "logits_to_keep",
    ]
)


def fold_selected_keys(
    query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor | None, dict[str, Any]]:
    """The mask without the keys that are not selected, and the other arguments without the selection."""
    indices = kwargs.get(SELECTED)
    if indices is None:
        return mask, kwargs
    if mask is None:
        raise NormscopeError("The model selects keys for an attention without a mask, which is not supported.")
    left_out = torch.ones(len(query), query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    left_out = left_out.scatter(-1, indices.long(), False)[:, None]
    if mask.dtype == torch.bool:
        folded = mask & ~left_out
    else:  # attention may be computed in float32, where the lowest float64 number is infinite
        lowest = max(torch.finfo(mask.dtype).min, torch.finfo(torch.float32).min)
        folded = mask.masked_fill(left_out, lowest)
    return folded, kwargs | {SELECTED: None}


def refuse_ignored_tensors(module: nn.Module, eager: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise an error if eager attention would ignore a tensor that the model passes to it, and that is no parameter of
    the module, where it may look instead."""
    known = _parameter_names(eager) | WITHOUT_EFFECT
    tensors = {name: one for name, one in kwargs.items() if isinstance(one, Tensor) and name not in known}
    own = {id(one) for one in module.parameters()} if tensors else set()
    name = next((name for name, one in tensors.items() if id(one) not in own), None)
    if name is not None:
        raise NormscopeError(
            f"{type(module).__name__} passes {name} to its attention function, and its eager attention ignores it, so "
            "that its attention weights are not known. Such models are not supported."
        )


@lru_cache(maxsize=256)
def _parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
