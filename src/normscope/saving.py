"""Results as safetensors files, never pickles: the tensors, with tokens, provenance and a checksum in the metadata."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from normscope.errors import NormscopeError, NormscopeWarning
from normscope.files import check_suffix, write_atomically
from normscope.labels import Label
from normscope.models.scopes import scope_keeps_own_token
from normscope.result_base import HeadMaps, Measured

if TYPE_CHECKING:
    from normscope.analysis import Analysis

ResultT = TypeVar("ResultT")

FORMAT = "normscope-analysis-2"
FORMAT_WITHOUT_CHECKSUM = "normscope-analysis-1"  # the older format, without a checksum


def save_analysis(path: str | os.PathLike[str], analysis: Analysis) -> Path:
    """Write everything except the model."""
    return save_tensors(
        path, _analysis_tensors_for_saving(analysis), {"format": FORMAT, **_analysis_metadata_for_saving(analysis)}
    )


def save_both_sides(path: str | os.PathLike[str], sides: Mapping[str, Analysis]) -> Path:
    """Write the analyses of an encoder-decoder to one file."""
    tensors = {
        f"{side}/{name}": t for side, one in sides.items() for name, t in _analysis_tensors_for_saving(one).items()
    }
    described = {side: _analysis_metadata_for_saving(one) for side, one in sides.items()}
    return save_tensors(path, tensors, {"format": FORMAT, "sides": described})


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write tensors and a JSON-serializable description, with a checksum of both."""
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


def load_saved_analysis(
    path: str | os.PathLike[str], make: Callable[..., Analysis]
) -> Analysis | dict[Literal["encoder", "decoder"], Analysis]:
    """Read a file written by `save_analysis`, or by `save_both_sides`. Raise if it is damaged or was written by another
    program. `make` is the class Analysis."""
    tensors, meta = load_saved_tensors(path, "Analysis.save", FORMAT, FORMAT_WITHOUT_CHECKSUM)
    try:
        if "sides" not in meta:
            return _rebuild_saved_analysis(tensors, meta, path, make)
        if not set(meta["sides"]) <= {"encoder", "decoder"}:
            raise ValueError("a side")
        return {
            side: _rebuild_saved_analysis(tensors_under(tensors, side), one, path, make)
            for side, one in meta["sides"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, NormscopeError):
            raise
        raise NormscopeError(
            f"{path} is incomplete: {error} is missing or invalid. Save the analysis again."
        ) from error


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


def _analysis_tensors_for_saving(analysis: Analysis) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for scope, measured in analysis.measured.items():
        for name, tensor in vars(measured).items():
            if tensor is not None:
                tensors[f"{name}/{scope}"] = tensor
    tensors |= {f"heads/{scope}": tensor for scope, tensor in analysis.heads.items()}
    if analysis.value_norms is not None:
        tensors["value_norms"] = analysis.value_norms
    return tensors


def _analysis_metadata_for_saving(analysis: Analysis) -> dict[str, Any]:
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


def load_saved_tensors(
    path: str | os.PathLike[str], writer: str, current: str, unchecked: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the description that `save_tensors` wrote, in the format `current` or in the older format
    `unchecked`, which has no checksum. `writer` names the method that writes these files, for error messages."""
    if not Path(path).is_file():
        raise NormscopeError(f"{path} does not exist or is not a file.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        description = metadata.get("normscope", "null")
        meta = json.loads(description)
    except (SafetensorError, OSError, ValueError) as error:
        raise NormscopeError(f"{path} is not a valid safetensors file: {error}.") from error
    if not isinstance(meta, dict) or meta.get("format") not in (current, unchecked) or meta.get("format") is None:
        raise NormscopeError(f"{path} is a safetensors file, but was not written by {writer} (format {current}).")
    if meta["format"] == unchecked and "sha256" not in metadata:
        warnings.warn(
            f"{path} has an older format without a checksum, so damage cannot be detected. Save the analysis again to "
            "add one.",
            category=NormscopeWarning,
            stacklevel=4,  # the caller of Analysis.load
        )
    elif metadata.get("sha256") != tensor_checksum(tensors, description):
        raise NormscopeError(
            f"{path} is damaged: its contents do not match its checksum. Use another copy or run the analysis again."
        )
    return tensors, meta


def load_scores(
    path: str | os.PathLike[str],
    what: str,
    writer: str,
    format: str,
    build: Callable[[Mapping[str, Tensor], Mapping[str, Any]], ResultT],
    labels_fit: Callable[[ResultT], bool],
) -> ResultT:
    """The result (`what`, such as "a flow") that `build` makes of the tensors and the description in a file of
    `writer`; refuses a file that lacks a part of it, or whose labels do not fit its tensors."""
    tensors, meta = load_saved_tensors(path, writer, format)
    try:
        found = build(tensors, meta)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NormscopeError(f"{path} lacks a part of {what}: {error}.") from error
    if not labels_fit(found):
        raise NormscopeError(f"{path} is damaged: its labels do not fit its tensors.")
    return found


def _rebuild_saved_analysis(
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    path: str | os.PathLike[str],
    make: Callable[..., Analysis],
) -> Analysis:
    """The inverse of `_analysis_tensors_for_saving` and `_analysis_metadata_for_saving`."""
    word_ids = meta["word_ids"]
    found = make(
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
    if not _saved_labels_match_tensors(found):
        raise NormscopeError(f"{path} is damaged: the shapes of its tensors do not match its labels.")
    return found


def _saved_labels_match_tensors(found: Analysis) -> bool:
    """Whether the shapes of all tensors match the labels."""
    layers, heads, rows, columns = map(len, (found.layers, found.head_indices, found.rows, found.columns))
    fits = all(tuple(maps.shape) == (layers, heads, rows, columns) for maps in found.heads.values())
    fits &= bool(found.heads) == bool(heads) and (found.word_ids is None or len(found.word_ids) == columns)
    fits &= found.value_norms is None or tuple(found.value_norms.shape) == (layers, heads, columns)
    for one in found.measured.values():
        fits &= tuple(one.map.shape) == (layers, rows, columns) and tuple(one.completeness.shape) == (layers,)
        fits &= all(tuple(t.shape) == (layers, rows) for t in (one.mixing, one.remainder) if t is not None)
    return fits
