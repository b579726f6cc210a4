"""Changes of values, for hooks, wrappers and patched functions: each a small callable that copies with its model."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

KINDS = (
    "look",
    "look",
    "constant",
    "scale",
    "slightly",
    "noise",
    "roll",
    "one token",
    "long",
    "far",
    "batch",
    "square",
)


@dataclass
class Change:
    """A function of a tensor (..., n, d)."""

    kind: str
    number: int = 0  # which token, which call
    calls: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        self.calls += 1
        if self.kind == "constant":
            return x + 0.5
        if self.kind == "scale":
            return x * 1.25
        if self.kind == "slightly":
            return x * 1.002
        if self.kind == "noise":
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(self.number), dtype=torch.float64)
            return x + 0.2 * noise.to(x.dtype)
        if self.kind == "roll" and x.dim() > 1:
            return x.roll(1, -2)
        if self.kind == "one token" and x.dim() > 1:
            other = x.clone()
            other[..., self.number % x.shape[-2], :] *= 0.5
            return other
        if self.kind == "long" and x.dim() > 1 and x.shape[-2] > 5:
            return x * 0.5
        if self.kind == "far" and x.dim() > 1 and x.shape[-2] > 4:
            return torch.cat([x[..., :4, :], 0.7 * x[..., 4:, :]], -2)
        if self.kind == "batch" and x.dim() == 3 and len(x) > 1:  # (items, n, d)
            return x * 0.5
        if self.kind == "some call" and self.calls == 1 + self.number % 2:
            return x + 0.25
        if self.kind == "square":
            return x + 0.1 * x * x
        return x

    def restart(self) -> None:
        self.calls = 0


def draw(rng: random.Random, counted: bool = False) -> Change:
    """A random change; `counted`: it may depend on the number of the call, which restarts in every pass."""
    return Change(rng.choice((*KINDS, "some call") if counted else KINDS), rng.randrange(100))


def settle(model: nn.Module) -> None:
    """The pass is over: changes that depend on the number of the call do nothing from now on."""
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            change = getattr(hook, "change", None)
            if isinstance(change, Change):
                change.calls = 100


def changed(made: Any, change: Change) -> Any:
    """The output of a module, with its first tensor changed."""
    if isinstance(made, Tensor):
        return change(made)
    if isinstance(made, tuple) and made:
        return (change(made[0]), *made[1:])
    if hasattr(made, "last_hidden_state"):
        made.last_hidden_state = change(made.last_hidden_state)
    elif hasattr(made, "logits"):
        made.logits = change(made.logits)
    return made
