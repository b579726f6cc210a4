"""What a viewer shows of a result: a header that JSON can say, and arrays of numbers.

The header describes the sides, their tokens, scopes and layers ("normscope-view-1"), what to know before believing
them, and where there is one the flow to a target. An array belongs to a side, a scope and a layer: rows x columns, or
for the scope ``heads/ATTN-W`` (or another of `head_scopes`) heads x rows x columns.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from torch import Tensor

from normscope.analysis import Analysis
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.errors import NormscopeError
from normscope.view import log16
from normscope.view.components import components_of
from normscope.view.described import labels, numbers, words_of
from normscope.view.labels import model_label, visible
from normscope.view.patches import grid_of
from normscope.view.picture import data_address
from normscope.view.scores import scores_of

if TYPE_CHECKING:
    from normscope.flow.result import Flow

FORMAT = "normscope-view-1"
HEADS = "heads/"

Result = Analysis | EncoderDecoderAnalysis


def sides_of(result: Result) -> dict[str, Analysis]:
    """The sides by name, the one that is shown first in front: of an encoder-decoder the decoder."""
    if isinstance(result, EncoderDecoderAnalysis):
        return dict(reversed(result.sides.items()))
    return {result.rows[0].side: result}


def title_of(result: Result) -> str:
    """The model and what was analysed, for a title bar."""
    sides = sides_of(result)
    named = len(sides) > 1
    counts = (
        f"{side + ' ' if named else ''}{_count(len(one.rows), 'token')}, {_count(len(one.layers), 'layer')}"
        for side, one in sides.items()
    )
    return f"{visible(model_label(result))}: {'; '.join(counts)}"


def header(
    result: Result, *, image: Any = None, text: str | None = None, name: str | None = None, flow: Flow | None = None
) -> dict[str, Any]:
    """The header of a result whose arrays are float32. `image` is the picture under a vision model's patches, `text`
    what was analysed, `name` another name of the model, `flow` that of the same input to a target."""
    sides = sides_of(result)
    info = next(iter(sides.values())).info
    return {
        "format": FORMAT,
        "title": title_of(result),
        "text": text,
        "warnings": list(dict.fromkeys([*result.warnings, *(() if flow is None else flow.warnings)])),
        "model": {
            "name": visible(model_label(result)) if name is None else name,
            "family": str(info.get("family") or ""),
            "dtype": str(info.get("dtype") or ""),
            "gate": str(info.get("gate") or "ig"),
            "value_bias": str(info.get("value_bias") or "token"),
            "complete": bool(info.get("complete", True)),
            "versions": {name: str(info.get(name) or "") for name in ("normscope", "torch", "transformers")},
        },
        "encoding": "float32",
        "precision": 0.0,
        "sides": [_side(side, one, sides) for side, one in sides.items()],
        "image": None if image is None else data_address(image),
        "flow": None if flow is None else scores_of(flow, sides),
    }


def as_json(described: dict[str, Any]) -> str:
    """A header in plain ASCII: half a surrogate pair in a token cannot be encoded otherwise."""
    return json.dumps(described, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def cells(result: Result, side: str, scope: str, layer: int | None = None) -> bytes:
    """The array of a side, scope and layer in little-endian float32; without a layer those of all layers in turn."""
    analysis = sides_of(result).get(side)
    if analysis is None:
        raise NormscopeError(f"There is no side {side!r}: there are {', '.join(sides_of(result))}.")
    kind = scope.removeprefix(HEADS)
    maps = analysis.heads[kind] if scope.startswith(HEADS) else analysis[kind]
    if layer is not None:
        maps = maps[analysis.layer_position(layer)]
    return _array(maps).astype("<f4", copy=False).tobytes()


def packed(result: Result, *, image: Any = None, flow: Flow | None = None) -> tuple[dict[str, Any], bytes]:
    """The header of a result whose arrays are log16, and all of them in turn as one raw deflate stream: those of the
    scopes of each side, layer by layer, then those of the heads of each side."""
    described = header(result, image=image, flow=flow)
    pack = zlib.compressobj(9, zlib.DEFLATED, -15)
    pieces = []
    worst = 0.0
    entries = {entry["side"]: entry for entry in described["sides"]}
    for side, scope, maps in arrays(result):
        try:
            codes, span = log16.encode(_array(maps))
        except NormscopeError as error:
            raise NormscopeError(f"{scope}: {error}") from error
        entries[side]["ranges"][scope] = list(span)
        worst = max(worst, log16.precision(span))
        pieces.append(pack.compress(codes.astype("<u2", copy=False).tobytes()))
    described |= {"encoding": "log16", "precision": _rounded_up(worst)}
    return described, b"".join([*pieces, pack.flush()])


def arrays(result: Result) -> Iterator[tuple[str, str, Tensor]]:
    """Side, scope and (layers, ...) of everything there is, in the order of the packed data."""
    for side, one in sides_of(result).items():
        for scope, measured in one.measured.items():
            yield side, scope, measured.map
    for side, one in sides_of(result).items():
        for scope in head_scopes(one):
            yield side, HEADS + scope, one.heads[scope]


def head_scopes(analysis: Analysis) -> list[str]:
    """The scopes that have maps of heads: weights before norms, cross-attention last."""
    return sorted(analysis.heads, key=lambda scope: (scope.startswith("X"), not scope.endswith("-W"), scope))


def size_of(result: Result) -> int:
    """Bytes that the arrays of a result take."""
    return sum(maps.numel() * maps.element_size() for _, _, maps in arrays(result))


def _side(side: str, analysis: Analysis, sides: dict[str, Analysis]) -> dict[str, Any]:
    words = words_of(sides)
    causal = bool(analysis.info.get("causal", side == "decoder"))
    grid = grid_of(analysis)
    return {
        "side": side,
        "causal": causal,
        "rows": labels(analysis.rows, words, grid is not None),
        "columns": labels(analysis.columns, words, grid is not None),
        "layers": list(analysis.layers),
        "model_layers": int(analysis.info.get("model_layers", max(analysis.layers) + 1)),
        "components": components_of(analysis),
        "scopes": list(analysis.scopes),
        "aliases": {alias: scope for alias, scope in analysis.aliases.items() if scope in analysis.measured},
        "completeness": {scope: numbers(one.completeness) for scope, one in analysis.measured.items()},
        "mixing": {scope: numbers(analysis.mixing_ratio(scope)) for scope in analysis.mixing_scopes},
        "remainder": {scope: numbers(one.remainder) for scope, one in analysis.measured.items()},
        "heads": list(analysis.head_indices),
        "head_scopes": head_scopes(analysis),
        "grid": None if grid is None else list(grid),
        "ranges": {},
    }


def _array(maps: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = maps.detach().cpu().numpy()
    return array


def _rounded_up(value: float) -> float:
    """With two digits, no smaller than it was."""
    if value == 0:
        return 0.0
    unit: float = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
