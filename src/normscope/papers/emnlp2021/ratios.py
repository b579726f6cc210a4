"""Mixing ratios of a corpus run, in percent, and how they are averaged (EMNLP 2021, sections 3 to 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normscope.measures.similarity import correlation, spearman
from normscope.models.scopes import aliases_of, names_of
from normscope.papers.report import known

if TYPE_CHECKING:
    import polars

    from normscope.analyzer import Analyzer
    from normscope.corpus.store import Run

DIGITS = 10
TYPES = ("first", "separator", "mask", "other", "overall")


def methods(lens: Analyzer) -> tuple[str, ...]:
    """The scopes up to the end of the attention block: of a post-LN model ATTN-W, ATTN-N, ATTNRES-W, ATTNRES-N and
    ATTNRESLN-N, as in the paper. A pre-LN model has no norm after its residual, a parallel layer no ATTNRES-W."""
    names = names_of(lens.stacks[0].blocks)
    return names[: names.index(scope(lens, "attention-block")) + 1]


def scope(lens: Analyzer, alias: str) -> str:
    """The model's own name of a scope."""
    return aliases_of(lens.stacks[0].blocks)[alias]


def residual_weights(lens: Analyzer) -> str | None:
    """ATTNRES-W under the model's own name: the weights with half a residual; None in a parallel layer."""
    return next((name for name in methods(lens)[1:] if name.endswith("-W")), None)


def ratios(lens: Analyzer, run: Run) -> polars.LazyFrame:
    """id, scope, layer (from 1), position, token, type, percent: every mixing ratio of the run, of an encoder-decoder
    those of its encoder. Punctuation is one of the other tokens here."""
    import polars as pl

    kind = pl.when(pl.col("category") == "punctuation").then(pl.lit("other")).otherwise(pl.col("category"))
    return (
        run.scan("mixing")
        .filter((pl.col("side") == lens.stacks[0].side) & pl.col("scope").is_in(list(methods(lens))))
        .select(
            "id",
            "scope",
            (pl.col("layer") + 1).alias("layer"),
            "position",
            "token",
            kind.alias("type"),
            (100 * pl.col("mixing").cast(pl.Float64)).alias("percent"),
        )
    )


def summary(frame: polars.LazyFrame, average: str) -> dict[str, dict[str, float]]:
    """scope -> mean, max, min over all sequences, layers and tokens (Table 2); the mean is over all values (micro), or
    over the means of the sequences (macro)."""
    import polars as pl

    value = pl.col("percent")
    ends = {
        name: (highest, lowest)
        for name, highest, lowest in grouped(
            frame, ["scope"], value.max().alias("max"), value.min().alias("min")
        ).rows()
    }
    if average == "macro":
        frame = frame.group_by("scope", "id").agg(value.mean())
    return {
        name: {"mean": mean, "max": ends[name][0], "min": ends[name][1]}
        for name, mean in grouped(frame, ["scope"], value.mean()).rows()
    }


def by_layer(frame: polars.LazyFrame, average: str) -> dict[str, dict[tuple[int, str], float]]:
    """scope -> (layer, type of token) -> mean (Fig. 3): over the means of the sequences that have such a token (macro),
    or over all tokens (micro)."""
    import polars as pl

    value, keys = pl.col("percent"), ["scope", "layer", "type"]
    found: dict[str, dict[tuple[int, str], float]] = {}
    for some in (frame, frame.with_columns(pl.lit("overall").alias("type"))):
        if average == "macro":
            some = some.group_by(*keys, "id").agg(value.mean())
        for name, layer, kind, mean in sorted(grouped(some, keys, value.mean()).rows()):
            found.setdefault(name, {})[layer, kind] = mean
    return found


def grouped(frame: polars.LazyFrame, keys: Sequence[str], *aggregates: polars.Expr) -> polars.DataFrame:
    """The last aggregation of a table, its numbers to ten digits. Threads add up in any order, so that the last of
    sixteen digits differ from one call to the next; the ratios themselves are of single precision."""
    from polars import selectors

    found: polars.DataFrame = frame.group_by(keys).agg(*aggregates).collect()
    return found.with_columns(selectors.float().round_sig_figs(DIGITS))


def overall(means: Mapping[tuple[int, str], float]) -> list[float]:
    """The mean over all tokens, layer by layer."""
    return [mean for (_, kind), mean in sorted(means.items()) if kind == "overall"]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's; None of fewer than three pairs, or where one side does not vary."""
    return _known(spearman, a, b)


def linear_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Pearson's; None of fewer than three pairs, or where one side does not vary."""
    return _known(correlation, a, b)


def _known(measure: Callable[[Tensor, Tensor], Tensor], a: Sequence[float], b: Sequence[float]) -> float | None:
    if len(a) < 3:
        return None
    found = float(measure(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)))
    return known(found)
