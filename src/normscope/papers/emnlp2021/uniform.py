"""Effect of uniform attention in a layer, compared with the layer's mixing ratio: a question of our own.

Earlier work found that models work nearly as well with attention that is not learned. The paper's explanation (EMNLP
2021, section 6) is that only a small part of each vector is mixed. If so, uniform attention should change less where
less is mixed. The paper does not test this. It is tested here in two ways:

- over layers: the mean change of a layer and its mean mixing ratio. Layers are few and ordered, and a change in a low
  layer passes through all layers above it, so depth can cause or hide such a correlation;
- over sequences within a layer: the change of a sequence and its mixing ratio in that layer, which leaves depth out.
  Longer sequences have more tokens to mix and more over which attention is spread, so the correlation is partial, with
  the length held constant: r_xy.z = (r_xy - r_xz r_yz) / sqrt((1 - r_xz^2) (1 - r_yz^2)) of rank correlations r.

A relative change and a mixing ratio are different quantities, so their sizes are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from normscope.analyzer import Analyzer
from normscope.corpus.store import Run
from normscope.measures.correlation import ordinal_codes, spearman_of_codes
from normscope.measures.uncertainty import Estimate, Resampled, permute_spearman, resample_statistic
from normscope.papers.common import (
    describe_common_masking,
    finite_numbers,
    layer_numbers,
    layer_picture,
    linear_correlation,
    masked_run,
    rank_correlation,
    scan_paper_side,
)
from normscope.papers.emnlp2021.measures import ALL
from normscope.papers.emnlp2021.ratios import (
    aggregate_rounded,
    mixing_by_method,
    mixing_ratios_of_run,
    overall_mixing,
    scope_of_alias,
)
from normscope.papers.emnlp2021.sequences import Values, mixing_sums_by_sequence
from normscope.papers.emnlp2021.shared import layer_correlation, layer_correlation_claim
from normscope.papers.resampling import estimates_along
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim, majority
from normscope.reports import charts
from normscope.reports.report import Cell, Claim, Picture, Section, Table, none_if_nan

Changes = Mapping[int, Mapping[str, float]]  # layer (from 0, or ALL) -> what changes by how much
Places = NDArray[np.intp]
ByKind = Mapping[str, list[float]]  # method, or kind of change -> a value for each layer
RUN = "uniform"
CHANGES = {"relative": "change (%)", "cosine": "cosine"}
LOSSES = {"loss": "loss", "added": "loss added"}
AXES = {"relative": "relative change (%)", "cosine": "cosine distance"}
MEASURES = ("spearman", "p", "pearson")
TEXT = """This experiment is not in the paper. It tests the paper's explanation of why models work nearly as well with \
attention that is not learned: if little is mixed, it matters little how.

The attention weights of one layer, or of all layers, are replaced by equal weights on all visible tokens. The tables \
show how much the final hidden states h change, as ||h' - h|| / ||h|| and as cosine distance, averaged over tokens."""
CHANGE_NOTE = "Change: ||h' - h|| / ||h||. Cosine: the cosine distance of h and h'."
LOSS_NOTE = " Loss: cross-entropy in nats. Loss added: its increase over the learned attention."
CORRELATION_NOTE = (
    "p: two-sided permutation test of Spearman's. A change in a low layer passes through all layers above it."
)


