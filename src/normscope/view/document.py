"""The document that the viewer shows: a JSON header, and arrays of numbers.

The header ("normscope-view-1") describes the sides, their tokens, scopes and layers, the warnings, and optionally the
flow to a target. Each array belongs to a side, a scope and a layer, and has the shape rows x columns; for the scope
``heads/ATTN-W`` (or another of `head_scopes`) the shape is heads x rows x columns.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscope.analysis import Analysis
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.errors import NormscopeError
from normscope.labels import Label, count_label, visible_label_text
from normscope.view import log16
from normscope.view.components import layer_components
from normscope.view.images import image_data_url, image_patch_grid
from normscope.view.tokens import model_label

if TYPE_CHECKING:
    from normscope.flow.result import Flow

FORMAT = "normscope-view-1"
SIGNED = "MIX-W"  # the weights of recurrences
HEADS = "heads/"
Result = Analysis | EncoderDecoderAnalysis
DIGITS = 4  # significant digits of measures
SPECIAL = re.compile(r"\[(CLS|SEP|PAD|BOS|EOS)\]|</?(s|bos|eos|pad|cls|sep)>|<\|(?!0x)[^|]+\|>|<(start|end)_of_turn>")
PATCH = re.compile(r"\d+,\d+")
Words = dict[str, dict[int, int | None]]  # side -> position -> word, for sides with word ids
SCORE_DIGITS = 7  # more, because readers add up scores and remainder
TARGET_POSITION = re.compile(r" at position (\d+)$")  # end of a target that is read at a token


def sides_of(result: Result) -> dict[str, Analysis]:
    """The sides by name, in display order: the decoder before the encoder."""
    if isinstance(result, EncoderDecoderAnalysis):
        return dict(reversed(result.sides.items()))
    return {result.rows[0].side: result}


def document_title(result: Result) -> str:
    """The model and the size of the analysis, for a title bar."""
    sides = sides_of(result)
    named = len(sides) > 1
    counts = (
        f"{side + ' ' if named else ''}{count_label(len(one.rows), 'token')}, {count_label(len(one.layers), 'layer')}"
        for side, one in sides.items()
    )
    return f"{visible_label_text(model_label(result))}: {'; '.join(counts)}"


def document_header(
    result: Result, *, image: Any = None, text: str | None = None, name: str | None = None, flow: Flow | None = None
) -> dict[str, Any]:
    """The header of a document with float32 arrays.

    `image` is the picture of a vision model, `text` the analysed text, `name` replaces the model's name, and `flow` is
    a flow of the same input to a target.
    """
    sides = sides_of(result)
    if any(one.by_source for one in sides.values()):
        raise NormscopeError(
            "The viewer shows maps between tokens, but the columns of this analysis are sources. Use plot() or "
            "to_pandas(), write .svg or .json, or analyse the text without sources."
        )
    info = next(iter(sides.values())).info
    return {
        "format": FORMAT,
        "title": document_title(result),
        "text": text,
        "warnings": list(
            dict.fromkeys([*result.warnings, *(() if flow is None else flow.warnings), *_sign_notes(sides)])
        ),
        "model": {
            "name": visible_label_text(model_label(result)) if name is None else name,
            "family": str(info.get("family") or ""),
            "dtype": str(info.get("dtype") or ""),
            "gate": str(info.get("gate") or "ig"),
            "value_bias": str(info.get("value_bias") or "token"),
            "complete": bool(info.get("complete", True)),
            "versions": {name: str(info.get(name) or "") for name in ("normscope", "torch", "transformers")},
        },
        "encoding": "float32",
        "precision": 0.0,
        "sides": [_describe_side(side, one, sides) for side, one in sides.items()],
        "image": None if image is None else image_data_url(image),
        "flow": None if flow is None else describe_document_scores(flow, sides),
    }


def document_header_to_json(described: dict[str, Any]) -> str:
    """A header as ASCII JSON, since tokens may contain lone surrogates, which UTF-8 cannot encode."""
    return json.dumps(described, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def document_map_bytes(result: Result, side: str, scope: str, layer: int | None = None) -> bytes:
    """The array of a side, scope and layer as little-endian float32; without a layer, those of all layers in order."""
    analysis = sides_of(result).get(side)
    if analysis is None:
        raise NormscopeError(f"Unknown side {side!r}. This result has: {', '.join(sides_of(result))}.")
    kind = scope.removeprefix(HEADS)
    maps = analysis.heads[kind] if scope.startswith(HEADS) else analysis[kind]
    if layer is not None:
        maps = maps[analysis.layer_position(layer)]
    maps = _map_sizes(kind, maps)
    return _array_to_numpy(maps).astype("<f4", copy=False).tobytes()


def pack_document(result: Result, *, image: Any = None, flow: Flow | None = None) -> tuple[dict[str, Any], bytes]:
    """The header of a document with log16 arrays, and the arrays as one raw deflate stream in the order of
    `document_arrays`."""
    described = document_header(result, image=image, flow=flow)
    pack = zlib.compressobj(9, zlib.DEFLATED, -15)
    pieces = []
    worst = 0.0
    entries = {entry["side"]: entry for entry in described["sides"]}
    for side, scope, maps in document_arrays(result):
        try:
            codes, span = log16.encode_log16(_array_to_numpy(maps))
        except NormscopeError as error:
            raise NormscopeError(f"{scope}: {error}") from error
        entries[side]["ranges"][scope] = list(span)
        worst = max(worst, log16.log16_precision(span))
        pieces.append(pack.compress(codes.astype("<u2", copy=False).tobytes()))
    described |= {"encoding": "log16", "precision": _round_up(worst)}
    return described, b"".join([*pieces, pack.flush()])


def document_arrays(result: Result) -> Iterator[tuple[str, str, Tensor]]:
    """Side, scope and tensor (layers, ...) of every array in packing order: the scopes of each side, then the heads."""
    for side, one in sides_of(result).items():
        for scope, measured in one.measured.items():
            yield side, scope, _map_sizes(scope, measured.map)
    for side, one in sides_of(result).items():
        for scope in head_scopes(one):
            yield side, HEADS + scope, one.heads[scope]


def _map_sizes(scope: str, maps: Tensor) -> Tensor:
    """The sizes of the weights of recurrences, which may be negative: the viewer draws sizes on one scale."""
    return maps.abs() if scope == SIGNED else maps


def _sign_notes(sides: Mapping[str, Analysis]) -> tuple[str, ...]:
    """What the viewer says above maps whose signs it does not show."""
    signed = any(bool((one[SIGNED] < 0).any()) for one in sides.values() if SIGNED in one.measured)
    return (f"{SIGNED} shows the sizes of weights that may be negative; plot() and files have their signs.",) * signed


def head_scopes(analysis: Analysis) -> list[str]:
    """The scopes with head-level maps: weights before norms, cross-attention last."""
    return sorted(analysis.heads, key=lambda scope: (scope.startswith("X"), not scope.endswith("-W"), scope))


def document_arrays_size(result: Result) -> int:
    """Size of the arrays in bytes."""
    return sum(maps.numel() * maps.element_size() for _, _, maps in document_arrays(result))


def _describe_side(side: str, analysis: Analysis, sides: dict[str, Analysis]) -> dict[str, Any]:
    words = document_words_by_side(sides)
    causal = bool(analysis.info.get("causal", side == "decoder"))
    grid = image_patch_grid(analysis)
    return {
        "side": side,
        "causal": causal,
        "rows": describe_document_tokens(analysis.rows, words, grid is not None),
        "columns": describe_document_tokens(analysis.columns, words, grid is not None),
        "layers": list(analysis.layers),
        "model_layers": int(analysis.info.get("model_layers", max(analysis.layers) + 1)),
        "components": layer_components(analysis),
        "scopes": list(analysis.scopes),
        "aliases": {alias: scope for alias, scope in analysis.aliases.items() if scope in analysis.measured},
        "completeness": {scope: round_document_numbers(one.completeness) for scope, one in analysis.measured.items()},
        "mixing": {scope: round_document_numbers(analysis.mixing_ratio(scope)) for scope in analysis.mixing_scopes},
        "remainder": {scope: round_document_numbers(one.remainder) for scope, one in analysis.measured.items()},
        "heads": list(analysis.head_indices),
        "head_scopes": head_scopes(analysis),
        "grid": None if grid is None else list(grid),
        "ranges": {},
    }


def describe_document_scores(flow: Flow, sides: Mapping[str, Analysis]) -> dict[str, Any]:
    """The header's entry for a flow to a target, which must have the same tokens as these analyses."""
    if flow.to is None:
        raise NormscopeError(
            "The viewer shows flows to a target. Pass one with a target, such as flow(text, target='top')."
        )
    for side, one in sides.items():
        own = [label for label in one.columns if label.side == side]
        if own != [label for label in flow.columns if label.side == side]:
            raise NormscopeError(f"The flow and the analysis have different inputs: their {side} tokens differ.")
    to, place = flow.to, TARGET_POSITION.search(flow.to.target)
    value, remainder, completeness = round_document_numbers(
        torch.tensor([to.value, to.remainder, to.completeness], dtype=torch.float64), SCORE_DIGITS
    )
    picture = any(image_patch_grid(one) is not None for one in sides.values())
    return {
        "method": flow.method,
        "target": visible_label_text(TARGET_POSITION.sub("", to.target)),
        "position": None if place is None else int(place[1]),  # counted from 0
        "value": value,
        "remainder": remainder,
        "completeness": completeness,
        "columns": describe_document_tokens(flow.columns, document_words_by_side(sides), picture),
        "scores": round_document_numbers(to.scores, SCORE_DIGITS),
        "layers": {side: round_document_numbers(by_token) for side, by_token in to.layers.items()},
        "remainders": {side: round_document_numbers(constants) for side, constants in to.remainders.items()},
    }


