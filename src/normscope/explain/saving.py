"""Explanations as safetensors files, with the format and checksum of `normscope.saving`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normscope.explain.groups import SpelledText
from normscope.explain.hops import Hop
from normscope.labels import Label
from normscope.saving import load_scores, save_tensors

if TYPE_CHECKING:
    from normscope.explain.result import Alternative, Explanation

FORMAT = "normscope-explanation-1"
TENSORS = ("scores", "values", "remainder", "completeness", "probabilities")
HOP_NUMBERS = ("remainder", "unexplained", "on_reasoning")


def save_explanation(path: str | os.PathLike[str], told: Explanation) -> Path:
    """Write everything but the model."""
    tensors = {name: getattr(told, name) for name in TENSORS}
    if told.hops:
        tensors["hops"] = torch.stack([hop.scores for hop in told.hops])
    return save_tensors(path, tensors, {"format": FORMAT, **describe_explanation(told)})


def describe_explanation(told: Explanation) -> dict[str, Any]:
    """Everything but the tensors, as plain lists, numbers and strings."""
    return {
        "answer": told.answer,
        "rows": told.rows,
        "columns": told.columns,
        "targets": told.targets,
        "alternatives": told.alternatives,
        "sources": dict(told.sources),
        "texts": {
            side: {"text": one.text, "spans": one.spans, "answer": one.answer, "sound": one.sound}
            for side, one in told.texts.items()
        },
        "hop_numbers": [[getattr(hop, name) for name in HOP_NUMBERS] for hop in told.hops],
        "info": json.loads(json.dumps(dict(told.info), default=str)),
    }


def load_explanation(
    path: str | os.PathLike[str], make: Callable[..., Explanation], make_alternative: Callable[..., Alternative]
) -> Explanation:
    """Read a file written by `save_explanation`; refuse a damaged or foreign one. Pass the classes Explanation and
    Alternative."""
    build = partial(_build_saved_explanation, make=make, make_alternative=make_alternative)
    return load_scores(path, "an explanation", "Explanation.save", FORMAT, build, _saved_explanation_fits)


def _build_saved_explanation(
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    make: Callable[..., Explanation],
    make_alternative: Callable[..., Alternative],
) -> Explanation:
    numbers = [dict(zip(HOP_NUMBERS, one, strict=True)) for one in meta["hop_numbers"]]
    hops = zip(tensors["hops"], numbers, strict=True) if numbers else ()
    return make(
        answer=meta["answer"],
        rows=tuple(Label(*label) for label in meta["rows"]),
        columns=tuple(Label(*label) for label in meta["columns"]),
        targets=tuple(meta["targets"]),
        alternatives=tuple(tuple(make_alternative(*one) for one in some) for some in meta["alternatives"]),
        sources={name: tuple(columns) for name, columns in meta["sources"].items()},
        texts={
            side: SpelledText(
                one["text"], tuple((a, b) for a, b in one["spans"]), one["answer"], one.get("sound", False)
            )
            for side, one in meta["texts"].items()
        },
        hops=tuple(Hop(scores=scores, **one) for scores, one in hops),
        info=dict(meta["info"]),
        **{name: tensors[name] for name in TENSORS},
    )


def _saved_explanation_fits(told: Explanation) -> bool:
    """Whether the labels match the shapes of the tensors."""
    rows, columns = len(told.rows), len(told.columns)
    fits = tuple(told.scores.shape) == (rows, columns)
    fits &= all(tuple(getattr(told, name).shape) == (rows,) for name in TENSORS[1:])
    fits &= len(told.targets) == len(told.alternatives) == rows
    fits &= all(tuple(hop.scores.shape) == (columns,) for hop in told.hops)
    return fits and sorted(k for some in told.sources.values() for k in some) == list(range(columns))