def uniform_attention_section(setting: Setting, runs: Runs) -> Section:
    """Change of the output for each layer and for all layers at once, with the layer's mixing ratio."""
    lens, depth, chosen = setting.lens, setting.depth, setting.readings.change
    means = mixing_by_method(setting, runs)
    methods = [scope_of_alias(lens, alias) for alias in ("weights", "attention-block")]
    mixing = {name: overall_mixing(means[name]) for name in methods}
    found = uniform_attention_changes(lens, runs[RUN], setting.readings.layer_average)
    has_loss = "loss" in found[ALL]
    kinds = CHANGES | (LOSSES if has_loss else {})
    changed = {kind: [found[n][kind] for n in range(depth)] for kind in kinds}
    columns = (*(f"{name} (%)" for name in methods), *kinds.values())
    rows: list[tuple[Cell, ...]] = list(zip(range(1, depth + 1), *mixing.values(), *changed.values(), strict=True))
    rows.append(("all", None, None, *(found[ALL][kind] for kind in kinds)))
    correlations = {
        (name, kind): (rank_correlation(a, b), none_if_nan(permute_spearman(a, b).two_sided), linear_correlation(a, b))
        for name, a in mixing.items()
        for kind, b in changed.items()
        if kind != "loss"
    }
    tables = (
        Table.of(
            "uniform-change",
            "Change of the output with uniform attention, by layer and in all layers at once",
            {"layer": "", **{column: ".1f" if "%" in column else ".3f" for column in columns}},
            rows,
            f"{' and '.join(methods)}: the mixing ratio of the layer. {CHANGE_NOTE}{LOSS_NOTE if has_loss else ''}",
        ),
        Table.of(
            "uniform-correlation",
            f"Correlation of mixing ratio and change of the output over the {depth} layers",
            {"mixing by": "", "with": "", "Spearman": ".2f", "p": ".2f", "Pearson": ".2f"},
            ((name, kinds[kind], *some) for (name, kind), some in correlations.items()),
            CORRELATION_NOTE,
        ),
    )
    within = uniform_within_layers(setting, runs)
    by_layer = estimates_along(within)
    return Section(
        "uniform",
        "Uniform instead of learned attention",
        "\n\n".join((TEXT, _describe_loss(setting, found[ALL]), describe_common_masking(setting))),
        (*tables, _within_layers_table(by_layer, chosen), *_uniform_attention_pictures(mixing, changed, chosen)),
        _uniform_attention_claims(setting, mixing, changed, by_layer),
        _uniform_attention_numbers(found, correlations, chosen)
        | finite_numbers(layer_numbers("uniform.within", within.value.tolist())),
    )


def uniform_attention_changes(lens: Analyzer, run: Run, average: str) -> dict[int, dict[str, float]]:
    """layer (from 0, or ALL) -> relative change in percent and cosine distance; with a head also the loss, its increase
    and the loss with learned attention. Sequences count equally (macro) or by tokens (micro); losses are means over
    all scored tokens."""
    weight = pl.lit(1.0) if average == "macro" else pl.col("tokens").cast(pl.Float64)
    score = pl.col("scored").cast(pl.Float64)
    means = [((pl.col(kind) * weight).sum() / (weight + 0 * pl.col(kind)).sum()).alias(kind) for kind in CHANGES]
    losses = [((pl.col(kind).fill_nan(0.0) * score).sum() / score.sum()).alias(kind) for kind in ("loss", "plain_loss")]
    rows = scan_paper_side(run, "uniform_attention", lens.loaded.stacks[0].side)
    found: dict[int, dict[str, float]] = {}
    for row in aggregate_rounded(rows, ["layer"], *means, *losses, score.sum()).iter_rows(named=True):
        values = {"relative": 100 * row["relative"], "cosine": row["cosine"]}
        if row["scored"]:
            values |= {"loss": row["loss"], "added": row["loss"] - row["plain_loss"], "plain": row["plain_loss"]}
        found[row["layer"]] = values
    return found


def _uniform_attention_pictures(mixing: ByKind, changed: ByKind, chosen: str) -> tuple[Picture, Picture]:
    block, by_block = list(mixing.items())[-1]
    layers = range(1, len(by_block) + 1)
    axes = {"xlabel": f"mixing ratio by {block} (%)", "ylabel": AXES[chosen]}
    scatter = charts.scatter_chart(by_block, changed[chosen], **axes, labels=[f"layer {n}" for n in layers])
    series = {f"mixing by {name}": some for name, some in mixing.items()} | {"relative change": changed["relative"]}
    against = "Change of the output by uniform attention in a layer, against the layer's mixing ratio"
    beside = "Mixing ratio and relative change of the final hidden states by layer (%)"
    return Picture("uniform-scatter", against, scatter), layer_picture("uniform-layers", beside, series, layers, "%")


