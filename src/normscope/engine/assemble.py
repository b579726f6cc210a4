"""From what a batch run has collected to the results that people get, each checked to be complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import torch
import transformers
from torch import Tensor

from normscope._version import __version__
from normscope.analysis import Analysis, HeadMaps, Label, Measured, Receive
from normscope.decompose.layer import layer_vectors
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.engine.batch import BatchRun, geometry_of, labels_of, place_of
from normscope.engine.request import Request, reach, within
from normscope.errors import NormscopeError
from normscope.inputs.item import Item, real_tokens
from normscope.models.loaded import LoadedModel
from normscope.models.scopes import aliases_of, steps_of
from normscope.tracing.build import RecordRequest
from normscope.tracing.proof import prove
from normscope.tracing.records import LayerRecord, select_rows
from normscope.tracing.trace import trace

Result = Analysis | EncoderDecoderAnalysis
INEXACT = 1e-4  # contributions that miss the model's vector by this much are warned of
INCOMPLETE = 1e-2  # by this much they are no decomposition of it


def assemble(loaded: LoadedModel, items: Sequence[Item], runs: Sequence[BatchRun], layers: slice) -> list[Result]:
    """The results of a batch, as far as those layers of the requests go."""
    results: list[Result] = []
    settled = [run.collected.settle(layers, run.positions) for run in runs]
    for n, item in enumerate(items):
        found = {
            run.request.stack.side: _analysis(loaded, item, run, n, one, layers)
            for run, one in zip(runs, settled, strict=True)
        }
        if loaded.two_sided:
            results.append(EncoderDecoderAnalysis(found.get("encoder"), found.get("decoder")))
        else:
            results.append(found[loaded.stacks[0].side])
    return results


def _analysis(loaded: LoadedModel, item: Item, run: BatchRun, number: int, settled: Tensor, layers: slice) -> Analysis:
    request, geometry = run.request, run.geometry[number]
    labels = labels_of(item, request.stack.side)
    columns = tuple(labels[n] for n in geometry.real.tolist())
    rows = columns if request.rows is None else tuple(labels[n] for n in geometry.positions.tolist())
    words = item.sides[request.stack.side].word_ids
    word_ids = None if words is None else tuple(words[label.position] for label in columns)
    if item.virtual:
        columns += tuple(Label(name, "prompt", n) for n, name in enumerate(item.virtual))
        word_ids = None if word_ids is None else word_ids + (None,) * len(item.virtual)
    if request.crosses:
        sources = labels_of(item, "encoder")
        encoder = tuple(sources[n] for n in item.sides["encoder"].real.nonzero().flatten().tolist())
        columns += encoder
        word_ids = None if word_ids is None else word_ids + (None,) * len(encoder)
    measured, heads, value_norms = run.collected.item(number, settled, geometry.rows, run.columns(number), layers)
    sure = {scope: one for scope, one in measured.items() if request.options.complete or "FF" not in scope}
    warnings = [*item.warnings, *_check_complete(loaded, sure, request)]

    def recompute(
        scopes: Sequence[str], layers: Sequence[int], blocks: Sequence[Sequence[int]], receive: Receive
    ) -> None:
        chosen = [[rows[n].position for n in within("row", block, len(rows))] for block in blocks]
        _recompute(loaded, item, request, scopes, layers, chosen, receive)

    depth = loaded.depths[loaded.stacks.index(request.stack)]
    aliases = aliases_of(request.stack.blocks)
    return Analysis(
        measured=measured,
        rows=rows,
        columns=columns,
        layers=request.layers[layers],
        aliases=aliases,
        heads=HeadMaps(heads, aliases),
        value_norms=value_norms,
        head_indices=request.options.heads,
        word_ids=word_ids,
        info={
            "model": loaded.name,
            "family": loaded.family.name,
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
        | ({"warnings": warnings} if warnings else {})
        | ({} if item.grid is None else {"grid": list(item.grid)}),
        _recompute=recompute,
    )


def _check_complete(loaded: LoadedModel, found: Mapping[str, Measured], request: Request) -> list[str]:
    """Refuse contributions that do not add up to the model's own vectors; a warning of those that almost do."""
    if not found or bool((torch.stack([one.completeness for one in found.values()]) <= INEXACT).all()):
        return []
    scope, measured = max(found.items(), key=lambda one: float(one[1].completeness.nan_to_num(inf).amax()))
    errors = measured.completeness.nan_to_num(inf)
    worst = int(errors.argmax())
    what = (
        f"The contributions at {scope}, layer {request.layers[worst]} (counted from 0), miss the model's own vector by "
        f"{float(errors[worst]):.1e} of its length"
    )
    if float(errors[worst]) > INCOMPLETE:
        raise NormscopeError(
            f"{what}: this model does not compute what the family {loaded.family.name} says, so its maps would be "
            f"wrong. Is {type(loaded.model).__name__} a modified {loaded.family.name}?"
        )
    return [
        f"{what}, more than rounding in {str(loaded.dtype).removeprefix('torch.')} explains. Do not rely on small "
        "cells. Load the model in float32 (or float64: dtype=torch.float64), and try `normscope check`."
    ]


def _recompute(
    loaded: LoadedModel,
    item: Item,
    request: Request,
    scopes: Sequence[str],
    layers: Sequence[int],
    blocks: Sequence[Sequence[int]],
    receive: Receive,
) -> None:
    """Run the model again and hand over the contribution vectors of some scopes and layers, a block of positions at a
    time."""
    prove(loaded)
    side = request.stack.side
    place = replace(place_of(item, request, geometry_of(item, side, None, len(item.sides[side]))), rows=slice(None))
    steps = reach(steps_of(request.stack.blocks), scopes)
    tables = [torch.tensor([list(block)], device=loaded.base.device) for block in blocks]

    def on_layer(record: LayerRecord) -> None:
        for scope in scopes:
            for number, at in enumerate(tables):
                found = layer_vectors(select_rows(record, at), steps, scope, place, at, request.options)
                receive(scope, record.index, number, found)

    real = real_tokens([item], side, loaded.base.device)
    constants = request.options.value_bias == "remainder"
    calls, virtual = loaded.calls.modules[request.stack.side], len(item.virtual)
    trace(
        loaded,
        [item],
        [RecordRequest(request.stack, steps, list(layers), on_layer, real, constants, calls, virtual=virtual)],
    )
