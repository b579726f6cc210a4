"""A result of the library against the judge's: every map, remainder, mixing ratio and head."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normscope import Analysis
from tests.attacks.judge import JudgedLayer, Part, Verdict
from tests.helpers.oracle_parts import OracleLayer, first_residual, head_maps, widen


class Difference(Exception):  # noqa: N818
    """A difference between a result and the judge's; `size` relative to the row's largest cell."""

    def __init__(self, where: str, size: float = float("inf")) -> None:
        super().__init__(f"{where} ({size:.1e})" if size < float("inf") else where)
        self.size = size


def sides_of(result: Any) -> dict[str, Analysis]:
    return {result.info["side"]: result} if isinstance(result, Analysis) else dict(result.sides)


def differences(
    result: Any,
    verdict: Verdict,
    tolerance: float,
    part: Part = Part(),  # noqa: B008  (it is frozen)
    heads: Sequence[int] | None = None,
) -> None:
    """Raise the first difference, or the largest one between numbers."""
    layers, rows, scopes = part
    found = sides_of(result)
    expected = {side: wanted(len(some), layers) for side, some in verdict.layers.items()}
    expected = {side: some for side, some in expected.items() if some}
    if set(found) != set(expected):
        raise Difference(f"sides {sorted(found)}, expected {sorted(expected)}")
    worst: list[tuple[float, str]] = [(0.0, "")]
    last = list(verdict.layers)[-1]
    for side, numbers in expected.items():
        analysis = found[side]
        if list(analysis.layers) != numbers:
            raise Difference(f"{side} has the layers {list(analysis.layers)}, but {numbers} were called")
        for place, number in enumerate(numbers):
            layer = verdict.layers[side][number]
            chosen = rows if side == last else None
            one_layer(analysis, place, layer, chosen, scopes, heads, f"{side} {number}", worst)
    size, where = max(worst)
    if size > tolerance:
        raise Difference(where, size)


def places(labels: Sequence[Any]) -> list[int]:
    """The indices of the labels in the judge's order: virtual tokens first, then the others."""
    return sorted(range(len(labels)), key=lambda n: labels[n].side != "prompt")


def wanted(depth: int, layers: Sequence[int] | None) -> list[int]:
    return list(range(depth)) if layers is None else sorted({n for n in layers if n < depth})


def one_layer(
    analysis: Analysis,
    place: int,
    judged: JudgedLayer,
    rows: Sequence[int] | None,
    scopes: Sequence[str] | None,
    wanted_heads: Sequence[int] | None,
    name: str,
    worst: list[tuple[float, str]],
) -> None:
    own, prefix = judged.own, judged.prefix
    assert own is not None
    maps = maps_of(own, prefix)
    if scopes is not None:
        maps = {scope: cells for scope, cells in maps.items() if scope in scopes}
    n = next(iter(maps.values())).shape[0]
    chosen = list(range(n)) if rows is None else [row % n for row in rows]
    if analysis.scopes != tuple(maps):
        raise Difference(f"scopes {analysis.scopes}, expected {tuple(maps)}")
    across, down = places(analysis.columns), places(analysis.rows)
    for scope, cells in maps.items():
        cells = cells[chosen]
        given = analysis[scope][place].double()[down][:, across]
        if given.shape != cells.shape:
            raise Difference(f"{name} {scope} has the shape {tuple(given.shape)}, expected {tuple(cells.shape)}")
        size = cells.amax(-1, keepdim=True).clamp_min(1e-30)
        note(worst, (given - cells).abs() / size, f"{name} {scope}")
        bias = own.bias[scope].norm(dim=-1)[chosen] if scope in own.bias else torch.zeros(len(chosen)).double()
        rest = analysis.remainder(scope)[place].double()[down]
        note(worst, (rest - bias).abs() / torch.maximum(size[:, 0], bias), f"{name} remainder of {scope}")
        if not scope.startswith("XATTN"):
            ratio, total = mixing(own, scope, cells, chosen, prefix)
            off = (analysis.mixing_ratio(scope)[place].double()[down] - ratio).abs() / (1 + size[:, 0] / total)
            note(worst, off[total > 1e-6 * size[:, 0]], f"{name} mixing ratio of {scope}")
    if analysis.heads:
        heads = head_maps(own)
        if wanted_heads is not None:
            heads = {scope: cells[list(wanted_heads)] for scope, cells in heads.items()}
        if set(analysis.heads) != set(heads):
            raise Difference(f"{name} has heads of {sorted(analysis.heads)}, expected {sorted(heads)}")
        for scope, cells in heads.items():
            cells = cells[:, chosen]
            given = analysis.heads[scope][place].double()[:, down][:, :, across]
            if given.shape != cells.shape:
                raise Difference(f"{name} heads of {scope}: {tuple(given.shape)}, expected {tuple(cells.shape)}")
            size = cells.amax(-1, keepdim=True).clamp_min(1e-30)
            note(worst, (given - cells).abs() / size, f"{name} heads of {scope}")


def note(worst: list[tuple[float, str]], errors: Tensor, where: str) -> None:
    if errors.numel():
        size = float(errors.max())
        worst.append((size if size == size else float("inf"), where))


def maps_of(layer: OracleLayer, prefix: int) -> dict[str, Tensor]:
    """As `oracle_parts.maps`; with virtual keys the own token is that many columns further."""
    n, columns, _ = next(iter(layer.vectors.values())).shape
    average = widen(layer.weights.mean(dim=0), None, columns)
    eye = torch.zeros(n, columns, dtype=torch.float64)
    eye[torch.arange(n), prefix + torch.arange(n)] = 1
    result = {"ATTN-W": average}
    for scope, vectors in layer.vectors.items():
        if scope == first_residual(layer):
            result[f"{scope[:-2]}-W"] = 0.5 * average + 0.5 * eye
        if scope == "XATTN-N":
            assert layer.cross_weights is not None
            result["XATTN-W"] = widen(None, layer.cross_weights.mean(dim=0), columns)
        result[scope] = vectors.norm(dim=-1)
    return result


def mixing(layer: OracleLayer, scope: str, cells: Tensor, rows: Sequence[int], prefix: int) -> tuple[Tensor, Tensor]:
    """||sum of the others|| / (||sum of the others|| + ||own||), and the denominator."""
    vectors = layer.vectors[scope][list(rows)] if scope in layer.vectors else cells[:, :, None]
    at = torch.arange(len(vectors)), prefix + torch.tensor(list(rows))
    own = vectors[at]
    others = (vectors.sum(1) - own).norm(dim=-1)
    total = (others + own.norm(dim=-1)).clamp_min(1e-30)
    return others / total, total