def uniform_within_layers(setting: Setting, runs: Runs) -> Resampled:
    """(layers,): partial rank correlation over sequences of the mixing ratio and the change by uniform attention in
    the same layer, with the length held constant, under resampling of sequences."""
    lens, chosen = setting.lens, setting.readings.change
    frame = mixing_ratios_of_run(lens, runs[masked_run(setting)])
    given = mixing_sums_by_sequence(frame, [scope_of_alias(lens, "attention-block")], setting.depth)
    table = scan_paper_side(runs[RUN], "uniform_attention", setting.side).filter(pl.col("layer") != ALL).collect()
    rows = table.pivot(on="layer", index=["id", "tokens"], values=chosen).sort("id")
    known = dict(zip(given.ids, given.means[:, 0, :, -1], strict=True))
    rows = rows.filter(pl.col("id").is_in(list(known)))
    mixing = np.array([known[id] for id in rows["id"].to_list()]).reshape(len(rows), setting.depth)
    changes = rows.select(str(n) for n in range(setting.depth)).to_numpy()
    length = ordinal_codes(rows["tokens"].to_numpy())
    pairs = [(ordinal_codes(mixing[:, n]), ordinal_codes(changes[:, n])) for n in range(setting.depth)]

    def correlations(weights: Values) -> Any:
        return np.array([partial_spearman(a, b, length, weights) for a, b in pairs])

    return resample_statistic(correlations, len(rows))


def partial_spearman(x: Places, y: Places, z: Places, weights: Values) -> float:
    """Spearman's partial correlation of x and y given z, as `ordinal_codes`; the plain one if z is constant."""
    xy, xz, yz = (spearman_of_codes(a, b, weights) for a, b in ((x, y), (x, z), (y, z)))
    if math.isnan(xz) or math.isnan(yz):
        return xy
    rest = (1 - xz**2) * (1 - yz**2)
    return (xy - xz * yz) / math.sqrt(rest) if rest > 0 else math.nan


def _within_layers_table(by_layer: Sequence[Estimate], chosen: str) -> Table:
    return Table.of(
        "uniform-within",
        "Correlation of mixing ratio and change over the sequences, by layer",
        {"layer": "", "partial Spearman": ".2f", "from": ".2f", "to": ".2f"},
        ((n, *map(none_if_nan, (one.value, one.low, one.high))) for n, one in enumerate(by_layer, 1)),
        f"Change: {AXES[chosen]}. The length of a sequence is held constant. From, to: 95 % interval, bootstrap over "
        "sequences.",
    )


def _uniform_attention_claims(
    setting: Setting, mixing: ByKind, changed: ByKind, by_layer: Sequence[Estimate]
) -> tuple[Claim, ...]:
    by_block, chosen = list(mixing.values())[-1], setting.readings.change
    margins = {kind: layer_correlation(by_block, changed[kind], 1) for kind in CHANGES}
    known = [one.value for one in by_layer if not math.isnan(one.value)]
    return (
        layer_correlation_claim(
            setting,
            "Uniform attention changes less in layers that mix less: over layers, the change increases with the mixing "
            "ratio",
            margins[chosen],
            1,
            under={f"change={kind}": margin for kind, margin in margins.items() if kind != chosen},
            own=True,
        ),
        decided_claim(
            "Within most layers, uniform attention changes less in sequences that mix less, given their length",
            by_layer,
            f"partial Spearman {min(known):.2f} to {max(known):.2f}" if known else "too few sequences",
            at_least=majority(len(by_layer)),
            own=True,
        ),
    )


def _uniform_attention_numbers(
    found: Changes, correlations: Mapping[tuple[str, str], tuple[float | None, ...]], chosen: str
) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for layer, values in sorted(found.items(), key=lambda pair: (pair[0] == ALL, pair[0])):
        place = "all" if layer == ALL else f"L{layer + 1}"
        numbers |= {f"uniform.{kind}.{place}": value for kind, value in values.items() if kind != "plain"}
    if "plain" in found[ALL]:
        numbers["uniform.loss.plain"] = found[ALL]["plain"]
    for (name, kind), some in correlations.items():
        if kind == chosen:
            keys = (f"uniform.{measure}.{name}" for measure in MEASURES)
            numbers |= finite_numbers(dict(zip(keys, some, strict=True)))
    return numbers


def _describe_loss(setting: Setting, everywhere: Mapping[str, Any]) -> str:
    if "plain" not in everywhere:
        return "The model was loaded without a head that predicts tokens, so there is no loss to compare."
    what = "of the masked tokens" if masked_run(setting) == "masked" else "of the next token"
    guess = math.log(setting.lens.loaded.limits.vocabulary)
    return (
        f"The loss is the cross-entropy {what} in nats: {everywhere['plain']:.3f} with learned attention, {guess:.3f} "
        "for a uniform guess over the vocabulary. If the two are close, the loss has little room to increase."
    )
