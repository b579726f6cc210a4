"""One batch in one stack: each layer is decomposed as soon as it is recorded, and its maps are collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor, nn

from normscope.arguments import check_indices
from normscope.decompose.gram import RowStatistics, ScopeMaps, completeness_error, mixing_ratio
from normscope.decompose.layer import HeadFactors, ItemSpan, measure_layer
from normscope.decompose.source_rows import measure_layer_by_source
from normscope.decompose.state import Scratch, set_own_cells
from normscope.engine.by_source import source_columns
from normscope.engine.request import GROUP_TOKENS, Request
from normscope.errors import NormscopeError
from normscope.inputs.encode import real_tokens
from normscope.inputs.item import Item, Tokens
from normscope.models.scopes import scope_keeps_own_token
from normscope.result_base import Measured
from normscope.tracing.build import RecordRequest
from normscope.tracing.recorded import select_items
from normscope.tracing.records import AttentionRecord, LayerRecord


class BatchResults:
    """The padded results of a batch: (items, scopes, layers, ...), or (items, layers, heads, ...)."""

    def __init__(
        self,
        request: Request,
        items: int,
        length: int,
        encoder: int,
        dtype: torch.dtype,
        virtual: int = 0,
        sources: int | None = None,
    ) -> None:
        """Columns are `length` own tokens, which are also the rows, then `virtual` ones without rows, then `encoder`
        ones if the layers have cross-attention; or `sources`."""
        rows = length if request.rows is None else len(request.rows)
        length, encoder = (length + virtual, encoder) if sources is None else (sources, 0)
        self.length = length
        self.by_source = sources is not None
        self.kinds = 2 if encoder else 1  # of columns: own, encoder's
        layers, heads = len(request.layers), len(request.options.heads)
        first = next(step for step in request.steps if step.alias == "attention")
        self.weights, self.attention = str(first.weights), str(first.norms)
        self.scopes = request.scopes
        # Scopes that are reduced together are adjacent: weights (cross-attention last), then norms in layer order.
        order = sorted(request.scopes, key=lambda scope: (not scope.endswith("-W"), scope == "XATTN-W"))
        self.place = {scope: n for n, scope in enumerate(order)}

        def space(*shape: int) -> Tensor:
            """Filled with NaN, so that a cell that is never written cannot pass for a result."""
            return torch.full((items, *shape), nan, dtype=dtype)

        scopes = len(order)
        self.maps = space(scopes, layers, rows, length + encoder)
        self.statistics = space(6, scopes, layers, rows)
        own = self.weights, self.attention
        kinds = (*own, "XATTN-W", "XATTN-N") if encoder else own
        self.heads = {kind: space(layers, heads, rows, length + encoder) for kind in kinds if heads}
        self.value_norms = space(layers, heads, length + encoder) if heads else None

    def add_layer(
        self,
        layer: int,
        items: slice,
        found: Sequence[ScopeMaps],
        heads: Sequence[HeadFactors],
        positions: Tensor | None,
    ) -> None:
        """Store one layer of some items."""
        positions = None if positions is None else positions.cpu()
        for reduced in found:
            first = self.place[reduced.scopes[0]]
            scopes = slice(first, first + len(reduced.scopes))
            self.statistics[items, :, scopes, layer].copy_(reduced.statistics.permute(2, 0, 1, 3))
            for n, pieces in enumerate(reduced.maps, first):
                if len({piece.cross for piece in pieces}) < self.kinds:  # no contribution from the other columns
                    self.maps[items, n, layer] = 0
                for piece in pieces:
                    columns = slice(self.length, None) if piece.cross else slice(0, self.length)
                    into, cells, scale = (
                        self.maps[items, n, layer, :, columns],
                        piece.cells.transpose(1, 2),
                        piece.scale,
                    )
                    scale = scale[..., None] if isinstance(scale, Tensor) else scale
                    if scale is None or cells.device != into.device:
                        into.copy_(cells if scale is None else cells * scale)
                    else:
                        torch.mul(cells, scale, out=into)
        for found_heads in heads:
            assert self.value_norms is not None
            cross = found_heads.cross
            columns = slice(self.length, None) if cross else slice(0, self.length)
            by_weight, by_norm = ("XATTN-W", "XATTN-N") if cross else (self.weights, self.attention)
            if self.kinds > 1:
                self.heads[by_weight][items, layer] = self.heads[by_norm][items, layer] = 0
            weights = self.heads[by_weight][items, layer][..., columns]
            weights.copy_(found_heads.weights.permute(0, 2, 3, 1))
            if not cross:
                set_own_cells(weights.transpose(2, 3), positions, found_heads.own.transpose(1, 2))
            norms = self.value_norms[items, layer][..., columns].copy_(found_heads.value_norms.transpose(1, 2))
            torch.mul(weights, norms[:, :, None], out=self.heads[by_norm][items, layer][..., columns])

    def finish_layers(self, layers: slice, positions: Tensor | None) -> Tensor:
        """Write the own cells of some layers into the maps. Returns mixing ratio, remainder and completeness of every
        row, (items, 3, scopes, layers, rows)."""
        statistics = RowStatistics(*self.statistics[:, :, :, layers].unbind(1))
        if not self.by_source:  # the own tokens are part of their sources
            positions = None if positions is None else positions.cpu()
            set_own_cells(self.maps[:, :, layers, :, : self.length].transpose(3, 4), positions, statistics.own)
        return torch.stack(
            [mixing_ratio(statistics.others, statistics.own), statistics.remainder, completeness_error(statistics)],
            dim=1,
        )

    def item_results(
        self, number: int, finished: Tensor, rows: slice | Tensor, columns: slice | Tensor, layers: slice
    ) -> tuple[dict[str, Measured], dict[str, Tensor], Tensor | None]:
        """Some layers of one item without padding: measured scopes, head-level maps, value norms."""
        maps = self.maps[number, :, layers][:, :, rows][..., columns].contiguous()
        mixing, remainder, error = finished[number][..., rows].contiguous()
        worst = error.amax(-1).to(torch.float64)
        kept = (
            ratio if scope_keeps_own_token(scope) else None for scope, ratio in zip(self.place, mixing, strict=True)
        )
        each = (Measured(*one) for one in zip(maps, kept, remainder, worst, strict=True))
        measured = dict(zip(self.place, each, strict=True))
        heads = {scope: of[number, layers][:, :, rows][..., columns].contiguous() for scope, of in self.heads.items()}
        norms = None if self.value_norms is None else self.value_norms[number, layers][..., columns].contiguous()
        return {scope: measured[scope] for scope in self.scopes}, heads, norms


class BatchRun:
    """The run of one request on a batch: what to record, and the results of its stack."""

    def __init__(
        self,
        request: Request,
        items: Sequence[Item],
        device: torch.device,
        dtype: torch.dtype,
        scratch: Scratch,
        tick: Callable[[], None],
        calls: Sequence[nn.Module],
    ) -> None:
        self.request, self.items = request, items
        side = request.stack.side
        self.longest = max(len(item.sides[side].names) for item in items)
        self.real_positions = [real_positions(item, side, request.rows, self.longest) for item in items]
        self.positions = None
        if request.rows is not None:
            self.positions = torch.stack([real.positions for real in self.real_positions]).to(device)
        encoder = max(len(item.sides["encoder"].names) for item in items) if request.crosses else 0
        virtual = len(items[0].virtual)
        self.sources = [source_columns(item, request, items, device) for item in items if item.sources is not None]
        count = max((one.count for one in self.sources), default=None)
        self.results = BatchResults(request, len(items), self.longest, encoder, dtype, virtual, count)
        self.spans = [item_span(item, request, g) for item, g in zip(items, self.real_positions, strict=True)]
        self.scratch, self.tick = scratch, tick
        self.warnings: list[str] = []  # of all results
        self.records = RecordRequest(
            request.stack,
            request.steps,
            request.layers,
            self._on_layer,
            real_tokens(items, side, device),
            request.options.value_bias == "remainder",
            calls,
            virtual=virtual,
            positions=self.positions,
        )

    def _on_layer(self, record: LayerRecord) -> None:
        request, group = self.request, max(1, GROUP_TOKENS // self.longest)
        layer = request.layers.index(record.index)
        attention = next(part for part in record.parts if isinstance(part, AttentionRecord))
        if request.options.heads and max(request.options.heads) >= attention.weights.shape[1]:
            raise NormscopeError(f"Layer {record.index} (counted from 0) has only {attention.weights.shape[1]} heads.")
        with torch.inference_mode():  # for many small operations cheaper than no_grad, which is already active
            for start in range(0, len(self.items), group):
                some = slice(start, start + group)
                rows = None if self.positions is None else self.positions[some]
                part = record if len(self.items) <= group else select_items(record, some)
                found, heads = self._measure_group(part, some, rows)
                self.results.add_layer(layer, some, found, heads, rows)
        self.tick()

    def _measure_group(
        self, part: LayerRecord, some: slice, rows: Tensor | None
    ) -> tuple[list[ScopeMaps], list[HeadFactors]]:
        """One layer of some items."""
        request = self.request
        how = (rows, request.options, self.scratch)
        if not self.sources:
            return measure_layer(part, request.steps, request.scopes, self.spans[some], *how)
        columns = self.sources[some]
        return measure_layer_by_source(part, request.steps, request.scopes, self.spans[some], columns, *how), []

    def columns(self, number: int) -> slice | Tensor:
        """The real columns of an item within the padded columns of the batch, own columns before the encoder's."""
        if self.sources:
            return slice(0, self.sources[number].count)
        own = self.real_positions[number]
        if not self.request.crosses:
            return own.columns
        return torch.cat([own.real, self.longest + self.items[number].sides["encoder"].real.nonzero().flatten()])


