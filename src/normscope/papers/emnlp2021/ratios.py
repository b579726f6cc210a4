"""Mixing ratios of a corpus run in percent, and their averages (EMNLP 2021, sections 3 to 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl
from polars import selectors

from normscope.analyzer import Analyzer
from normscope.corpus.store import Run
from normscope.models.scopes import scope_aliases, scope_names
from normscope.papers.common import masked_run, scan_paper_side
from normscope.papers.study import Runs, Setting

DIGITS = 10
TYPES = ("first", "separator", "mask", "other", "overall")
ByLayer = Mapping[tuple[int, str], float]  # layer (from 1), type of token -> mean


def attention_block_scopes(lens: Analyzer) -> tuple[str, ...]:
    """The scopes up to the end of the attention block. In a post-LN model: ATTN-W, ATTN-N, ATTNRES-W, ATTNRES-N and
    ATTNRESLN-N, as in the paper; a pre-LN model has no norm after the residual, a parallel layer no ATTNRES-W."""
    names = scope_names(lens.loaded.stacks[0].blocks)
    return names[: names.index(scope_of_alias(lens, "attention-block")) + 1]


def scope_of_alias(lens: Analyzer, alias: str) -> str:
    """The model's name for a scope alias."""
    return scope_aliases(lens.loaded.stacks[0].blocks)[alias]


def weights_residual_scope(lens: Analyzer) -> str | None:
    """The model's name for ATTNRES-W (weights with the residual as half); None for parallel layers."""
    return next((name for name in attention_block_scopes(lens)[1:] if name.endswith("-W")), None)


def mixing_ratios_of_run(lens: Analyzer, run: Run) -> pl.LazyFrame:
    """All mixing ratios of a run (of the encoder, if there are two sides) with columns id, scope, layer (from 1),
    position, token, type and percent. Punctuation counts as "other"."""
    kind = pl.when(pl.col("category") == "punctuation").then(pl.lit("other")).otherwise(pl.col("category"))
    percent = (100 * pl.col("mixing").cast(pl.Float64)).alias("percent")
    return (
        scan_paper_side(run, "mixing", lens.loaded.stacks[0].side)
        .filter(pl.col("scope").is_in(list(attention_block_scopes(lens))))
        .select("id", "scope", pl.col("layer") + 1, "position", "token", kind.alias("type"), percent)
    )


def summarise_mixing(frame: pl.LazyFrame, average: str) -> dict[str, dict[str, float]]:
    """scope -> mean, max, min over all sequences, layers and tokens (Table 2). The mean is over all values (micro) or
    over the sequence means (macro)."""
    value = pl.col("percent")
    ends = aggregate_rounded(frame, ["scope"], value.max().alias("max"), value.min().alias("min")).rows()
    highest, lowest = ({row[0]: row[n] for row in ends} for n in (1, 2))
    if average == "macro":
        frame = frame.group_by("scope", "id").agg(value.mean())
    return {
        name: {"mean": mean, "max": highest[name], "min": lowest[name]}
        for name, mean in aggregate_rounded(frame, ["scope"], value.mean()).rows()
    }


def mean_mixing_by_layer(frame: pl.LazyFrame, average: str) -> dict[str, dict[tuple[int, str], float]]:
    """scope -> (layer, type of token) -> mean (Fig. 3), over the means of sequences with such a token (macro) or over
    all tokens (micro)."""
    value, keys = pl.col("percent"), ["scope", "layer", "type"]
    found: dict[str, dict[tuple[int, str], float]] = {}
    for some in (frame, frame.with_columns(pl.lit("overall").alias("type"))):
        if average == "macro":
            some = some.group_by(*keys, "id").agg(value.mean())
        for name, layer, kind, mean in sorted(aggregate_rounded(some, keys, value.mean()).rows()):
            found.setdefault(name, {})[layer, kind] = mean
    return found


def mixing_by_method(setting: Setting, runs: Runs, average: str = "") -> dict[str, dict[tuple[int, str], float]]:
    """`mean_mixing_by_layer` of the masked run, methods in the order of the scopes; the average is by default the
    reading `layer_average`."""
    frame = mixing_ratios_of_run(setting.lens, runs[masked_run(setting)])
    found = mean_mixing_by_layer(frame, average or setting.readings.layer_average)
    return {name: found[name] for name in attention_block_scopes(setting.lens) if name in found}


def aggregate_rounded(frame: pl.LazyFrame, keys: Sequence[str], *aggregates: pl.Expr) -> pl.DataFrame:
    """The final aggregation of a table, rounded to ten digits: threads sum in any order, so the last of the sixteen
    digits differ between calls. The ratios themselves are in single precision."""
    found: pl.DataFrame = frame.group_by(keys).agg(*aggregates).collect()
    return found.with_columns(selectors.float().round_sig_figs(DIGITS))


def overall_mixing(means: ByLayer) -> list[float]:
    """The mean over all tokens for each layer."""
    return [mean for (_, kind), mean in sorted(means.items()) if kind == "overall"]
