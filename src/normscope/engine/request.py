"""What was asked for, checked against the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from normscope.decompose.activations import Gate
from normscope.decompose.layer import LayerOptions
from normscope.decompose.shapley.gate import EXPERTS, Shapley, parse
from normscope.errors import NormscopeError
from normscope.models.loaded import LoadedModel
from normscope.models.scopes import Step, resolve, steps_of
from normscope.models.spec import Experts, Stack
from normscope.tracing.proof import prove

SHARED: tuple[Gate, ...] = ("ig", "frozen", "tangent")  # one coefficient for all inputs of an output token
GATES = (*SHARED, "shapley", "shapley-exact", "shapley-sampled", "shapley-gaussian")
VALUE_BIASES = ("token", "remainder")


@dataclass(frozen=True)
class Options:
    """What may be asked of an analysis, as its user gives it; see `Analyzer.analyze`."""

    scopes: Iterable[str] | str | None = None
    layers: Iterable[int] | int | None = None
    heads: bool | Iterable[int] = False
    rows: Iterable[int] | int | None = None
    gate: str = "ig"
    value_bias: str = "token"


@dataclass(frozen=True)
class Request:
    """The scopes of one stack, and how to compute them."""

    stack: Stack
    scopes: tuple[str, ...]
    layers: tuple[int, ...]
    rows: tuple[int, ...] | None
    options: LayerOptions
    steps: tuple[Step, ...]  # as far as the scopes reach
    crosses: bool  # the maps have columns for the encoder's tokens


def requests_for(loaded: LoadedModel, options: Options) -> list[Request]:
    """One request for every side of the model that has a scope of those asked for. Of an encoder-decoder, `rows` are
    the decoder's, and `layers` and `heads` may lie beyond the last of the side that has fewer."""
    prove(loaded)
    return side_requests(loaded, loaded.stacks, options)


def side_requests(loaded: LoadedModel, stacks: Sequence[Stack], options: Options) -> list[Request]:
    """The requests for some sides of a model that was proved."""
    places = [loaded.stacks.index(stack) for stack in stacks]
    depths, counts = [loaded.depths[n] for n in places], [loaded.head_counts[n] for n in places]
    heads = options.heads
    if heads is not False and any(len(set(some)) > 1 for some in loaded.calls.heads.values()):
        raise NormscopeError("The layers of this model have different numbers of heads: leave heads out.")
    gate = gate_of(options.gate)
    if options.value_bias not in VALUE_BIASES:
        raise NormscopeError(f"Unknown value_bias {options.value_bias!r}. Known: {', '.join(VALUE_BIASES)}.")
    chosen = indices("layer", options.layers, max(depths))
    wanted_heads = () if heads is False else indices("head", None if heads is True else heads, max(counts))
    wanted_rows = None if options.rows is None else tuple(integers("row", options.rows))
    names = resolve(options.scopes, *(stack.blocks for stack in stacks))
    made = []
    for stack, found, depth, count in zip(stacks, names, depths, counts, strict=True):
        there = tuple(head for head in wanted_heads if head < count)
        how = LayerOptions(gate=gate, value_bias=options.value_bias, heads=there)  # type: ignore[arg-type]
        present = tuple(sorted({layer for layer in chosen if layer < depth}))
        if found and present:
            asked = wanted_rows if stack is stacks[-1] else None
            steps = steps_of(stack.blocks)
            crosses = any(step.alias == "cross-attention" for step in steps)
            reached = reach(steps, found)
            if isinstance(gate, Shapley) and any(isinstance(step.part, Experts) for step in reached):
                raise NormscopeError(EXPERTS)
            made.append(Request(stack, found, present, asked, how, reached, crosses))
    if not made:
        raise NormscopeError("None of these layers has any of these scopes: the side that has the scopes is shallower.")
    return made


def gate_of(name: Any) -> Gate | Shapley:
    """A gate by its name, checked."""
    shared = next((gate for gate in SHARED if gate == name), None)
    found = shared or (parse(name) if isinstance(name, str) else None)
    if found is None:
        raise NormscopeError(f"Unknown gate {name!r}. Known: {', '.join(GATES)}.")
    return found


def reach(steps: Sequence[Step], scopes: Iterable[str]) -> tuple[Step, ...]:
    """The steps up to the last wanted scope."""
    wanted = set(scopes)
    last = max(n for n, step in enumerate(steps) if {step.norms, step.weights} & wanted)
    return tuple(steps[: last + 1])


def integers(what: str, given: Any) -> list[int]:
    """A list of integers, given as one, as any iterable of them, or as an array of NumPy or PyTorch."""
    values = given.tolist() if hasattr(given, "tolist") else given
    listed: list[Any] = list(values) if hasattr(values, "__iter__") else [values]
    if not listed:
        raise NormscopeError(f"No {what} was asked for: {what}s=[] is empty.")
    listed = [entry.tolist() if hasattr(entry, "tolist") else entry for entry in listed]
    for entry in listed:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise NormscopeError(f"A {what} is an integer, not {type(entry).__name__} {entry!r}.")
    return listed


def within(what: str, given: Iterable[int] | int, size: int) -> list[int]:
    """Indices counted from 0 (negative: from the end), checked."""
    listed = integers(what, given)
    for entry in listed:
        if not -size <= entry < size:
            raise NormscopeError(f"There is no {what} {entry}: valid are 0 to {size - 1} (or -{size} to -1).")
    return [entry % size for entry in listed]


def indices(what: str, given: Iterable[int] | int | None, size: int) -> tuple[int, ...]:
    return tuple(range(size)) if given is None else tuple(within(what, given, size))
