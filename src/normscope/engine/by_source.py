"""Sources of an item as the columns of its maps: which analyses can have them, and which columns they group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normscope.decompose.shapley.gate import Shapley
from normscope.decompose.source_rows import SourceColumns, group_columns
from normscope.engine.request import Request
from normscope.errors import NormscopeError
from normscope.inputs.item import Item
from normscope.inputs.marked_text import REST
from normscope.labels import Label

REST_ID = -1  # in `Sources.index`
MASKED = -2  # a token without a column


def check_requests_by_source(requests: Sequence[Request]) -> None:
    """Raise if a request asks for what maps by source do not have."""
    for request in requests:
        if request.options.heads:
            raise NormscopeError(
                "Head-level maps are weights times norms of single tokens, so there are none by source. Leave "
                "heads or sources out."
            )
        if isinstance(request.options.gate, Shapley):
            raise NormscopeError(
                "The players of Shapley values are tokens, so their sums are not the Shapley values of sources. Use "
                "gate='ig', or leave sources out."
            )


def source_columns(item: Item, request: Request, batch: Sequence[Item], device: torch.device) -> SourceColumns:
    """The columns of each source in the maps of a request, with the padding of the item's batch. Virtual columns follow
    after the own ones."""
    present = _present_sources(item, request)
    padded = []
    for ids, side in zip(_source_ids(item, request), (request.stack.side, "encoder"), strict=True):
        longest = max(len(one.sides[side].names) if len(ids) else 0 for one in batch)
        padded.append(torch.cat([ids, torch.full((longest - len(ids),), MASKED)]))
    padded[0] = torch.cat([padded[0], torch.full((len(item.virtual),), REST_ID)])
    groups = []
    for ids in padded:
        index = torch.full_like(ids, -1)
        for number, source in enumerate(present):
            index[ids == source] = number
        groups.append(group_columns(index.to(device), len(present)))
    return SourceColumns(groups[0], groups[1] if request.crosses else None)


def source_labels(item: Item, request: Request) -> tuple[Label, ...]:
    """The names of the columns: the sources that have tokens there, the rest last."""
    assert item.sources is not None
    names = (*item.sources.names, REST)  # the last is that of REST_ID
    return tuple(Label(names[source], "source", n) for n, source in enumerate(_present_sources(item, request)))


def _present_sources(item: Item, request: Request) -> list[int]:
    ids = torch.cat([*_source_ids(item, request), torch.full((len(item.virtual),), REST_ID)])
    found = set(ids.tolist()) - {MASKED}
    return [*sorted(found - {REST_ID}), *({REST_ID} & found)]


def _source_ids(item: Item, request: Request) -> tuple[Tensor, Tensor]:
    """The source of every own token, and of every token of the encoder if the layers read it."""
    assert item.sources is not None
    sides = (request.stack.side, *(["encoder"] if request.crosses else []))
    found = [torch.where(item.sides[side].real, item.sources.index[side], MASKED) for side in sides]
    return found[0], found[1] if request.crosses else found[0][:0]