def document_words_by_side(sides: Mapping[str, Analysis]) -> Words:
    found: Words = {}
    for one in sides.values():
        if one.word_ids is not None:
            own = one.rows[0].side
            pairs = zip(one.columns, one.word_ids, strict=True)
            found[own] = {label.position: word for label, word in pairs if label.side == own}
    return found


def describe_document_tokens(given: Iterable[Label], words: Words, picture: bool) -> list[dict[str, Any]]:
    """Tokens with their sides, positions and words; with `picture`, tokens are patches."""
    return [
        {
            "token": visible_label_text(label.token),
            "side": label.side,
            "position": label.position,
            "special": _is_special_token(label, words, picture),
            "word": words.get(label.side, {}).get(label.position),
        }
        for label in given
    ]


def _is_special_token(label: Label, words: Words, picture: bool) -> bool:
    """True for a token that stands for no text: in an encoder, one without a word id.

    Decoders are judged by spelling, because generated tokens have no word ids.
    """
    if picture:
        return PATCH.fullmatch(label.token) is None
    known = words.get(label.side)
    if known is not None and label.side == "encoder":
        return known.get(label.position) is None
    return SPECIAL.fullmatch(label.token) is not None


def round_document_numbers(tensor: Tensor, digits: int = DIGITS) -> Any:
    """Nested lists rounded to `digits` significant digits; values that are not finite become None."""
    values = tensor.detach().cpu().double().numpy()
    finite = np.isfinite(values)
    sizes = np.log10(np.abs(values), out=np.zeros_like(values), where=finite & (values != 0))
    factors = 10.0 ** np.clip(digits - 1 - np.floor(sizes), -300, 300)
    with np.errstate(all="ignore"):
        rounded = np.rint(values * factors) / factors
    return rounded.tolist() if bool(np.isfinite(rounded).all()) else _replace_nonfinite(rounded.tolist())


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, list):
        return [_replace_nonfinite(entry) for entry in value]
    return value if math.isfinite(value) else None


def _array_to_numpy(maps: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = maps.detach().cpu().numpy()
    return array


def _round_up(value: float) -> float:
    """`value` rounded up to two significant digits."""
    if value == 0:
        return 0.0
    unit: float = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")
