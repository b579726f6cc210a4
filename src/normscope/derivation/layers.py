"""Find the layers of a model in one pass: chains of modules, each of which reads what the one before it returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normscope.derivation.watch import LayerCallArguments, encoder_states, first_tensor, hidden_states
from normscope.errors import NormscopeError
from normscope.models.modules import without_compilation
from normscope.tracing.hooks import Arguments, watch_calls
from normscope.tracing.model_state import attention_stand_in, model_lock
from normscope.tracing.products import ProductWatch


@dataclass
class Chain:
    """Calls of modules whose paths differ only in numbers."""

    pattern: str  # the path with `*` for every number that varies
    calls: list[LayerCallArguments] = field(default_factory=list)
    mixtures: list[int] = field(default_factory=list)  # attention products in each call
    crosses: bool = False  # called with encoder states

    def is_connected(self) -> bool:
        """Whether every call reads the output of the call before it."""
        pairs = zip(self.calls, self.calls[1:], strict=False)
        return all(a.output.shape == b.states.shape and torch.equal(a.output, b.states) for a, b in pairs)


def find_chains(base: nn.Module, inputs: Mapping[str, Any]) -> list[Chain]:
    """The layer stacks of a model, in the order in which they run."""
    chains: dict[str, Chain] = {}
    with torch.no_grad(), _log_repeated_modules(base, chains):
        base(**inputs)
    found = [chain for chain in chains.values() if chain.is_connected() and any(chain.mixtures)]
    # An outer chain is preferred, unless one of its modules holds several layers.
    chosen: list[Chain] = []
    for chain in sorted(found, key=lambda one: one.pattern.count(".")):
        inside = any(chain.pattern.startswith(f"{other.pattern}.") for other in chosen)
        if not inside and max(chain.mixtures) <= 1 + chain.crosses:
            chosen.append(chain)
    if not chosen:
        raise NormscopeError(f"{type(base).__name__} has no layers that can be described: {_why_none(chains)}.")
    return sorted(chosen, key=lambda one: list(chains).index(one.pattern))


def _why_none(chains: Mapping[str, Chain]) -> str:
    """Why no chain of modules can be described, from the one that comes closest."""
    mixing = [chain for chain in chains.values() if any(chain.mixtures)]
    connected = next((chain for chain in mixing if chain.is_connected()), None)
    if connected is not None:
        most, crosses = max(connected.mixtures), " beside its cross-attention" if connected.crosses else ""
        return f"those at {connected.pattern} mix tokens {most} times each, not once{crosses}"
    if mixing:
        return f"those at {mixing[0].pattern} mix tokens, but do not each read the output of the one before"
    return "no list of modules in which each reads the output of the one before it and mixes tokens by attention"


def number_pattern(path: str) -> str:
    """A path with `*` for its numbers: layers.3 -> layers.*"""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _log_repeated_modules(base: nn.Module, chains: dict[str, Chain]) -> AbstractContextManager[Any]:
    """Log the calls of all modules in lists, by pattern."""
    products, lengths = [0], {0}
    starts: dict[int, list[tuple[int, Tensor]]] = {}

    def count(weights: Tensor, values: Tensor, mixed: Tensor) -> None:
        products[0] += 1

    def enter(path: str, module: nn.Module, given: Arguments) -> None:
        try:
            read = hidden_states(*given)
        except NormscopeError:
            read = torch.zeros(0)
        if read.dim() > 1:
            lengths.add(len(read.flatten(0, -2)))
        starts.setdefault(id(module), []).append((products[0], read))

    def leave(path: str, module: nn.Module, given: Arguments, output: Any) -> None:
        before, read = starts[id(module)].pop()
        made = first_tensor(output)
        if made is None or made.shape != read.shape:
            return
        chain = chains.setdefault(number_pattern(path), Chain(number_pattern(path)))
        chain.calls.append(LayerCallArguments(module, *given, made.clone()))
        chain.mixtures.append(products[0] - before)
        chain.crosses = chain.crosses or encoder_states(*given) is not None

    contexts = ExitStack()
    repeated = [one for one in base.named_modules(remove_duplicate=False) if re.search(r"(^|\.)\d+$", one[0])]
    contexts.enter_context(watch_calls(repeated, enter, leave))
    contexts.enter_context(ProductWatch(lambda: lengths, count))
    return contexts


class _InterfaceCalls:
    """Takes the place of a Recorder and notes the modules that call the attention interface."""

    def __init__(self) -> None:
        self.modules: set[int] = set()

    def attend(self, eager: Callable[..., Any], module: nn.Module, *args: Any) -> Any:
        *given, kwargs = args
        self.modules.add(id(module))
        return eager(module, *given, **kwargs)


def interface_modules(base: PreTrainedModel, inputs: Mapping[str, Any]) -> frozenset[int]:
    """Ids of the modules that call transformers' attention interface in a pass."""
    noted = _InterfaceCalls()
    with model_lock(base), torch.no_grad(), without_compilation(base), attention_stand_in(base, noted):
        base(**inputs)
    return frozenset(noted.modules)
