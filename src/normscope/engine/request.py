"""Requests to a model: checking the options, estimating the cost, and how much memory may be used."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from normscope.arguments import check_indices, check_integers
from normscope.decompose.activations import Gate
from normscope.decompose.layer import LayerOptions
from normscope.decompose.shapley.gate import NO_EXPERTS, Shapley, parse_shapley_gate
from normscope.decompose.state import EXTRA_VECTORS, VECTOR_LIMIT
from normscope.errors import NormscopeError
from normscope.models.loaded import LoadedModel
from normscope.models.modules import has_recurrence
from normscope.models.scopes import Step, layer_steps, resolve_scopes, scope_names
from normscope.models.spec import Attention, Experts, FeedForward, Stack
from normscope.tracing.model_state import is_proved
from normscope.tracing.proof import prove
from normscope.tracing.trace import SCORES

LINEAR_GATES: tuple[Gate, ...] = ("ig", "frozen", "tangent")  # the same coefficient for all inputs of an output token
GATES = (*LINEAR_GATES, "shapley", "shapley-exact", "shapley-sampled", "shapley-gaussian")
VALUE_BIASES = ("token", "remainder")


@dataclass(frozen=True)
class Options:
    """The options of an analysis as the user passes them. See `Analyzer.analyze`."""

    scopes: Iterable[str] | str | None = None
    layers: Iterable[int] | int | None = None
    heads: bool | Iterable[int] = False
    rows: Iterable[int] | int | None = None
    gate: str = "ig"
    value_bias: str = "token"


@dataclass(frozen=True)
class Request:
    """The scopes to compute in one stack, and how."""

    stack: Stack
    scopes: tuple[str, ...]
    layers: tuple[int, ...]
    rows: tuple[int, ...] | None
    options: LayerOptions
    steps: tuple[Step, ...]  # up to the last requested scope
    crosses: bool  # whether the maps have columns for the encoder's tokens


def _attention_is_gated(stack: Stack) -> bool:
    ops = [b.op for blocks in (stack.blocks, *stack.variants) for block in blocks for b in block.branches]
    return any(isinstance(op, Attention) and (op.gate or op.inner_norm or op.recurrence) for op in ops)


def requests_for(loaded: LoadedModel, options: Options) -> list[Request]:
    """One request for each side of the model that has any of the requested scopes. For an encoder-decoder, `rows` apply
    to the decoder, and `layers` and `heads` that only one side has are ignored for the other."""
    if not is_proved(loaded):
        prove(loaded)
    return side_requests(loaded, loaded.stacks, options)


def side_requests(loaded: LoadedModel, stacks: Sequence[Stack], options: Options) -> list[Request]:
    """The requests for the given stacks, for a model that `prove` has accepted."""
    places = [loaded.stacks.index(stack) for stack in stacks]
    depths, counts = [loaded.depths[n] for n in places], [loaded.head_counts[n] for n in places]
    heads = options.heads
    if heads is not False and any(len(set(some)) > 1 for some in loaded.calls.heads.values()):
        raise NormscopeError("The layers of this model have different numbers of heads. Leave heads out.")
    if heads is not False and any(_attention_is_gated(stack) for stack in loaded.stacks):
        raise NormscopeError(
            "heads is not supported for this model: its attention multiplies the mixed values by a gate or normalises "
            "them, so that the map of a head is not its weights times the norms of its values. Leave heads out."
        )
    gate = parse_gate(options.gate)
    if options.value_bias not in VALUE_BIASES:
        raise NormscopeError(f"Unknown value_bias {options.value_bias!r}. Known: {', '.join(VALUE_BIASES)}.")
    chosen = chosen_indices("layer", options.layers, max(depths))
    wanted_heads = () if heads is False else chosen_indices("head", None if heads is True else heads, max(counts))
    wanted_rows = None if options.rows is None else tuple(check_integers("row", options.rows))
    if options.scopes is None:
        names = [scope_names(stack.blocks) for stack in stacks]
    else:
        names = resolve_scopes(options.scopes, *(stack.blocks for stack in stacks))
    made = []
    for stack, found, depth, count in zip(stacks, names, depths, counts, strict=True):
        there = tuple(head for head in wanted_heads if head < count)
        how = LayerOptions(gate=gate, value_bias=options.value_bias, heads=there)  # type: ignore[arg-type]
        present = tuple(sorted({layer for layer in chosen if layer < depth}))
        if found and present:
            asked = wanted_rows if stack is stacks[-1] else None
            steps = layer_steps(stack.blocks)
            crosses = any(step.alias == "cross-attention" for step in steps)
            reached = steps_until(steps, found)
            if isinstance(gate, Shapley) and any(isinstance(step.part, Experts) for step in reached):
                raise NormscopeError(NO_EXPERTS)
            made.append(Request(stack, found, present, asked, how, reached, crosses))
    if not made:
        raise NormscopeError(
            "No requested layer has any of the requested scopes: the side with these scopes has fewer layers."
        )
    return made


def parse_gate(name: Any) -> Gate | Shapley:
    """The gate with this name. Raises if there is none."""
    shared = next((gate for gate in LINEAR_GATES if gate == name), None)
    found = shared or (parse_shapley_gate(name) if isinstance(name, str) else None)
    if found is None:
        raise NormscopeError(f"Unknown gate {name!r}. Known: {', '.join(GATES)}.")
    return found


def steps_until(steps: Sequence[Step], scopes: Iterable[str]) -> tuple[Step, ...]:
    """The steps up to the last of these scopes."""
    wanted = set(scopes)
    last = max(n for n, step in enumerate(steps) if {step.norms, step.weights} & wanted)
    return tuple(steps[: last + 1])


def chosen_indices(what: str, given: Iterable[int] | int | None, size: int) -> tuple[int, ...]:
    return tuple(range(size)) if given is None else tuple(check_indices(what, given, size))


# Items are decomposed together up to this many tokens: enough work per call while still fitting in cache.
GROUP_TOKENS = 512


@dataclass(frozen=True)
class LayerShape:
    """The sizes that determine the cost of a layer."""

    width: int
    heads: int
    hidden: int
    taps: int = 0  # of the convolution before a recurrence, each with weights of its own


@dataclass(frozen=True)
class Estimate:
    """Memory (in addition to the model) and time of an analysis."""

    tokens: int
    memory: int  # bytes
    seconds: float

    def __str__(self) -> str:
        return f"{self.tokens} tokens: about {format_bytes(self.memory)} of memory and {self.seconds:.1f} s"


def layer_shape(layer: nn.Module, config: Any, heads: int) -> LayerShape:
    """The sizes of a stack, from one of its layers."""
    widths = [module.out_features for module in layer.modules() if isinstance(module, nn.Linear)]
    widths += [module.nf for module in layer.modules() if isinstance(module, Conv1D)]
    width = getattr(config, "hidden_size", None)
    if not isinstance(width, int):  # the config of a larger model, which holds that of the text model
        width = next((module.in_features for module in layer.modules() if isinstance(module, nn.Linear)), max(widths))
    return LayerShape(width=width, heads=heads, hidden=max(widths))


def filter_taps(layers: Iterable[nn.Module], stack: Stack) -> int:
    """The most taps of a convolution before a recurrence; 0 without recurrences."""
    kernels = [m.kernel_size[0] for layer in layers for m in layer.modules() if isinstance(m, nn.Conv1d)]
    return max(kernels, default=0) if has_recurrence(stack) else 0


def map_bytes(lengths: Sequence[int], request: Request, dtype: torch.dtype, sources: int | None = None) -> int:
    """The size of the maps of one batch of inputs with the given lengths; by source, with at most so many `sources`."""
    maps = len(request.layers) * (len(request.scopes) + 2 * len(request.options.heads))
    return (8 if dtype == torch.float64 else 4) * maps * _map_cells(lengths, request, sources)


def _map_cells(lengths: Sequence[int], request: Request, sources: int | None) -> int:
    """The cells of one map of every input."""
    out = max(lengths) if request.rows is None else min(len(request.rows), max(lengths))
    return sum(min(out, m) * (m if sources is None else sources) for m in lengths)


def estimate_cost(
    lengths: Sequence[int], request: Request, shape: LayerShape, dtype: torch.dtype, sources: int | None = None
) -> Estimate:
    """The cost of one batch of inputs with the given lengths; by source, with at most so many `sources`."""
    size = 8 if dtype == torch.float64 else 4
    n, items = max(lengths), len(lengths)
    out = n if request.rows is None else min(len(request.rows), n)
    layers = len(request.layers)
    has_ff = any(isinstance(step.part, FeedForward | Experts) for step in request.steps)
    maps = map_bytes(lengths, request, dtype, sources)
    # Attention weights of the whole batch and a few scores; then, for each group of items, the vectors f (before and
    # after a norm) and a few maps.
    group = min(items, max(1, GROUP_TOKENS // n))
    attention = size * (items * shape.heads * (1 + shape.taps) * n * n + 4 * SCORES)
    vectors = (
        2
        * size
        * min(group * n * (shape.heads + EXTRA_VECTORS) * shape.width, max(VECTOR_LIMIT, shape.heads * shape.width))
    )
    products = size * group * n * (2 * shape.heads * min(out, 2**20 // n + 1) + 8 * out)
    activations = size * items * n * (8 * shape.width + 2 * shape.hidden)
    # Blocks of contributions, with fragmentation; W_O W_1 (two if gated), and W_2 in another layout.
    blocks = 4 * request.options.block_bytes + 3 * size * shape.width * shape.hidden if has_ff else 0
    memory = maps + attention + vectors + products + activations + blocks

    seconds = 0.0
    if has_ff and isinstance(request.options.gate, Shapley):
        players = n + 2  # per row, including the own token and the biases
        memory += 64 * players * shape.hidden
        pairs = sum(min(out, m) * (m + 2) for m in lengths)
        seconds = 1e-9 * layers * pairs * shape.hidden * request.options.gate.nanoseconds(players)

    tokens = items * n
    layer = 2 * tokens * shape.width * (4 * shape.width + 2 * shape.hidden) + 4 * tokens * n * shape.width
    flops = float(
        (max(request.layers) + 1) * layer + layers * 0.5 * layer
    )  # the pass stops after the last requested layer
    if has_ff:
        # By token most of the work is W_2; by source each vector is multiplied by all matrices.
        factor = 1.15 if sources is None else 3.5
        flops += 2.0 * layers * _map_cells(lengths, request, sources) * shape.width * shape.hidden * factor
    return Estimate(n, memory, seconds + flops / matmul_rate(dtype, torch.get_num_threads()))


def refuse_over_budget(cost: Estimate, budget: int) -> None:
    """Raise if an analysis would exceed the memory budget, with ways to reduce it."""
    if cost.memory > budget:
        raise NormscopeError(
            f"This analysis would take {cost}, over the memory budget of {format_bytes(budget)}. "
            "Ways out: fewer layers=[...] or scopes=[...], rows=[...] for some output positions only, heads=False, "
            "a smaller batch_size, a shorter input (truncation=True), or a larger memory_budget."
        )


FALLBACK = 8 * 2**30
UNLIMITED = 2**60  # control groups (version 1) without a limit report a number of about 2**63
# Files of a control group: limit, use, statistics, and the line of the statistics with memory that can be reclaimed.
GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
)


def default_budget(device: torch.device | None = None) -> int:
    """90% of the available memory if the system reports it, otherwise half of the total memory, otherwise 8 GB; at most
    90% of what is left to this process's control group and of the free memory of a CUDA device."""
    found = [_machine_budget()]
    left = control_group_memory()
    if left is not None:
        found.append(left * 9 // 10)
    if device is not None and device.type == "cuda":
        found.append(torch.cuda.mem_get_info(device)[0] * 9 // 10)
    return max(1, min(found))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: that of a device, of Python, or of PyTorch's CPU allocator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "allocate memory" in text)


def control_group_memory(
    groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Bytes left below the lowest limit of the control groups (Linux) of this process; None without a limit."""
    left = [_group_memory(folder) for folder in _group_folders(groups, membership)]
    return min((one for one in left if one is not None), default=None)


def _group_folders(groups: Path, membership: Path) -> list[Path]:
    """The folders of the process's group and of those above it. In a container the path may be that of the host, so
    the root is always among them."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers not in ("", "memory"):
            continue
        root = groups / controllers
        own = root / path.strip("/")
        found += [root, *(folder for folder in (own, *own.parents) if root in folder.parents)]
    return found


def _group_memory(folder: Path) -> int | None:
    for limit_file, use_file, statistics_file, reclaimable in GROUP_FILES:
        try:
            limit = int((folder / limit_file).read_text())
            used = int((folder / use_file).read_text())
        except (OSError, ValueError):  # "max", or no such group
            continue
        try:
            statistics = dict(line.split() for line in (folder / statistics_file).read_text().splitlines())
            cached = int(statistics.get(reclaimable, 0))
        except (OSError, ValueError):
            cached = 0
        if limit < UNLIMITED:
            return max(0, limit - used + cached)
    return None


def _machine_budget() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) * 1024 * 9 // 10
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return FALLBACK


@lru_cache(maxsize=8)
def matmul_rate(dtype: torch.dtype, threads: int) -> float:
    """Flops per second of a matrix product on this machine's CPU, measured once (a few milliseconds)."""
    x = torch.ones(512, 512, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        x @ x
        best = min(best, time.perf_counter() - start)
    return float(2 * 512**3 / best)


def format_bytes(size: float) -> str:
    """A number of bytes with a unit, such as "3.2 GB"."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
