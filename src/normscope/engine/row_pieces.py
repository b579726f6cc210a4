"""One input whose analysis does not fit into memory as a whole: its rows are computed in pieces and joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from normscope.analysis import Analysis
from normscope.arguments import check_indices
from normscope.engine.request import Request, format_bytes, is_out_of_memory, map_bytes
from normscope.engine.run import Workspace, batch_cost, recompute_vectors, run_batch
from normscope.errors import NormscopeError
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.result_base import HeadMaps, Measured, Receive


class OverBudgetError(NormscopeError):
    """An input needs more memory than there is, even in pieces."""


def run_in_row_pieces(
    loaded: LoadedModel, item: Item, requests: Sequence[Request], workspace: Workspace, budget: int
) -> Analysis:
    """The analysis of one input, computed by pieces of its rows: as few as the budget allows, and more if memory runs
    out nevertheless. The joined maps and a copy count too.

    Raises:
        OverBudgetError: If single rows need too much, or the model is an encoder-decoder.
    """
    needed = batch_cost(loaded, [item], requests).memory
    if len(requests) == 1 and not loaded.two_sided:
        (request,) = requests
        rows = _requested_rows(item, request)
        length = len(item.sides[request.stack.side].names)
        whole = map_bytes([length], replace(request, rows=rows), loaded.dtype)
        for size in _piece_sizes(len(rows)):
            chunks = [replace(request, rows=rows[n : n + size]) for n in range(0, len(rows), size)]
            needed = 2 * whole + batch_cost(loaded, [item], chunks[:1]).memory
            if needed > budget:
                continue
            try:
                pieces = [run_batch(loaded, [item], [chunk], workspace)[0] for chunk in chunks]
                return join_analysis_rows(
                    [piece for piece in pieces if isinstance(piece, Analysis)], loaded, item, request
                )
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    raise OverBudgetError(
        f"It needs about {format_bytes(needed)} of memory even in the smallest pieces, and the budget is "
        f"{format_bytes(budget)}."
    )


def join_analysis_rows(pieces: Sequence[Analysis], loaded: LoadedModel, item: Item, request: Request) -> Analysis:
    """One analysis from analyses of its rows, in order."""
    first = pieces[0]
    rows = tuple(label for piece in pieces for label in piece.rows)
    heads = {scope: torch.cat([piece.heads[scope] for piece in pieces], dim=2) for scope in first.heads}
    found = [text for piece in pieces for text in piece.info.get("warnings", ())]

    def recompute(
        scopes: Sequence[str], layers: Sequence[int], blocks: Sequence[Sequence[int]], receive: Receive
    ) -> None:
        chosen = [[rows[n].position for n in check_indices("row", block, len(rows))] for block in blocks]
        recompute_vectors(loaded, item, request, scopes, layers, chosen, receive)

    return replace(
        first,
        measured={scope: _join_measured([piece.measured[scope] for piece in pieces]) for scope in first.measured},
        rows=rows,
        heads=HeadMaps(heads, first.heads.aliases),
        info=dict(first.info) | ({"warnings": list(dict.fromkeys(found))} if found else {}),
        _recompute=recompute,
    )


def _join_measured(pieces: Sequence[Measured]) -> Measured:
    mixing = [piece.mixing for piece in pieces if piece.mixing is not None]
    return Measured(
        torch.cat([piece.map for piece in pieces], dim=1),
        torch.cat(mixing, dim=1) if mixing else None,
        torch.cat([piece.remainder for piece in pieces], dim=1),
        torch.stack([piece.completeness for piece in pieces]).amax(0),
    )


def _requested_rows(item: Item, request: Request) -> tuple[int, ...]:
    if request.rows is not None:
        return request.rows
    return tuple(range(int(item.sides[request.stack.side].real.sum())))


def _piece_sizes(rows: int) -> Iterator[int]:
    """Half of the rows, a quarter, and so on down to one row."""
    size = rows
    while size > 1:
        size = -(-size // 2)
        yield size
