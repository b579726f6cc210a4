"""Forward passes of a model with its head: what goes in, what comes out, and a second one whose vectors are others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscope.analyzer import Analyzer
from normscope.closeness import coarser, rows_of
from normscope.flow.hooks import mine
from normscope.flow.modules import is_linear
from normscope.flow.watching import Call, Watch, watching
from normscope.inputs import Item
from normscope.interface import lock_of
from normscope.layers import layer_modules


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


def pass_of(lens: Analyzer, watch: Watch, logits: Tensor, state: Tensor | None = None) -> Pass:
    """A pass that was watched; `state` is the last layer's, if it is known otherwise."""
    side = lens.stacks[-1].side
    calls = watch.calls[side]
    state = watch.outputs[side] if state is None else state
    return Pass(state, calls, _rows(logits, calls, len(state)).to(lens.dtype), coarser(lens.dtype, logits.dtype))


def _rows(logits: Tensor, calls: Sequence[Call], tokens: int) -> Tensor:
    """(rows, classes) of one item's logits: a row for each token, or one for all. A head that makes one number for each
    token has one class."""
    single = any(is_linear(call.module) and call.made.shape == (tokens, 1) for call in calls)
    return logits.reshape(-1, 1) if single and logits.shape == (1, tokens) else rows_of(logits[0])


def another_pass(lens: Analyzer, item: Item) -> Pass:
    """The same input with noise on what enters the first layers: all vectors are others, all else is the same."""
    wrapped = lens.prompt is not None or bool(lens.base._forward_pre_hooks)  # as in `Analyzer.trace`
    model = lens.given if wrapped else lens.model
    with lock_of(lens.base), torch.no_grad(), watching(lens) as watch, _noise(lens):
        logits = logits_of(model(**lens.batch([item])))
    assert logits is not None
    return pass_of(lens, watch, logits)


@contextmanager
def _noise(lens: Analyzer) -> Iterator[None]:
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
        for stack in lens.stacks:
            first = layer_modules(lens.base, stack)[0]
            handles.append(first.register_forward_pre_hook(mine(enter(stack.side)), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
