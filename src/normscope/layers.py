"""Where a model keeps its layers, and which parts of a layer the steps through it need."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from normscope.errors import NormscopeError
from normscope.models.spec import Attention, Experts, FeedForward, Norm, Stack
from normscope.scopes import Step


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
    found = list(dict.fromkeys(_matching(base, stack)))
    if not found:
        raise NormscopeError(f"{type(base).__name__} has no layers at {stack.layers}: its family is described wrongly.")
    return found


def paths_of(steps: Sequence[Step], values: bool) -> set[str]:
    """The submodules whose inputs and outputs the steps need; those that make the values too, if they are wanted."""
    paths: set[str] = set()
    for step in steps:
        part = step.part
        if step.reader is not None:
            paths.add(step.reader)
        if isinstance(part, Norm):
            paths.add(part.path)
        elif isinstance(part, FeedForward):
            paths |= {part.into, part.out} | ({part.up} if part.up else set())
        elif isinstance(part, Experts):
            paths.add(part.module)
        elif isinstance(part, Attention):
            paths.add(part.output)
            if part.probabilities is not None:
                paths |= {part.probabilities, part.value}
            elif values:
                paths.add(part.value)
    return paths


def linear_paths_of(steps: Sequence[Step]) -> list[str]:
    """The linear submodules whose input another component makes."""
    found: list[str] = []
    for part in (step.part for step in steps):
        if isinstance(part, FeedForward):
            found += [part.into, part.out, *([part.up] if part.up else [])]
        elif isinstance(part, Attention):
            found.append(part.output)
    return found


def last_path_of(steps: Sequence[Step]) -> str | None:
    """The submodule after which the steps are complete, where most of the layer is still to come."""
    part = steps[-1].part
    if any(isinstance(step.part, FeedForward | Experts) for step in steps):
        return None
    if isinstance(part, Norm):
        return part.path
    return part.output if isinstance(part, Attention) else steps[-1].reader
