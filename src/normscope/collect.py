"""Results of a batch, filled layer by layer and handed out item by item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.analysis import Measured
from normscope.decompose.attention import set_own_cells
from normscope.decompose.factored import Reduced
from normscope.decompose.walk import HeadMaps, Options
from normscope.scopes import Step


@dataclass(frozen=True)
class Request:
    """What was asked for, checked against the model."""

    scopes: tuple[str, ...]
    layers: tuple[int, ...]
    rows: tuple[int, ...] | None
    options: Options
    steps: tuple[Step, ...]  # as far as the scopes reach


class Collected:
    """The results of a batch, rows and columns padded: (items, scopes, layers, ...), or (items, layers, heads, ...)."""

    def __init__(self, request: Request, items: int, length: int, dtype: torch.dtype) -> None:
        rows = length if request.rows is None else len(request.rows)
        layers, heads = len(request.layers), len(request.options.heads)
        self.attention = next(str(step.norms) for step in request.steps if step.alias == "attention")
        self.scopes = request.scopes
        # Scopes that are found together stand together: weights, then norms in the layer's order.
        order = sorted(request.scopes, key=lambda scope: not scope.endswith("-W"))
        self.place = {scope: n for n, scope in enumerate(order)}

        def space(*shape: int) -> Tensor:
            return torch.empty(items, *shape, dtype=dtype)

        scopes = len(order)
        self.maps = space(scopes, layers, rows, length)
        self.mixing, self.remainder, self.error = (space(scopes, layers, rows) for _ in range(3))
        self.heads = {s: space(layers, heads, rows, length) for s in ("ATTN-W", self.attention) if heads}
        self.value_norms = space(layers, heads, length) if heads else None

    def put(
        self, layer: int, items: slice, found: Sequence[Reduced], heads: HeadMaps | None, positions: Tensor | None
    ) -> None:
        """One layer of some items."""
        positions = None if positions is None else positions.cpu()
        for reduced in found:
            first = self.place[reduced.scopes[0]]
            where = (items, slice(first, first + len(reduced.scopes)), layer)
            maps = self.maps[where]
            for n, (cells, scale) in enumerate(zip(reduced.maps, reduced.scales, strict=True)):
                into = maps[:, n].copy_(cells.transpose(1, 2))
                if scale is not None:
                    into *= scale.to(into.device)[..., None] if isinstance(scale, Tensor) else scale
            set_own_cells(maps.transpose(2, 3), positions, reduced.own.transpose(0, 1))
            for into, values in (
                (self.mixing, reduced.mixing),
                (self.remainder, reduced.remainder),
                (self.error, reduced.error),
            ):
                into[where].copy_(values.transpose(0, 1))
        if heads is not None and self.value_norms is not None:
            weights = self.heads["ATTN-W"][items, layer]
            weights.copy_(heads.weights.permute(0, 2, 3, 1))
            set_own_cells(weights.transpose(2, 3), positions, heads.own.transpose(1, 2))
            norms = self.value_norms[items, layer].copy_(heads.value_norms.transpose(1, 2))
            torch.mul(weights, norms[:, :, None], out=self.heads[self.attention][items, layer])

    def item(
        self, number: int, rows: slice | Tensor, columns: slice | Tensor
    ) -> tuple[dict[str, Measured], dict[str, Tensor], Tensor | None]:
        """One item without its padding: scopes, head-level maps, ||f||."""
        measured = {}
        for scope in self.scopes:
            at = (number, self.place[scope])
            measured[scope] = Measured(
                self.maps[at][:, rows][:, :, columns].contiguous(),
                self.mixing[at][:, rows].contiguous(),
                self.remainder[at][:, rows].contiguous(),
                self.error[at][:, rows].amax(-1).to(torch.float64),
            )
        heads = {scope: found[number][:, :, rows][..., columns].contiguous() for scope, found in self.heads.items()}
        norms = None if self.value_norms is None else self.value_norms[number][..., columns].contiguous()
        return measured, heads, norms
