"""An analysis as a file, by the suffix of its name: page, figure, JSON, NumPy archive or safetensors.

JSON holds `format`, `info`, `layers` (the model's layer indices, counted from 0), `rows` and `columns` (each a list of
`{token, side, position}`), and under `scopes` for each scope `map` (layers x rows x columns), `mixing` and `remainder`
(layers x rows) and `completeness` (layers); `heads`, when they were asked for, holds `indices`, `maps` by scope
(layers x heads x rows x columns) and `value_norms` (layers x heads x columns). Numbers that are not finite are null.

A NumPy archive holds the same arrays under `map/SCOPE`, `mixing/SCOPE`, `remainder/SCOPE`, `completeness/SCOPE` and
`heads/SCOPE`, with `tokens` (of the rows), `column_tokens`, `row_sides`, `column_sides`, `row_positions`,
`column_positions`, `scopes`, `layers`, `head_indices` and `value_norms`, and `info` as JSON text. Nothing is pickled.

Of an encoder-decoder, JSON holds `format`, `info` and `sides`, with what is described above under `encoder` and
`decoder`; the names in a NumPy archive begin with `encoder/` and `decoder/`. Cross-attention alone, `XATTN-W` and
`XATTN-N`, has no `mixing`. A figure shows the decoder, or the side that alone has the scope.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscope.analysis import Analysis
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.engine.files import write_atomically
from normscope.labels import Label
from normscope.view import figure, page
from normscope.view.formats import FIGURES, check_path

Result = Analysis | EncoderDecoderAnalysis
FORMAT = "normscope-json-1"


def export(
    analysis: Result,
    path: str | os.PathLike[str],
    scope: str | None = None,
    layer: int | None = None,
    *,
    image: Any = None,
) -> Path:
    """Write the analysis to `path`. `scope` and `layer` (counted from 0) choose what a figure shows, and `image` is the
    picture under the patches, of a figure or a page; see `Analysis.plot`."""
    check_path(path)
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix in FIGURES:
        if isinstance(analysis, EncoderDecoderAnalysis):
            return figure.save(figure.figure_of(analysis.plot(scope, layer)), target)
        return figure.save(figure.figure_of(analysis.plot(scope, layer, image=image)), target)
    if suffix == ".html":
        return page.write(analysis, target, image=image)
    if suffix == ".json":
        return write_json(as_dict(analysis), target)
    if suffix == ".npz":
        return _npz(analysis, target)
    return analysis.save(target)


def as_dict(analysis: Result) -> dict[str, Any]:
    """The analysis as plain lists, numbers and strings: what the JSON file holds."""
    if isinstance(analysis, EncoderDecoderAnalysis):
        sides = {side: as_dict(one) for side, one in analysis.sides.items()}
        return {"format": FORMAT, "info": plain(analysis.info), "sides": sides}
    content: dict[str, Any] = {
        "format": FORMAT,
        "info": plain(analysis.info),
        "layers": list(analysis.layers),
        "rows": [label._asdict() for label in analysis.rows],
        "columns": [label._asdict() for label in analysis.columns],
        "scopes": {
            scope: {name: _lists(tensor) for name, tensor in vars(measured).items() if tensor is not None}
            for scope, measured in analysis.measured.items()
        },
    }
    if analysis.heads:
        content["heads"] = {
            "indices": list(analysis.head_indices),
            "maps": {scope: _lists(tensor) for scope, tensor in analysis.heads.items()},
            "value_norms": None if analysis.value_norms is None else _lists(analysis.value_norms),
        }
    return content


def write_json(content: dict[str, Any], target: Path) -> Path:
    """Write plain lists, numbers and strings to a file."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    with write_atomically(target) as temporary:
        # Half a surrogate pair has no UTF-8, but its replacement here is the JSON escape of it.
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
    return target


def _npz(analysis: Result, target: Path) -> Path:
    with write_atomically(target) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **_arrays(analysis))
    return target


def _arrays(analysis: Result) -> dict[str, Any]:
    if isinstance(analysis, EncoderDecoderAnalysis):
        return {f"{side}/{name}": array for side, one in analysis.sides.items() for name, array in _arrays(one).items()}
    arrays: dict[str, Any] = {
        f"{name}/{scope}": tensor.detach().cpu().numpy()
        for scope, measured in analysis.measured.items()
        for name, tensor in vars(measured).items()
        if tensor is not None
    }
    arrays |= {f"heads/{scope}": tensor.detach().cpu().numpy() for scope, tensor in analysis.heads.items()}
    if analysis.value_norms is not None:
        arrays["value_norms"] = analysis.value_norms.detach().cpu().numpy()
    return arrays | {
        "tokens": _strings(analysis.tokens),
        "column_tokens": _strings([label.token for label in analysis.columns]),
        "row_sides": _strings([label.side for label in analysis.rows]),
        "column_sides": _strings([label.side for label in analysis.columns]),
        "row_positions": _positions(analysis.rows),
        "column_positions": _positions(analysis.columns),
        "scopes": _strings(analysis.scopes),
        "layers": np.array(analysis.layers, dtype=np.int64),
        "head_indices": np.array(analysis.head_indices, dtype=np.int64),
        "info": np.array(json.dumps(plain(analysis.info), allow_nan=False)),
    }


def _strings(texts: Sequence[str]) -> np.ndarray[Any, Any]:
    return np.array(texts, dtype=np.str_)


def _positions(labels: Sequence[Label]) -> np.ndarray[Any, Any]:
    return np.array([label.position for label in labels], dtype=np.int64)


def _lists(tensor: Tensor) -> Any:
    """Nested lists with as many digits as the dtype holds."""
    digits = 17 if tensor.dtype == torch.float64 else 9
    return _rounded(tensor.detach().cpu().tolist(), digits)


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, list):
        return [_rounded(entry, digits) for entry in value]
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """What JSON can say: tensors as lists, other objects as text, numbers that are not finite as null."""
    if isinstance(value, Tensor):
        return _lists(value)
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
