"""An analysis as a safetensors file: its tensors, and in the metadata tokens and provenance. Never a pickle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from normscope.analysis import Analysis, EncoderDecoderAnalysis, HeadMaps, Label, Measured
from normscope.errors import NormscopeError
from normscope.files import atomic, check_suffix

FORMAT = "normscope-analysis-1"


def save(path: str | os.PathLike[str], result: Analysis | EncoderDecoderAnalysis) -> Path:
    """Write everything but the model; of an encoder-decoder both sides."""
    check_suffix(path, ".safetensors")
    if isinstance(result, Analysis):
        tensors, meta = _tensors(result), _meta(result)
    else:
        tensors = {f"{side}/{name}": t for side, one in result.sides.items() for name, t in _tensors(one).items()}
        meta = {"sides": {side: _meta(one) for side, one in result.sides.items()}}
    with atomic(path) as temporary:
        try:
            save_file(
                {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
                temporary,
                metadata={"normscope": json.dumps({"format": FORMAT, **meta})},
            )
        except SafetensorError as error:  # a full disk, for instance
            raise NormscopeError(f"Cannot write {path}: {error}.") from error
    return Path(path)


def load(path: str | os.PathLike[str]) -> Analysis | EncoderDecoderAnalysis:
    """Read what `save` wrote; a damaged or foreign file is refused."""
    tensors, meta = _read(path)
    try:
        if "sides" not in meta:
            return _analysis(tensors, meta, path)
        sides = {
            side: _analysis(
                {n.removeprefix(f"{side}/"): t for n, t in tensors.items() if n.startswith(f"{side}/")}, one, path
            )
            for side, one in meta["sides"].items()
        }
        return EncoderDecoderAnalysis(**sides)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, NormscopeError):
            raise
        raise NormscopeError(f"{path} lacks a part of an analysis: {error}.") from error


def _tensors(analysis: Analysis) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for scope, measured in analysis.measured.items():
        for name, tensor in vars(measured).items():
            tensors[f"{name}/{scope}"] = tensor
    tensors |= {f"heads/{scope}": tensor for scope, tensor in analysis.heads.items()}
    if analysis.value_norms is not None:
        tensors["value_norms"] = analysis.value_norms
    return tensors


def _meta(analysis: Analysis) -> dict[str, Any]:
    return {
        "scopes": analysis.scopes,
        "rows": analysis.rows,
        "columns": analysis.columns,
        "layers": analysis.layers,
        "aliases": dict(analysis.aliases),
        "head_indices": analysis.head_indices,
        "word_ids": analysis.word_ids,
        "info": dict(analysis.info),
    }


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description in a file of this format."""
    if not Path(path).is_file():
        raise NormscopeError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {}).get("normscope", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise NormscopeError(f"{path} is not a whole safetensors file: {error}.") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise NormscopeError(f"{path} is a safetensors file, but not one that Analysis.save wrote ({FORMAT}).")
    return tensors, meta


def _analysis(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], path: str | os.PathLike[str]) -> Analysis:
    """The analysis of what `_tensors` and `_meta` gave."""
    word_ids = meta["word_ids"]
    found = Analysis(
        measured={
            scope: Measured(*(tensors[f"{part}/{scope}"] for part in ("map", "mixing", "remainder", "completeness")))
            for scope in meta["scopes"]
        },
        rows=tuple(Label(*label) for label in meta["rows"]),
        columns=tuple(Label(*label) for label in meta["columns"]),
        layers=tuple(meta["layers"]),
        aliases=dict(meta["aliases"]),
        heads=HeadMaps(
            {name.removeprefix("heads/"): t for name, t in tensors.items() if name.startswith("heads/")},
            meta["aliases"],
        ),
        value_norms=tensors.get("value_norms"),
        head_indices=tuple(meta["head_indices"]),
        word_ids=None if word_ids is None else tuple(word_ids),
        info=dict(meta["info"]),
    )
    if not _fits(found):
        raise NormscopeError(f"{path} is damaged: its labels do not fit its maps.")
    return found


def _fits(found: Analysis) -> bool:
    """Whether labels and tensors belong together."""
    layers, heads, rows, columns = map(len, (found.layers, found.head_indices, found.rows, found.columns))
    fits = all(tuple(maps.shape) == (layers, heads, rows, columns) for maps in found.heads.values())
    fits &= bool(found.heads) == bool(heads) and (found.word_ids is None or len(found.word_ids) == columns)
    fits &= found.value_norms is None or tuple(found.value_norms.shape) == (layers, heads, columns)
    for one in found.measured.values():
        fits &= tuple(one.map.shape) == (layers, rows, columns) and tuple(one.completeness.shape) == (layers,)
        fits &= tuple(one.mixing.shape) == tuple(one.remainder.shape) == (layers, rows)
    return fits
