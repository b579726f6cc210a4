"""Run requests on a batch of items: one forward pass, then results, each checked for completeness."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any

import torch
import transformers
from torch import Tensor

from normscope._version import __version__
from normscope.analysis import Analysis
from normscope.arguments import check_indices
from normscope.decompose.layer import layer_vectors
from normscope.decompose.source_rows import source_vectors
from normscope.decompose.state import Scratch
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.engine.batch import BatchRun, RealPositions, item_span, real_positions
from normscope.engine.by_source import check_requests_by_source, source_columns, source_labels
from normscope.engine.request import (
    Estimate,
    Request,
    default_budget,
    estimate_cost,
    filter_taps,
    layer_shape,
    refuse_over_budget,
    steps_until,
)
from normscope.errors import NormscopeError, NormscopeWarning
from normscope.inputs.encode import real_tokens
from normscope.inputs.item import Item, describe_pictures
from normscope.labels import Label
from normscope.measures.tokens import number_words
from normscope.models.loaded import LoadedModel
from normscope.models.modules import is_modified, layer_modules
from normscope.models.scopes import layer_steps, scope_aliases
from normscope.result_base import NO_HEADS, HeadMaps, Measured, Receive
from normscope.tracing.build import RecordRequest
from normscope.tracing.model_state import is_proved
from normscope.tracing.proof import prove
from normscope.tracing.recorded import select_rows
from normscope.tracing.records import LayerRecord
from normscope.tracing.trace import trace

Result = Analysis | EncoderDecoderAnalysis
INEXACT = 1e-4  # relative error of the sum of contributions that causes a warning
TOKEN_IDS = {"encoder": "input_ids", "decoder": "decoder_input_ids"}  # of an encoder-decoder
INCOMPLETE = 1e-2  # relative error that causes an exception
Progress = Callable[[int, int], None]
MAX_KEPT_SCRATCH = 64 * 2**20  # bytes of working memory kept between runs


@dataclass
class Workspace:
    """The memory budget of runs in bytes (None: most of the free memory), and working memory left by finished runs."""

    budget: int | None = None
    free: list[Scratch] = field(default_factory=list)


def batch_cost(loaded: LoadedModel, items: Sequence[Item], requests: Sequence[Request]) -> Estimate:
    """The estimated memory and time of one batch."""
    if any(item.sources is not None for item in items):
        check_requests_by_source(requests)
    costs = []
    for request in requests:
        stack = request.stack
        heads = loaded.head_counts[loaded.stacks.index(stack)]
        layers = layer_modules(loaded.base, stack)
        shape = layer_shape(layers[0], loaded.base.config, heads)
        shape = replace(shape, taps=filter_taps(layers, stack))
        lengths = [len(item.sides[stack.side].names) for item in items]
        sources = max((len(item.sources.names) + 1 for item in items if item.sources is not None), default=None)
        costs.append(estimate_cost(lengths, request, shape, loaded.dtype, sources))
    return Estimate(max(c.tokens for c in costs), sum(c.memory for c in costs), sum(c.seconds for c in costs))


def run_batch(
    loaded: LoadedModel,
    items: Sequence[Item],
    requests: Sequence[Request],
    workspace: Workspace,
    progress: Progress | None = None,
    so_far: Callable[[Callable[[], list[Result]]], None] | None = None,
) -> list[Result]:
    """The results of a batch. `so_far` is called after each layer but the last, with a function that returns the
    results of the layers that are done, unless the model is an encoder-decoder."""
    if len(items) > 1 and is_modified(loaded.base):  # third-party hooks may depend on the batch
        return [result for item in items for result in run_batch(loaded, [item], requests, workspace, progress)]
    refuse_over_budget(
        batch_cost(loaded, items, requests),
        default_budget(loaded.base.device) if workspace.budget is None else workspace.budget,
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
        if so_far is not None and done < total and not loaded.two_sided:
            so_far(lambda: assemble_results(loaded, items, runs, slice(0, done)))

    device = loaded.base.device
    runs = [
        BatchRun(request, items, device, loaded.dtype, scratch, tick, loaded.calls.modules[request.stack.side])
        for request in requests
    ]
    try:
        trace(loaded, items, [one.records for one in runs])
    finally:
        scratch.trim(MAX_KEPT_SCRATCH)
        workspace.free.append(scratch)
    found = assemble_results(loaded, items, runs, slice(None))
    for text in dict.fromkeys(text for one in runs for text in one.warnings):
        warnings.warn(text, NormscopeWarning, stacklevel=3)  # the caller of analyze()
    return found


def run_stream(
    loaded: LoadedModel, items: Iterable[Item], requests: Sequence[Request], workspace: Workspace, batch_size: int
) -> Iterator[Result]:
    """The results of many items, in order. Items are sorted by length within a window of several batches, which limits
    both padding and latency."""
    coming = iter(items)
    while window := list(islice(coming, 8 * batch_size)):
        kinds: dict[Any, list[int]] = {}
        for n in sorted(range(len(window)), key=lambda n: -len(window[n])):
            kinds.setdefault(window[n].kind, []).append(n)
        done: dict[int, Result] = {}
        for order in kinds.values():
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                results = run_batch(loaded, [window[n] for n in batch], requests, workspace)
                done |= zip(batch, results, strict=True)
        for n in range(len(window)):
            yield done.pop(n)


def assemble_results(
    loaded: LoadedModel, items: Sequence[Item], runs: Sequence[BatchRun], layers: slice
) -> list[Result]:
    """The results of a batch, for a slice of the requested layers."""
    results: list[Result] = []
    finished = [run.results.finish_layers(layers, run.positions) for run in runs]
    for n, item in enumerate(items):
        found = {
            run.request.stack.side: _assemble_analysis(loaded, item, run, n, one, layers)
            for run, one in zip(runs, finished, strict=True)
        }
        if loaded.two_sided:
            results.append(EncoderDecoderAnalysis(found.get("encoder"), found.get("decoder")))
        else:
            results.append(found[loaded.stacks[0].side])
    return results


def _assemble_analysis(
    loaded: LoadedModel, item: Item, run: BatchRun, number: int, finished: Tensor, layers: slice
) -> Analysis:
    request, where = run.request, run.real_positions[number]
    labels = _token_labels(item, request.stack.side)
    rows = tuple(labels[n] for n in (where.real if request.rows is None else where.positions).tolist())
    columns, word_ids = _label_columns(loaded, item, request, where)
    measured, heads, value_norms = run.results.item_results(number, finished, where.rows, run.columns(number), layers)
    sure = {scope: one for scope, one in measured.items() if request.options.complete or "FF" not in scope}
    found = [*item.warnings, *_check_complete(loaded, sure, request)]
    run.warnings += found

    def recompute(
        scopes: Sequence[str], layers: Sequence[int], blocks: Sequence[Sequence[int]], receive: Receive
    ) -> None:
        chosen = [[rows[n].position for n in check_indices("row", block, len(rows))] for block in blocks]
        recompute_vectors(loaded, item, request, scopes, layers, chosen, receive)

    depth = loaded.depths[loaded.stacks.index(request.stack)]
    aliases = dict(scope_aliases(request.stack.blocks))
    return Analysis(
        measured=measured,
        rows=rows,
        columns=columns,
        layers=request.layers[layers],
        aliases=aliases,
        heads=HeadMaps(heads, aliases) if heads else NO_HEADS,
        value_norms=value_norms,
        head_indices=request.options.heads,
        word_ids=word_ids,
        info={
            "model": loaded.name,
            "family": loaded.family.name,
            "derived": loaded.family.derived,
            "side": request.stack.side,
            "causal": request.stack.side == "decoder",
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "model_layers": depth,
            "model_heads": loaded.head_counts[loaded.stacks.index(request.stack)],
            "gate": str(request.options.gate),
            "value_bias": request.options.value_bias,
            "complete": request.options.complete,
            "normscope": __version__,
            "transformers": transformers.__version__,
            "torch": str(torch.__version__),
        }
        | ({"warnings": found} if found else {})
        | ({} if item.grid is None else {"grid": list(item.grid)})
        | (describe_pictures(item) if item.pictures else {}),
        _recompute=recompute,
    )


def _label_columns(
    loaded: LoadedModel, item: Item, request: Request, where: RealPositions
) -> tuple[tuple[Label, ...], tuple[int | None, ...] | None]:
    """The labels and word ids of the columns: own tokens, virtual ones and the encoder's, or sources."""
    if item.sources is not None:
        return source_labels(item, request), None
    side = request.stack.side
    labels = _token_labels(item, side)
    columns = tuple(labels[n] for n in where.real.tolist())
    words = _column_word_ids(loaded, item, side, columns)
    word_ids = () if words is None else words
    columns += tuple(Label(name, "prompt", n) for n, name in enumerate(item.virtual))
    word_ids += (None,) * len(item.virtual)
    if request.crosses:
        sources = _token_labels(item, "encoder")
        encoder = tuple(sources[n] for n in item.sides["encoder"].real.nonzero().flatten().tolist())
        columns += encoder
        word_ids += _column_word_ids(loaded, item, "encoder", encoder) or (None,) * len(encoder)
    return columns, None if words is None else word_ids


