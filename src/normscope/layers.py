"""Where a model keeps its layers."""

from __future__ import annotations

from math import prod

from torch import nn
from transformers import PreTrainedModel

from normscope.errors import NormscopeError
from normscope.models.spec import Stack


def has_layers(base: PreTrainedModel, stack: Stack) -> bool:
    """Whether the model has this side at all."""
    return bool(_matching(base, stack))


def _matching(base: PreTrainedModel, stack: Stack) -> list[nn.Module]:
    """The modules at the stack's path, whose stars stand for numbers; step by step, as models have many modules."""
    found: list[nn.Module] = [base]
    for name in stack.layers.split("."):
        children = [list(module.named_children()) for module in found]
        found = [child for some in children for n, child in some if n == name or (name == "*" and n.isdigit())]
    return found


def layer_modules(base: PreTrainedModel, stack: Stack) -> list[nn.Module]:
    """The layer modules of a stack, in order, each once (a shared layer is one module)."""
    found = _matching(base, stack)
    if not found:
        raise NormscopeError(f"{type(base).__name__} has no layers at {stack.layers}: its family is described wrongly.")
    return found


def called_modules(base: PreTrainedModel, stack: Stack) -> list[nn.Module]:
    """The layer module of every call: a shared layer stands there several times. Groups of inner layers (ALBERT) are
    called in turn, each all of its layers, a group as often as its share of the outer depth."""
    modules = layer_modules(base, stack)
    outer, inner = (prod(getattr(base.config, name) for name in names) for names in (stack.depth[:1], stack.depth[1:]))
    groups = len(modules) // inner
    return [modules[(n // inner * groups // outer) * inner + n % inner] for n in range(outer * inner)]
