"""Attention sinks that multiply the mixed values: the share of the softmax that the score of no key leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.errors import NormscopeError
from normscope.models.modules import layer_attribute
from normscope.models.spec import Attention

if TYPE_CHECKING:
    from normscope.tracing.build import LayerCall


class SoftmaxWatch(TorchDispatchMode):
    """Keeps what every softmax over the last dimension reads."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._softmax and args[1] in (-1, args[0].dim() - 1):
            self.kept.append(args[0])
        return func(*args, **(kwargs or {}))


def attend_with_sinks(
    call: LayerCall, eager: Callable[..., Any], given: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """The output and the probabilities (b, H, i, j) of an eager attention, the latter as they are in effect."""
    module, sinks = given[0], _sink_scores(call, given[0])
    if sinks is None:
        return eager(*given, **kwargs)  # type: ignore[no-any-return]
    scores: list[Tensor] = []
    with SoftmaxWatch(scores):
        output, weights = eager(*given, **kwargs)
    if len(scores) != 1:
        raise NormscopeError(f"{type(module).__name__} computes {len(scores)} softmaxes, so its sinks are unknown.")
    return output, weights * sink_share(scores[0], sinks)[..., None].to(weights.dtype)


def _sink_scores(call: LayerCall, module: nn.Module) -> Tensor | None:
    """(H,): the scores of the sinks of an attention, if its description has any."""
    parts = [step.part for step in call.steps if isinstance(step.part, Attention)]
    named = [part for part in parts if part.sink_scores is not None]
    own = next((part for part in named if layer_attribute(call.layer, part.module) is module), None)
    return None if own is None else layer_attribute(call.layer, str(own.sink_scores)).detach()


def sink_share(scores: Tensor, sinks: Tensor) -> Tensor:
    """(..., H, i): ``sigmoid(logsumexp(scores) - sink)`` for scores (..., H, i, j)."""
    return (scores.logsumexp(-1) - sinks[:, None]).sigmoid()