def _column_word_ids(
    loaded: LoadedModel, item: Item, side: str, columns: Sequence[Label]
) -> tuple[int | None, ...] | None:
    """The word of each of some tokens of one side, None for special tokens; None if the words are unknown."""
    words = _side_word_ids(loaded, item, side)
    return None if words is None else tuple(words[label.position] for label in columns)


def _side_word_ids(loaded: LoadedModel, item: Item, side: str) -> tuple[int | None, ...] | None:
    """The word of each token of one side.

    They are the tokenizer's words. Slow tokenizers and target texts have none; in an encoder-decoder, where both sides
    are needed to align them, the words are then those of `measures.tokens`: what is between spaces, with every
    punctuation mark as a word of its own.
    """
    tokens = item.sides[side]
    if tokens.word_ids is not None or not loaded.two_sided or loaded.tokenizer is None:
        return tokens.word_ids
    ids = item.tensors.get(TOKEN_IDS[side])
    special = getattr(loaded.tokenizer, "all_special_ids", None)
    if ids is None or special is None or len(ids) != len(tokens.names):
        return None
    kept = [id in special for id in ids.tolist()]
    if side == "decoder":
        kept[0] = True  # the start token, whatever it is
    return tuple(number_words(tokens.names, kept))


def _check_complete(loaded: LoadedModel, found: Mapping[str, Measured], request: Request) -> list[str]:
    """Raise if contributions do not add up to the model's own vectors; return a warning if they almost do."""
    if not found or bool((torch.stack([one.completeness for one in found.values()]) <= INEXACT).all()):
        return []
    scope, measured = max(found.items(), key=lambda one: float(one[1].completeness.nan_to_num(inf).amax()))
    errors = measured.completeness.nan_to_num(inf)
    worst = int(errors.argmax())
    what = (
        f"The contributions at {scope}, layer {request.layers[worst]} (counted from 0), miss the model's own vector by "
        f"{float(errors[worst]):.1e} of its norm"
    )
    if float(errors[worst]) > INCOMPLETE:
        raise NormscopeError(
            f"{what}: this model does not compute what the family {loaded.family.name} describes, so its maps would be "
            f"wrong. Is {type(loaded.model).__name__} a modified {loaded.family.name}?"
        )
    return [
        f"{what}, more than rounding in {str(loaded.dtype).removeprefix('torch.')} explains. Do not rely on small "
        "cells. Load the model in float32 (or float64: dtype=torch.float64), and try `normscope check`."
    ]


