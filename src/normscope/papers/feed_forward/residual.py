"""How much a residual connection can change the ranks of a map (Table 1 of the preprint, RES1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from normscope.papers.feed_forward.maps import Values
from normscope.papers.feed_forward.shared import REFERENCE
from normscope.reports.report import Cell, Table

PUBLISHED = 0.41
PAPER_LENGTH = 122  # mean number of tokens of the paper's sequences
TEXT = (
    "On the published {published} for RES1: a residual connection changes n of the N = n^2 cells of a raw map, those "
    "on the diagonal. Without ties, Spearman's correlation of the maps before and after it is therefore at least "
    "1 - 6 [n (N - 1)^2 + (N - n) n^2] / (N (N^2 - 1)), which is {paper:.2f} for n = {length}, the mean length of the "
    "paper's sequences. This rules out {published} for raw maps of such sequences, the procedure that the paper "
    "describes. {here}\n\n"
    "If rows or columns are divided by their sums, all cells change, and no bound is proved. What was measured here: "
    "in single sequences and layers, {measured} (see the table on RES1). The published value is shown but not used; "
    "the 0.48 for ATTN may have the same unknown cause."
)


def residual_similarity_bound(tokens: int, cells: int | None = None) -> float:
    """A lower bound of Spearman's correlation of two maps without ties that differ in `tokens` of their cells only.

    The rank of a changed cell moves by at most N - 1, that of an unchanged one by at most n (the number of changed
    cells that pass it), so that ``sum d^2 <= n (N - 1)^2 + (N - n) n^2`` and
    ``rho >= 1 - 6 [n (N - 1)^2 + (N - n) n^2] / (N (N^2 - 1))``. `cells` (N) is n^2 unless given.
    """
    n, whole = tokens, tokens**2 if cells is None else cells
    if whole < 2:
        return -1.0
    return max(-1.0, 1 - 6 * (n * (whole - 1) ** 2 + (whole - n) * n**2) / (whole * (whole**2 - 1)))


def describe_residual(lengths: Sequence[int], readings: Mapping[str, Values]) -> str:
    """What is proved about the published number, and what was measured; (sequences, layers) by reading."""
    bounds = [residual_similarity_bound(length) for length in lengths]
    shortest, longest = min(lengths), max(lengths)
    here = (
        f"For the sequences here, of {shortest} to {longest} tokens, the bound lies between {min(bounds):.2f} and "
        f"{max(bounds):.2f} (median {np.median(bounds):.2f})."
    )
    lowest = {name: float(np.nanmin(values)) for name, values in readings.items()}
    measured = ", ".join(f"{name} maps reach down to {value:.2f}" for name, value in lowest.items())
    return TEXT.format(
        published=PUBLISHED,
        paper=residual_similarity_bound(PAPER_LENGTH),
        length=PAPER_LENGTH,
        here=here,
        measured=measured,
    )


def residual_readings_table(readings: Mapping[str, Values]) -> Table:
    """The distribution of the similarity before and after RES1 over sequences, under each reading."""
    rows: list[tuple[Cell, ...]] = []
    for name, values in readings.items():
        known = values[np.isfinite(values)]
        by_sequence = values[np.isfinite(values).all(1)].mean(1)
        lowest = float(by_sequence.min()) if len(by_sequence) else None
        quantiles = [float(np.quantile(known, level)) for level in (0, 0.05, 0.5)] if len(known) else [None] * 3
        below = 100 * float((known <= PUBLISHED).mean()) if len(known) else None
        rows.append((name, float(known.mean()) if len(known) else None, *quantiles, lowest, below))
    columns = ("mean", "lowest", "5 %", "median", "lowest sequence mean")
    return Table.of(
        "res1-readings",
        "Similarity of the maps before and after RES1 in single sequences",
        {"maps": "", **dict.fromkeys(columns, ".2f"), f"at most {PUBLISHED} (%)": ".2f"},
        rows,
        "Over all sequences and layers; lowest sequence mean: the lowest mean over the layers of one sequence. "
        f"Published: {PUBLISHED}, the mean over sequences and layers of {REFERENCE}.",
    )
