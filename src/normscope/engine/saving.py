"""Results as safetensors files: their tensors, and in the metadata tokens, provenance and a checksum of it all. Never a
pickle."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from normscope.analysis import Analysis, HeadMaps, Label, Measured
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.engine.files import check_suffix, write_atomically
from normscope.errors import NormscopeError, NormscopeWarning
from normscope.models.scopes import scope_keeps_own_token

FORMAT = "normscope-analysis-2"
UNCHECKED = "normscope-analysis-1"  # as it was before there was a checksum


def save_analysis(path: str | os.PathLike[str], result: Analysis | EncoderDecoderAnalysis) -> Path:
    """Write everything but the model; of an encoder-decoder both sides."""
    if isinstance(result, Analysis):
        return write_tensors(path, _analysis_tensors(result), {"format": FORMAT, **_analysis_metadata(result)})
    tensors = {f"{side}/{name}": t for side, one in result.sides.items() for name, t in _analysis_tensors(one).items()}
    return write_tensors(
        path,
        tensors,
        {"format": FORMAT, "sides": {side: _analysis_metadata(one) for side, one in result.sides.items()}},
    )


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write tensors and a description, which JSON can say, with a checksum of both."""
    check_suffix(path, ".safetensors")
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    description = json.dumps(meta)
    with write_atomically(path) as temporary:
        try:
            save_file(
                kept, temporary, metadata={"normscope": description, "sha256": tensor_checksum(kept, description)}
            )
        except SafetensorError as error:  # a full disk, for instance
            raise NormscopeError(f"Cannot write {path}: {error}.") from error
    return Path(path)


def load_analysis(path: str | os.PathLike[str]) -> Analysis | EncoderDecoderAnalysis:
    """Read what `save` wrote; a damaged or foreign file is refused."""
    tensors, meta = read_tensors(path, "Analysis.save", FORMAT, UNCHECKED)
    try:
        if "sides" not in meta:
            return _rebuild_analysis(tensors, meta, path)
        sides = {
            side: _rebuild_analysis(tensors_under(tensors, side), one, path) for side, one in meta["sides"].items()
        }
        return EncoderDecoderAnalysis(**sides)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, NormscopeError):
            raise
        raise NormscopeError(f"{path} lacks a part of an analysis: {error}.") from error


def tensor_checksum(tensors: Mapping[str, Tensor], description: str) -> str:
    """SHA-256 of the description and of every tensor's name, type, shape and bytes, in hexadecimal digits."""
    digest = hashlib.sha256(f"{description}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{json.dumps([name, str(tensor.dtype), list(tensor.shape)])}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensors_under(tensors: Mapping[str, Tensor], folder: str) -> dict[str, Tensor]:
    """The tensors whose names start with ``folder/``, by the rest of their names."""
    start = f"{folder}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _analysis_tensors(analysis: Analysis) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for scope, measured in analysis.measured.items():
        for name, tensor in vars(measured).items():
            if tensor is not None:
                tensors[f"{name}/{scope}"] = tensor
    tensors |= {f"heads/{scope}": tensor for scope, tensor in analysis.heads.items()}
    if analysis.value_norms is not None:
        tensors["value_norms"] = analysis.value_norms
    return tensors


def _analysis_metadata(analysis: Analysis) -> dict[str, Any]:
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


def read_tensors(
    path: str | os.PathLike[str], writer: str, current: str, unchecked: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description that `write` wrote, of the format `current`, or of an older one that had no
    checksum. `writer` is the method that writes such files."""
    if not Path(path).is_file():
        raise NormscopeError(f"There is no file {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        description = metadata.get("normscope", "null")
        meta = json.loads(description)
    except (SafetensorError, OSError, ValueError) as error:
        raise NormscopeError(f"{path} is not a whole safetensors file: {error}.") from error
    if not isinstance(meta, dict) or meta.get("format") not in (current, unchecked) or meta.get("format") is None:
        raise NormscopeError(f"{path} is a safetensors file, but not one that {writer} wrote ({current}).")
    if meta["format"] == unchecked and "sha256" not in metadata:
        warnings.warn(
            f"{path} is of an older format and carries no checksum: whether it is damaged cannot be told. Save the "
            "analysis again to have one.",
            category=NormscopeWarning,
            stacklevel=4,  # where Analysis.load is called
        )
    elif metadata.get("sha256") != tensor_checksum(tensors, description):
        raise NormscopeError(
            f"{path} is damaged: its contents do not fit its checksum. Take another copy, or run the analysis again."
        )
    return tensors, meta


def _rebuild_analysis(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], path: str | os.PathLike[str]) -> Analysis:
    """The analysis of what `_tensors` and `_meta` gave."""
    word_ids = meta["word_ids"]
    found = Analysis(
        measured={
            scope: Measured(
                tensors[f"map/{scope}"],
                tensors[f"mixing/{scope}"] if scope_keeps_own_token(scope) else None,
                tensors[f"remainder/{scope}"],
                tensors[f"completeness/{scope}"],
            )
            for scope in meta["scopes"]
        },
        rows=tuple(Label(*label) for label in meta["rows"]),
        columns=tuple(Label(*label) for label in meta["columns"]),
        layers=tuple(meta["layers"]),
        aliases=dict(meta["aliases"]),
        heads=HeadMaps(tensors_under(tensors, "heads"), meta["aliases"]),
        value_norms=tensors.get("value_norms"),
        head_indices=tuple(meta["head_indices"]),
        word_ids=None if word_ids is None else tuple(word_ids),
        info=dict(meta["info"]),
    )
    if not _shapes_fit(found):
        raise NormscopeError(f"{path} is damaged: its labels do not fit its maps.")
    return found


def _shapes_fit(found: Analysis) -> bool:
    """Whether labels and tensors belong together."""
    layers, heads, rows, columns = map(len, (found.layers, found.head_indices, found.rows, found.columns))
    fits = all(tuple(maps.shape) == (layers, heads, rows, columns) for maps in found.heads.values())
    fits &= bool(found.heads) == bool(heads) and (found.word_ids is None or len(found.word_ids) == columns)
    fits &= found.value_norms is None or tuple(found.value_norms.shape) == (layers, heads, columns)
    for one in found.measured.values():
        fits &= tuple(one.map.shape) == (layers, rows, columns) and tuple(one.completeness.shape) == (layers,)
        fits &= all(tuple(t.shape) == (layers, rows) for t in (one.mixing, one.remainder) if t is not None)
    return fits
