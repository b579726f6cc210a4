"""Results of a batch, filled layer by layer and handed out item by item."""

from __future__ import annotations

from collections.abc import Mapping
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
    """The maps of a batch, rows and columns padded, (items, layers, rows, columns) for each scope."""

    def __init__(self, request: Request, items: int, length: int, dtype: torch.dtype) -> None:
        rows = length if request.rows is None else len(request.rows)
        layers, heads = len(request.layers), len(request.options.heads)
        self.attention = next(str(step.norms) for step in request.steps if step.alias == "attention")

        def space(*shape: int) -> Tensor:
            return torch.empty(items, layers, *shape, dtype=dtype)

        # Completeness is kept for each row here, and becomes one number for each layer in `item`.
        self.scopes = {s: Measured(space(rows, length), space(rows), space(rows), space(rows)) for s in request.scopes}
        self.heads = {s: space(heads, rows, length) for s in ("ATTN-W", self.attention) if heads}
        self.value_norms = space(heads, length) if heads else None

    def put(
        self, layer: int, items: slice, found: Mapping[str, Reduced], heads: HeadMaps | None, positions: Tensor | None
    ) -> None:
        """One layer of some items."""
        for scope, reduced in found.items():
            into = self.scopes[scope]
            cells = into.map[items, layer]
            cells.copy_(reduced.map.transpose(1, 2))
            if reduced.scale is not None:
                cells *= reduced.scale.to(cells.device)[..., None]
            set_own_cells(cells.transpose(1, 2), _cpu(positions), reduced.own)
            into.mixing[items, layer] = reduced.mixing.to(cells.device)
            into.remainder[items, layer] = reduced.remainder.to(cells.device).expand_as(reduced.own)
            into.completeness[items, layer] = reduced.error.to(cells.device)
        if heads is not None and self.value_norms is not None:
            weights = self.heads["ATTN-W"][items, layer]
            weights.copy_(heads.weights.permute(0, 2, 3, 1))
            set_own_cells(weights.transpose(2, 3), _cpu(positions), heads.own.transpose(1, 2))
            norms = self.value_norms[items, layer].copy_(heads.value_norms.transpose(1, 2))
            torch.mul(weights, norms[:, :, None], out=self.heads[self.attention][items, layer])

    def item(
        self, number: int, rows: slice | Tensor, columns: slice | Tensor
    ) -> tuple[dict[str, Measured], dict[str, Tensor], Tensor | None]:
        """One item without its padding: scopes, head-level maps, ||f||."""
        measured = {}
        for scope, found in self.scopes.items():
            measured[scope] = Measured(
                found.map[number][:, rows][:, :, columns].contiguous(),
                found.mixing[number][:, rows].contiguous(),
                found.remainder[number][:, rows].contiguous(),
                found.completeness[number][:, rows].amax(-1).to(torch.float64),
            )
        heads = {scope: found[number][:, :, rows][..., columns].contiguous() for scope, found in self.heads.items()}
        norms = None if self.value_norms is None else self.value_norms[number][..., columns].contiguous()
        return measured, heads, norms


def _cpu(positions: Tensor | None) -> Tensor | None:
    return None if positions is None else positions.cpu()
