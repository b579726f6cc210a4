"""Run requests on a batch of items: one forward pass, each layer decomposed as soon as it is done."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from normscope.decompose.state import Scratch
from normscope.engine.assemble import Result, assemble
from normscope.engine.batch import BatchRun
from normscope.engine.estimate import Estimate, default_budget, estimate, refuse_over_budget, shape_of
from normscope.engine.request import Request
from normscope.errors import NormscopeWarning
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import layer_modules
from normscope.tracing.trace import changed, trace

Progress = Callable[[int, int], None]
KEPT_SCRATCH = 64 * 2**20  # working memory kept between runs at the most


@dataclass
class Workspace:
    """The memory that runs may take: a budget in bytes (None: most of what is free), and what finished runs left."""

    budget: int | None = None
    free: list[Scratch] = field(default_factory=list)


def cost(loaded: LoadedModel, items: Sequence[Item], requests: Sequence[Request]) -> Estimate:
    """Memory and time of one batch."""
    costs = []
    for request in requests:
        stack = request.stack
        heads = loaded.head_counts[loaded.stacks.index(stack)]
        shape = shape_of(layer_modules(loaded.base, stack)[0], loaded.base.config, heads)
        costs.append(estimate([len(item.sides[stack.side]) for item in items], request, shape, loaded.dtype))
    return Estimate(max(c.tokens for c in costs), sum(c.memory for c in costs), sum(c.seconds for c in costs))


def run(
    loaded: LoadedModel,
    items: Sequence[Item],
    requests: Sequence[Request],
    workspace: Workspace,
    progress: Progress | None = None,
    first: Callable[[list[Result]], None] | None = None,
) -> list[Result]:
    """The results of a batch. `first` is told those of the first layer as soon as they are there, unless the model has
    two sides."""
    if len(items) > 1 and changed(loaded.base):  # what others put there may count tokens or items
        return [result for item in items for result in run(loaded, [item], requests, workspace, progress)]
    refuse_over_budget(
        cost(loaded, items, requests), default_budget() if workspace.budget is None else workspace.budget
    )
    try:
        scratch = workspace.free.pop()
    except IndexError:
        scratch = Scratch()
    total = sum(len(request.layers) for request in requests)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)
        if first is not None and done == 1 < total and not loaded.two_sided:
            first(assemble(loaded, items, runs, slice(0, 1)))

    device = loaded.base.device
    runs = [
        BatchRun(request, items, device, loaded.dtype, scratch, tick, loaded.calls.modules[request.stack.side])
        for request in requests
    ]
    try:
        trace(loaded, items, [one.records for one in runs])
    finally:
        scratch.trim(KEPT_SCRATCH)
        workspace.free.append(scratch)
    found = assemble(loaded, items, runs, slice(None))
    for text in dict.fromkeys(text for one in found for text in one.warnings):
        warnings.warn(text, NormscopeWarning, stacklevel=3)  # where analyze() is called
    return found


def run_many(
    loaded: LoadedModel, items: Iterable[Item], requests: Sequence[Request], workspace: Workspace, batch_size: int
) -> Iterator[Result]:
    """The results of many items in their order. A window of several batches is sorted by length, so that little is
    padded and little is held back."""
    coming = iter(items)
    while window := list(islice(coming, 8 * batch_size)):
        kinds: dict[Any, list[int]] = {}
        for n in sorted(range(len(window)), key=lambda n: -len(window[n])):
            kinds.setdefault(window[n].kind, []).append(n)
        done: dict[int, Result] = {}
        for order in kinds.values():
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                results = run(loaded, [window[n] for n in batch], requests, workspace)
                done |= zip(batch, results, strict=True)
        for n in range(len(window)):
            yield done.pop(n)
