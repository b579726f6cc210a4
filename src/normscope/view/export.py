"""Results as files; the suffix chooses the format: page, figure, JSON, NumPy archive or safetensors.

The JSON of an analysis holds `format`, `info`, `layers` (the model's layer indices, counted from 0), `rows` and
`columns` (lists of `{token, side, position}`), and under `scopes` for each scope `map` (layers x rows x columns),
`mixing` and `remainder` (layers x rows) and `completeness` (layers). `heads`, if requested, holds `indices`, `maps` by
scope (layers x heads x rows x columns) and `value_norms` (layers x heads x columns). Values that are not finite are
null.

A NumPy archive holds the same arrays under `map/SCOPE`, `mixing/SCOPE`, `remainder/SCOPE`, `completeness/SCOPE` and
`heads/SCOPE`, with `tokens` (of the rows), `column_tokens`, `row_sides`, `column_sides`, `row_positions`,
`column_positions`, `scopes`, `layers`, `head_indices` and `value_norms`, and `info` as JSON text. Nothing is pickled.

For an encoder-decoder, JSON holds `format`, `info` and `sides`, with the content described above under `encoder` and
`decoder`; the names in a NumPy archive begin with `encoder/` and `decoder/`. The cross-attention scopes `XATTN-W` and
`XATTN-N` have no `mixing`. A figure shows the decoder, or the encoder if only that side has the scope.

The JSON of a flow holds `format`, `info`, `method`, `layers`, `rows` and `columns`. With a target it also holds `to`:
`target`, `contrast` (true for the difference of two logits), `value`, `scores`, `remainder`, `completeness`, and by
side `layers` and `remainders`. Without a target it holds `maps` (layers x rows x columns). With ``each=True``, `each`
holds the same for every target, as lists; `sources` holds the columns of each source.

The JSON of an explanation holds the fields of `Explanation`, and `by_source` and `shares`.
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

from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.explain.result import Explanation
from normscope.explain.saving import TENSORS, describe_explanation
from normscope.files import write_atomically
from normscope.flow.result import Flow
from normscope.labels import Label
from normscope.view.document import Result
from normscope.view.figure.maps import figure_of
from normscope.view.figure.style import save_figure
from normscope.view.formats import FIGURES, check_output_path
from normscope.view.html import write_page

FORMAT = "normscope-json-1"
FLOW_FORMAT = "normscope-flow-1"
EXPLANATION_FORMAT = "normscope-explanation-json-1"


def export(
    analysis: Result,
    path: str | os.PathLike[str],
    scope: str | None = None,
    layer: int | None = None,
    *,
    image: Any = None,
) -> Path:
    """Write the analysis to `path`, in the format of its suffix.

    `scope` and `layer` (counted from 0) choose what a figure shows; `image` is the picture of a vision model, for
    figures and pages. See `Analysis.plot`.
    """
    check_output_path(path)
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix in FIGURES:
        if isinstance(analysis, EncoderDecoderAnalysis):
            return save_figure(figure_of(analysis.plot(scope, layer)), target)
        return save_figure(figure_of(analysis.plot(scope, layer, image=image)), target)
    if suffix == ".html":
        return write_page(analysis, target, image=image)
    if suffix == ".json":
        return export_json_file(analysis_to_export_dict(analysis), target)
    if suffix == ".npz":
        return _export_npz(analysis, target)
    return analysis.save(target)


def analysis_to_export_dict(analysis: Result) -> dict[str, Any]:
    """The content of an analysis' JSON file: plain lists, numbers and strings."""
    if isinstance(analysis, EncoderDecoderAnalysis):
        sides = {side: analysis_to_export_dict(one) for side, one in analysis.sides.items()}
        return {"format": FORMAT, "info": exported_json_value(analysis.info), "sides": sides}
    content: dict[str, Any] = {
        "format": FORMAT,
        "info": exported_json_value(analysis.info),
        "layers": list(analysis.layers),
        "rows": [label._asdict() for label in analysis.rows],
        "columns": [label._asdict() for label in analysis.columns],
        "scopes": {
            scope: {
                name: _exported_tensor_lists(tensor) for name, tensor in vars(measured).items() if tensor is not None
            }
            for scope, measured in analysis.measured.items()
        },
    }
    if analysis.heads:
        content["heads"] = {
            "indices": list(analysis.head_indices),
            "maps": {scope: _exported_tensor_lists(tensor) for scope, tensor in analysis.heads.items()},
            "value_norms": None if analysis.value_norms is None else _exported_tensor_lists(analysis.value_norms),
        }
    return content