@dataclass(frozen=True)
class RealPositions:
    """The positions of the real tokens of an item in a padded batch."""

    real: Tensor  # positions that are not masked
    columns: slice | Tensor
    rows: slice | Tensor
    positions: Tensor  # of the rows


def real_positions(item: Item, side: str, rows: Sequence[int] | None, longest: int) -> RealPositions:
    """The real positions of an item on one side. `longest` is the length of the longest item of the batch; virtual
    columns follow after it."""
    tokens = item.sides[side]
    real = tokens.real.nonzero().flatten()
    span = columns = _real_span(tokens)
    if item.virtual:
        columns = torch.cat([real, longest + torch.arange(len(item.virtual))])
    if rows is None:
        return RealPositions(real, columns, span, real)
    chosen = check_indices("row", rows, len(real))
    return RealPositions(real, columns, slice(None), real[torch.tensor(chosen)])


def _real_span(tokens: Tokens) -> slice | Tensor:
    return slice(0, len(tokens.names)) if bool(tokens.real.all()) else tokens.real.nonzero().flatten()


def item_span(item: Item, request: Request, real: RealPositions) -> ItemSpan:
    lengths = (
        len(item.sides[request.stack.side].names) + len(item.virtual),
        len(item.sides["encoder"].names) if request.crosses else 0,
    )
    encoder = _real_span(item.sides["encoder"]) if request.crosses else None
    return ItemSpan(real.columns, real.rows, encoder, lengths)