def recompute_vectors(
    loaded: LoadedModel,
    item: Item,
    request: Request,
    scopes: Sequence[str],
    layers: Sequence[int],
    blocks: Sequence[Sequence[int]],
    receive: Receive,
) -> None:
    """Run the model again and pass the contribution vectors of the given scopes and layers to `receive`, one block of
    positions at a time."""
    if not is_proved(loaded):
        prove(loaded)
    side = request.stack.side
    place = replace(
        item_span(item, request, real_positions(item, side, None, len(item.sides[side].names))), rows=slice(None)
    )
    steps = steps_until(layer_steps(request.stack.blocks), scopes)
    sources = None if item.sources is None else source_columns(item, request, [item], loaded.base.device)
    tables = [torch.tensor([list(block)], device=loaded.base.device) for block in blocks]

    def on_layer(record: LayerRecord) -> None:
        for scope in scopes:
            for number, at in enumerate(tables):
                part = select_rows(record, at)
                if sources is None:
                    found = layer_vectors(part, steps, scope, place, at, request.options)
                else:
                    found = source_vectors(part, steps, scope, sources, at, request.options)
                receive(scope, record.index, number, found)

    real = real_tokens([item], side, loaded.base.device)
    constants = request.options.value_bias == "remainder"
    calls, virtual = loaded.calls.modules[request.stack.side], len(item.virtual)
    trace(
        loaded,
        [item],
        [RecordRequest(request.stack, steps, list(layers), on_layer, real, constants, calls, virtual=virtual)],
    )


def _token_labels(item: Item, side: str) -> list[Label]:
    return [Label(token, side, n) for n, token in enumerate(item.sides[side].names)]