def flow_to_export_dict(flow: Flow) -> dict[str, Any]:
    """The content of a flow's JSON file: plain lists, numbers and strings."""
    content: dict[str, Any] = {
        "format": FLOW_FORMAT,
        "info": exported_json_value(dict(flow.info)),
        "method": flow.method,
        "layers": list(flow.layers),
        "rows": [label._asdict() for label in flow.rows],
        "columns": [label._asdict() for label in flow.columns],
    }
    content |= (
        {"maps": exported_json_value(flow.maps)} if flow.to is None else {"to": exported_json_value(vars(flow.to))}
    )
    if flow.each is not None:
        content["each"] = exported_json_value(vars(flow.each))
    if flow.sources:
        content["sources"] = exported_json_value(dict(flow.sources))
    return content


def export_flow_json(flow: Flow, target: Path) -> Path:
    """Write a flow as JSON."""
    return export_json_file(flow_to_export_dict(flow), target)


def export_explanation_json(told: Explanation, target: Path) -> Path:
    """Write an explanation as JSON."""
    return export_json_file(explanation_to_export_dict(told), target)


def explanation_json_text(told: Explanation) -> str:
    """The JSON of an explanation as one line of text."""
    return _exported_json_text(explanation_to_export_dict(told))


def explanation_to_export_dict(told: Explanation) -> dict[str, Any]:
    """The content of an explanation's JSON file: that of its safetensors file, and its sums by source."""
    described = exported_json_value(describe_explanation(told))
    del described["hop_numbers"]
    return {
        "format": EXPLANATION_FORMAT,
        **described,
        "rows": [label._asdict() for label in told.rows],
        "columns": [label._asdict() for label in told.columns],
        **{name: exported_json_value(getattr(told, name)) for name in TENSORS},
        "hops": [exported_json_value(vars(hop)) for hop in told.hops],
        "by_source": exported_json_value(told.by_source),
        "shares": exported_json_value(told.shares),
    }


def export_json_file(content: dict[str, Any], target: Path) -> Path:
    """Write plain lists, numbers and strings as JSON."""
    text = _exported_json_text(content)
    with write_atomically(target) as temporary:
        # UTF-8 cannot encode lone surrogates; backslashreplace turns them into their JSON escapes.
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))
    return target


def _exported_json_text(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _export_npz(analysis: Result, target: Path) -> Path:
    with write_atomically(target) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **_exported_npz_arrays(analysis))
    return target


def _exported_npz_arrays(analysis: Result) -> dict[str, Any]:
    if isinstance(analysis, EncoderDecoderAnalysis):
        return {
            f"{side}/{name}": array
            for side, one in analysis.sides.items()
            for name, array in _exported_npz_arrays(one).items()
        }
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
        "tokens": _exported_strings(analysis.tokens),
        "column_tokens": _exported_strings([label.token for label in analysis.columns]),
        "row_sides": _exported_strings([label.side for label in analysis.rows]),
        "column_sides": _exported_strings([label.side for label in analysis.columns]),
        "row_positions": _exported_positions(analysis.rows),
        "column_positions": _exported_positions(analysis.columns),
        "scopes": _exported_strings(analysis.scopes),
        "layers": np.array(analysis.layers, dtype=np.int64),
        "head_indices": np.array(analysis.head_indices, dtype=np.int64),
        "info": np.array(json.dumps(exported_json_value(analysis.info), allow_nan=False)),
    }


def _exported_strings(texts: Sequence[str]) -> np.ndarray[Any, Any]:
    return np.array(texts, dtype=np.str_)


def _exported_positions(labels: Sequence[Label]) -> np.ndarray[Any, Any]:
    return np.array([label.position for label in labels], dtype=np.int64)


def _exported_tensor_lists(tensor: Tensor) -> Any:
    """Nested lists with as many significant digits as the dtype has."""
    digits = 17 if tensor.dtype == torch.float64 else 9
    return _round_exported_lists(tensor.detach().cpu().tolist(), digits)


def _round_exported_lists(value: Any, digits: int) -> Any:
    if isinstance(value, list):
        return [_round_exported_lists(entry, digits) for entry in value]
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def exported_json_value(value: Any) -> Any:
    """A value that JSON can represent: tensors as lists, non-finite numbers as None, unknown objects as text."""
    if isinstance(value, Tensor):
        return _exported_tensor_lists(value)
    if isinstance(value, Mapping):
        return {str(key): exported_json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [exported_json_value(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
