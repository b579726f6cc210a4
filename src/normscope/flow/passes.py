"""Forward passes of a model with its head: what goes in, what comes out, and a second one whose vectors are others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.flow.modules import is_linear
from normscope.flow.watch import Call, Watch, watching
from normscope.inputs.encode import forward_inputs
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_modules
from normscope.tracing.closeness import coarser, rows_of
from normscope.tracing.hooks import mine
from normscope.tracing.trace import model_lock, module_to_call


@dataclass(frozen=True)
class Pass:
    """What one forward pass shows of a head."""

    state: Tensor  # (n, d): the last layer's
    calls: Sequence[Call]
    logits: Tensor  # (rows, classes)
    dtype: torch.dtype  # the one that rounds the most in the logits


def logits_of(made: Any) -> Tensor | None:
    """The logits among what a model returns: those of the tokens, where a model has some of the text too."""
    found = (getattr(made, name, None) for name in ("logits", "prediction_logits"))
    return next((one for one in found if isinstance(one, Tensor)), None)


def pass_of(loaded: LoadedModel, watch: Watch, logits: Tensor, state: Tensor | None = None) -> Pass:
    """A pass that was watched; `state` is the last layer's, if it is known otherwise."""
    side = loaded.stacks[-1].side
    calls = watch.calls[side]
    state = watch.outputs[side] if state is None else state
    return Pass(state, calls, _rows(logits, calls, len(state)).to(loaded.dtype), coarser(loaded.dtype, logits.dtype))


def _rows(logits: Tensor, calls: Sequence[Call], tokens: int) -> Tensor:
    """(rows, classes) of one item's logits: a row for each token, or one for all. A head that makes one number for each
    token has one class."""
    single = any(is_linear(call.module) and call.made.shape == (tokens, 1) for call in calls)
    return logits.reshape(-1, 1) if single and logits.shape == (1, tokens) else rows_of(logits[0])


def another_pass(loaded: LoadedModel, item: Item) -> Pass:
    """The same input with noise on what enters the first layers: all vectors are others, all else is the same."""
    model = module_to_call(loaded, head=True)
    with model_lock(loaded.base), torch.no_grad(), watching(loaded) as watch, _noise(loaded):
        logits = logits_of(model(**forward_inputs(loaded, [item])))
    assert logits is not None
    return pass_of(loaded, watch, logits)


@contextmanager
def _noise(loaded: LoadedModel) -> Iterator[None]:
    generator = torch.Generator().manual_seed(0)
    handles, seen = [], set()

    def enter(side: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if side in seen:  # a layer that is called again
                return None
            seen.add(side)
            x = args[0] if args else kwargs["hidden_states"]
            noise = torch.randn(x.shape, generator=generator).to(x)
            changed = x + noise * x.square().mean().sqrt()
            return ((changed, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": changed})

        return hook

    try:
        for stack in loaded.stacks:
            first = layer_modules(loaded.base, stack)[0]
            handles.append(first.register_forward_pre_hook(mine(enter(stack.side)), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
