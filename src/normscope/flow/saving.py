"""Flows as safetensors files, with the format and checksum of `normscope.saving`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normscope.labels import Label
from normscope.saving import load_scores, save_tensors, tensors_under

if TYPE_CHECKING:
    from normscope.flow.result import Flow, ScoreMatrix, Scores

FORMAT = "normscope-flow-tensors-1"
MATRIX = ("values", "scores", "remainders", "completeness")  # the tensors of the scores of several targets


def save_flow(path: str | os.PathLike[str], flow: Flow) -> Path:
    """Write everything but the model; maps are computed if necessary."""
    tensors: dict[str, Tensor] = {}
    if flow.has_maps:
        tensors["maps"] = flow.maps
        if flow.completeness is not None:
            tensors["completeness"] = flow.completeness
    to = flow.to
    if to is not None:
        tensors["scores"] = to.scores
        tensors |= {f"layers/{side}": one for side, one in to.layers.items()}
        tensors |= {f"remainders/{side}": one for side, one in to.remainders.items()}
    each = flow.each
    if each is not None:
        tensors |= {f"each/{name}": getattr(each, name) for name in MATRIX}
    numbers = ("target", "value", "remainder", "completeness", "contrast")
    meta = {
        "format": FORMAT,
        "method": flow.method,
        "rows": flow.rows,
        "columns": flow.columns,
        "layers": flow.layers,
        "to": None if to is None else {name: getattr(to, name) for name in numbers},
        "each": None if each is None else {"targets": each.targets, "contrast": each.contrast},
        "sources": dict(flow.sources),
        "info": json.loads(json.dumps(dict(flow.info), default=str)),
    }
    return save_tensors(path, tensors, meta)


def load_flow(
    path: str | os.PathLike[str],
    make_flow: Callable[..., Flow],
    make_scores: Callable[..., Scores],
    make_matrix: Callable[..., ScoreMatrix],
) -> Flow:
    """Read a file written by `save_flow`; refuse a damaged or foreign one. Pass the classes Flow, Scores and
    ScoreMatrix."""
    build = partial(_build_saved_flow, make_flow=make_flow, make_scores=make_scores, make_matrix=make_matrix)
    return load_scores(path, "a flow", "Flow.save", FORMAT, build, _saved_flow_labels_fit)


def _build_saved_flow(
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    make_flow: Callable[..., Flow],
    make_scores: Callable[..., Scores],
    make_matrix: Callable[..., ScoreMatrix],
) -> Flow:
    to, maps = meta["to"], tensors.get("maps")
    if to is not None:
        layers, remainders = (tensors_under(tensors, name) for name in ("layers", "remainders"))
        to = make_scores(**to, scores=tensors["scores"], layers=layers, remainders=remainders)
    each = meta.get("each")
    if each is not None:
        described = {"targets": tuple(each["targets"]), "contrast": each["contrast"]}
        each = make_matrix(**described, **tensors_under(tensors, "each"))
    return make_flow(
        method=meta["method"],
        rows=tuple(Label(*label) for label in meta["rows"]),
        columns=tuple(Label(*label) for label in meta["columns"]),
        layers=tuple(meta["layers"]),
        to=to,
        each=each,
        sources={name: tuple(columns) for name, columns in meta.get("sources", {}).items()},
        info=dict(meta["info"]),
        _maps=None if maps is None else partial(saved_flow_maps, maps, tensors.get("completeness")),
    )


def _saved_flow_labels_fit(flow: Flow) -> bool:
    """Whether the labels match the shapes of the tensors."""
    layers, rows, columns = len(flow.layers), len(flow.rows), len(flow.columns)
    fits = not flow.has_maps or tuple(flow.maps.shape) == (layers, rows, columns)
    fits &= not flow.has_maps or flow.completeness is None or tuple(flow.completeness.shape) == (layers,)
    if flow.to is not None:
        fits &= tuple(flow.to.scores.shape) == (columns,)
        for side, table in flow.to.layers.items():
            fits &= table.shape[-1] == sum(label.side == side for label in flow.columns)
            fits &= side not in flow.to.remainders or len(flow.to.remainders[side]) == len(table)
    if flow.each is not None:
        count = len(flow.each.targets)
        fits &= tuple(flow.each.scores.shape) == (count, columns)
        fits &= all(len(getattr(flow.each, name)) == count for name in MATRIX)
    fits &= not flow.sources or sorted(k for some in flow.sources.values() for k in some) == list(range(columns))
    return fits


def saved_flow_maps(maps: Tensor, completeness: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The maps as they are: the `_maps` of a flow that was loaded, copied or unpickled."""
    return maps, completeness
