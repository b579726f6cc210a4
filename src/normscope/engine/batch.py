"""One side's share of a run over a batch: which tokens are real, what is recorded, and where the results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.analysis import Label
from normscope.decompose.layer import Place, measure_layer
from normscope.decompose.state import Scratch
from normscope.engine.collect import Collected
from normscope.engine.estimate import GROUP_TOKENS
from normscope.engine.request import Request, within
from normscope.errors import NormscopeError
from normscope.inputs.item import Item, Tokens, real_tokens
from normscope.tracing.build import RecordRequest
from normscope.tracing.records import AttentionRecord, LayerRecord, select_items, select_rows


class BatchRun:
    """One stack's share of a run over a batch."""

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
        self.longest = max(len(item.sides[side]) for item in items)
        self.geometry = [geometry_of(item, side, request.rows, self.longest) for item in items]
        self.positions = None
        if request.rows is not None:
            self.positions = torch.stack([geometry.positions for geometry in self.geometry]).to(device)
        encoder = max(len(item.sides["encoder"]) for item in items) if request.crosses else 0
        virtual = len(items[0].virtual)
        self.collected = Collected(request, len(items), self.longest, encoder, dtype, virtual)
        self.places = [place_of(item, request, g) for item, g in zip(items, self.geometry, strict=True)]
        self.scratch, self.tick = scratch, tick
        self.records = RecordRequest(
            request.stack,
            request.steps,
            request.layers,
            self._on_layer,
            real_tokens(items, side, device),
            request.options.value_bias == "remainder",
            calls,
            virtual=virtual,
        )

    def _on_layer(self, record: LayerRecord) -> None:
        request, group = self.request, max(1, GROUP_TOKENS // self.longest)
        layer = request.layers.index(record.index)
        attention = next(part for part in record.parts if isinstance(part, AttentionRecord))
        if request.options.heads and max(request.options.heads) >= attention.weights.shape[1]:
            raise NormscopeError(f"Layer {record.index} (counted from 0) has {attention.weights.shape[1]} heads only.")
        with torch.inference_mode():  # cheaper than no_grad, which holds already, for many small operations
            for start in range(0, len(self.items), group):
                some = slice(start, start + group)
                rows = None if self.positions is None else self.positions[some]
                part = select_rows(select_items(record, some), rows)
                found, heads = measure_layer(
                    part, request.steps, request.scopes, self.places[some], rows, request.options, self.scratch
                )
                self.collected.put(layer, some, found, heads, rows)
        self.tick()

    def columns(self, number: int) -> slice | Tensor:
        """The real columns of an item among those of the batch, the encoder's after the own."""
        own = self.geometry[number].columns
        if not self.request.crosses:
            return own
        return torch.cat(
            [self.geometry[number].real, self.longest + self.items[number].sides["encoder"].real.nonzero().flatten()]
        )


@dataclass(frozen=True)
class Geometry:
    """Where the real tokens of an item are."""

    real: Tensor  # positions that are not masked
    columns: slice | Tensor
    rows: slice | Tensor
    positions: Tensor  # of the rows


def geometry_of(item: Item, side: str, rows: Sequence[int] | None, longest: int) -> Geometry:
    """`longest`: the tokens of the longest item of the batch, behind which the virtual columns stand."""
    tokens = item.sides[side]
    real = tokens.real.nonzero().flatten()
    span = columns = _span(tokens)
    if item.virtual:
        columns = torch.cat([real, longest + torch.arange(len(item.virtual))])
    if rows is None:
        return Geometry(real, columns, span, real)
    chosen = within("row", rows, len(real))
    return Geometry(real, columns, slice(None), real[torch.tensor(chosen)])


def _span(tokens: Tokens) -> slice | Tensor:
    return slice(0, len(tokens)) if bool(tokens.real.all()) else tokens.real.nonzero().flatten()


def place_of(item: Item, request: Request, geometry: Geometry) -> Place:
    lengths = (
        len(item.sides[request.stack.side]) + len(item.virtual),
        len(item.sides["encoder"]) if request.crosses else 0,
    )
    encoder = _span(item.sides["encoder"]) if request.crosses else None
    return Place(geometry.columns, geometry.rows, encoder, lengths)


def labels_of(item: Item, side: str) -> list[Label]:
    return [Label(token, side, n) for n, token in enumerate(item.sides[side].names)]
