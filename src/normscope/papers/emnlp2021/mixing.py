"""Mixing ratios (EMNLP 2021): overall (Table 2), by layer and kind of token (Fig. 3), and in relation to depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from normscope.measures.uncertainty import Resampled, decide_at_least, permute_spearman
from normscope.papers.common import (
    describe_common_masking,
    finite_numbers,
    layer_picture,
    masked_run,
    published_curves,
    rank_correlation,
)
from normscope.papers.emnlp2021.ratios import (
    TYPES,
    attention_block_scopes,
    mixing_by_method,
    mixing_ratios_of_run,
    overall_mixing,
    scope_of_alias,
    summarise_mixing,
    weights_residual_scope,
)
from normscope.papers.emnlp2021.sequences import (
    SequenceSums,
    intervals_evidence,
    margin_evidence,
    mixing_sums_by_sequence,
    resample_mixing,
    reversed_layers_text,
)
from normscope.papers.emnlp2021.shared import (
    OTHER_AVERAGE,
    PUBLISHED,
    REFERENCE,
    THEIRS,
    layer_correlation,
    layer_correlation_claim,
)
from normscope.papers.published import quote_published
from normscope.papers.resampling import estimate_mean_along, pick
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim
from normscope.reports import map_charts
from normscope.reports.report import Claim, Picture, Section, Table, none_if_nan

KEYS = ("mean", "max", "min")
ALIASES = {  # method of the paper -> alias of the scope
    "ATTN-W": "weights",
    "ATTN-N": "attention",
    "ATTNRES-N": "attention-residual",
    "ATTNRESLN-N": "attention-block",
}
FALL, VERSUS = "from {:.1f} % to {:.1f} %", "{:.1f} % against {:.1f} %"
MEANS = {"micro": "Means over all tokens (micro).", "macro": "Means over the sequence means (macro)."}


def mixing_section(setting: Setting, runs: Runs) -> Section:
    """Table 2: mean, max and min of the mixing ratio by each method."""
    lens, average = setting.lens, setting.readings.table_average
    frame = mixing_ratios_of_run(lens, runs[masked_run(setting)])
    found = summarise_mixing(frame, average)
    names = [name for name in attention_block_scopes(lens) if name in found]
    table = Table.of(
        "table2-mixing",
        "Table 2. Mixing ratio (%)",
        {"method": "", **dict.fromkeys((*KEYS, *(f"{PUBLISHED} {key}" for key in KEYS)), ".1f")},
        ((name, *found[name].values(), *(THEIRS.get(f"mixing.{name}.{key}") for key in KEYS)) for name in names),
        f"{MEANS[average]} {REFERENCE}",
    )
    text = "The mixing ratio is the share of a token's new vector that comes from other tokens rather than from itself."
    return Section(
        "mixing",
        "Mixing ratio",
        f"{text} {describe_common_masking(setting)}",
        (table,),
        _mixing_claims(setting, mixing_sums_by_sequence(frame, names, setting.depth), names),
        {f"mixing.{name}.{key}": value for name in names for key, value in found[name].items()},
    )


def mixing_layers_section(setting: Setting, runs: Runs) -> Section:
    """Fig. 3: the mean mixing ratio by layer and kind of token."""
    found = mixing_by_method(setting, runs)
    names, numbers = list(found), range(1, setting.depth + 1)
    kinds = [kind for kind in TYPES if any((layer, kind) in found[names[0]] for layer in numbers)]
    table = Table.of(
        "fig3-layers",
        "Fig. 3. Mixing ratio (%) by layer and kind of token",
        {"method": "", "layer": "", **dict.fromkeys(kinds, ".1f")},
        ((name, n, *(found[name].get((n, kind)) for kind in kinds)) for name in names for n in numbers),
        MEANS[setting.readings.layer_average],
        folded=len(names) * len(numbers) > 20,
    )
    maps = {name: np.array([[found[name].get((n, k), np.nan) for k in kinds] for n in numbers]) for name in names}
    look: dict[str, Any] = {"annotate": True, "shared": False, "decimals": 0}
    heat = map_charts.heat_map_charts(
        maps, rows=numbers, columns=kinds, label="mixing ratio (%)", ylabel="layer", **look
    )
    theirs = published_curves(THEIRS, {name: f"mixing.{name}.L{{}}.overall" for name in names}, setting.depth)
    lines = layer_picture(
        "fig3-lines",
        "Mixing ratio of all tokens by layer",
        {name: overall_mixing(found[name]) for name in names},
        numbers,
        "mixing ratio (%)",
        f"Dashed: {REFERENCE[0].lower()}{REFERENCE[1:]}" if theirs else "",
        reference=theirs,
        ylim=(0, 100),
    )
    text = "The first token is [CLS] or the token that starts a text; a separator is [SEP] or the token that ends one."
    title = "Fig. 3. Mixing ratio (%); each method has its own colour scale"
    return Section(
        "layers",
        "Mixing ratio by layer and kind of token",
        f"{text} {describe_common_masking(setting)}",
        (Picture("fig3-heat", title, heat), lines, table),
        _middle_layer_claims(setting, mixing_ratios_of_run(setting.lens, runs[masked_run(setting)])),
        {f"mixing.{name}.L{layer}.{kind}": value for name in names for (layer, kind), value in found[name].items()},
    )


def mixing_depth_section(setting: Setting, runs: Runs) -> Section:
    """Spearman's correlation of a layer's overall mixing ratio with its index."""
    found = {name: overall_mixing(means) for name, means in mixing_by_method(setting, runs).items()}
    other = OTHER_AVERAGE[setting.readings.layer_average]
    numbers = range(1, setting.depth + 1)
    rho = {name: rank_correlation(means, numbers) for name, means in found.items()}
    p = {name: none_if_nan(permute_spearman(means, numbers).two_sided) for name, means in found.items()}
    columns = {"method": "", "first layer (%)": ".1f", "last layer (%)": ".1f"}
    table = Table.of(
        "depth-spearman",
        "Spearman's correlation of a layer's mean mixing ratio with its index",
        {**columns, "Spearman": ".2f", "p": ".2f", PUBLISHED: ".2f"},
        ((name, some[0], some[-1], rho[name], p[name], THEIRS.get(f"depth.{name}")) for name, some in found.items()),
        f"p: two-sided permutation test. {REFERENCE}",
    )
    theirs = quote_published(THEIRS, "Spearman {:.2f} over 12 layers", "depth.ATTNRESLN-N")
    block = scope_of_alias(setting.lens, "attention-block")
    margin = layer_correlation(found[block], numbers, -1)
    by_other = overall_mixing(mixing_by_method(setting, runs, other)[block])
    under = {f"layer_average={other}": layer_correlation(by_other, numbers, -1)}
    text = "The mixing ratio decreases with depth"
    return Section(
        "depth",
        "Mixing ratio and depth",
        f"Correlations over {setting.depth} layers; with few layers, chance correlations are often strong.",
        (table,),
        (layer_correlation_claim(setting, text, margin, -1, theirs, under=under),),
        finite_numbers({f"depth.{name}": value for name, value in rho.items()}),
    )


def middle_layers(depth: int) -> list[int]:
    """The middle half of the layers, from 1: 4 to 9 of 12."""
    return [layer for layer in range(1, depth + 1) if depth < 4 * layer <= 3 * depth] or [1]


def _mixing_claims(setting: Setting, given: SequenceSums, names: Sequence[str]) -> tuple[Claim, ...]:
    """The claims of Table 2. Its means are means over layers of (scopes, layers) with both averages, since every token
    has one ratio in each layer."""
    chosen = setting.readings.table_average
    by_average = {average: _overall_by_layer(given, average) for average in MEANS}
    scopes = {method: scope_of_alias(setting.lens, alias) for method, alias in ALIASES.items()}
    half = weights_residual_scope(setting.lens)
    if half is not None:
        scopes["ATTNRES-W"] = half

    def claim(text: str, template: str, methods: tuple[str, str], margin: Any, name: str) -> Claim:
        """`margin` is a function of the two methods' means; it should be positive."""
        places = [names.index(scopes[method]) for method in methods]

        def by_layer(average: str) -> Resampled:
            return by_average[average].map(lambda found: margin(*(found[..., n, :] for n in places)))

        ours = [float(by_average[chosen].value[n].mean()) for n in places]
        one, other = (estimate_mean_along(by_layer(average)) for average in (chosen, OTHER_AVERAGE[chosen]))
        under = {f"table_average={OTHER_AVERAGE[chosen]}": other.decide()}
        evidence = margin_evidence(one, by_layer(chosen), name=name)
        theirs = quote_published(THEIRS, template, *(f"mixing.{method}.mean" for method in methods))
        return decided_claim(text, one, template.format(*ours), theirs, evidence=evidence, under=under)

    claims = [_dominance_claim(setting, by_average, names, scopes)]
    claims.append(
        claim(
            "The residual connection reduces norm-based mixing to less than half",
            FALL,
            ("ATTN-N", "ATTNRES-N"),
            lambda attention, residual: attention / 2 - residual,
            "half of the first minus the second",
        )
    )
    if half is not None:
        claims.append(
            claim(
                "Weights with the residual as half (Abnar and Zuidema) still overestimate mixing",
                VERSUS,
                ("ATTNRES-W", "ATTNRES-N"),
                lambda weights, residual: weights - residual,
                "difference",
            )
        )
    last = ("Layer normalization reduces mixing further", FALL, ("ATTNRES-N", "ATTNRESLN-N"))
    if scopes["ATTNRES-N"] == scopes["ATTNRESLN-N"]:
        theirs = quote_published(THEIRS, FALL, *(f"mixing.{method}.mean" for method in last[2]))
        return (*claims, Claim(last[0], None, "no norm follows the residual here", theirs))
    return (*claims, claim(*last, lambda residual, block: residual - block, "difference"))


def _dominance_claim(
    setting: Setting, by_average: Mapping[str, Resampled], names: Sequence[str], scopes: Mapping[str, str]
) -> Claim:
    """Whether the mean is above 50 % by weights and below 50 % by norms with residual and normalization."""
    chosen, methods = setting.readings.table_average, ("ATTN-W", "ATTNRESLN-N")
    places = [names.index(scopes[method]) for method in methods]
    means, by_layer, margins = {}, {}, {}
    for average, found in by_average.items():
        weights, block = (pick(found, n, -2) for n in places)
        means[average] = {
            scopes[m]: one.map(lambda v: v.mean(-1)) for m, one in zip(methods, (weights, block), strict=True)
        }
        by_layer[average] = [weights.map(lambda v: v - 50), block.map(lambda v: 50 - v)]
        margins[average] = [estimate_mean_along(one) for one in by_layer[average]]
    other = OTHER_AVERAGE[chosen]
    return decided_claim(
        "Mixing dominates by weights, but by norms with residual and normalization tokens mostly keep their own",
        margins[chosen],
        VERSUS.format(*(float(one.value) for one in means[chosen].values())),
        quote_published(THEIRS, VERSUS, *(f"mixing.{method}.mean" for method in methods)),
        evidence=intervals_evidence(means[chosen]) + reversed_layers_text(by_layer[chosen]),
        under={f"table_average={other}": decide_at_least(2, margins[other])},
    )


def _overall_by_layer(given: SequenceSums, average: str) -> Resampled:
    """(scopes, layers): the mean over all tokens."""
    return resample_mixing(given, average, ("overall",)).map(lambda found: found[..., 0])


def _middle_layer_claims(setting: Setting, frame: pl.LazyFrame) -> tuple[Claim, ...]:
    """Kinds of token against ordinary tokens, by means over the middle layers."""
    chosen, layers = setting.readings.layer_average, middle_layers(setting.depth)
    given = mixing_sums_by_sequence(frame, [scope_of_alias(setting.lens, "attention-block")], setting.depth)
    middle = np.array(layers) - 1
    found = {average: resample_mixing(given, average).map(lambda v: v[..., 0, middle, :]) for average in MEANS}
    claims = []
    for kind, sign, text in (
        ("separator", 1, "In the middle layers, separators ([SEP]) mix less than ordinary tokens"),
        ("first", 1, "In the middle layers, the first token ([CLS]) mixes less than ordinary tokens"),
        ("mask", -1, "In the middle layers, [MASK] mixes more than ordinary tokens"),
    ):
        theirs = _describe_middle_means(_published_middle_means(kind), middle_layers(12))
        pair = TYPES.index(kind), TYPES.index("other")
        ours = [float(found[chosen].value[:, place].mean()) for place in pair]
        if kind == "first" and setting.side == "decoder":
            claims.append(Claim(text, None, "the first token of a causal model attends only to itself", theirs))
        elif not np.isfinite(ours).all():
            claims.append(Claim(text, None, "no such tokens in the corpus", theirs))
        else:
            by_layer = {average: _minus(some, pair[1], pair[0], sign) for average, some in found.items()}
            margins = {average: estimate_mean_along(some) for average, some in by_layer.items()}
            other = OTHER_AVERAGE[chosen]
            evidence = margin_evidence(margins[chosen], by_layer[chosen], layers)
            under = {f"layer_average={other}": margins[other].decide()}
            ours_text = _describe_middle_means(ours, layers)
            claims.append(decided_claim(text, margins[chosen], ours_text, theirs, evidence=evidence, under=under))
    return tuple(claims)


def _minus(given: Resampled, first: int, second: int, sign: int) -> Resampled:
    """sign * (first - second) of statistics in the last dimension."""
    return given.map(lambda found: sign * (found[..., first] - found[..., second]))


def _published_middle_means(kind: str) -> list[float] | None:
    """Published means over the middle layers for a kind of token and for ordinary tokens."""
    keys = [[f"mixing.ATTNRESLN-N.L{n}.{one}" for n in middle_layers(12)] for one in (kind, "other")]
    known = all(key in THEIRS for some in keys for key in some)
    return [float(np.mean([THEIRS[key] for key in some])) for some in keys] if known else None


def _describe_middle_means(pair: Sequence[float] | None, layers: Sequence[int]) -> str:
    if pair is None:
        return ""
    return f"{pair[0]:.1f} % against {pair[1]:.1f} % in layers {layers[0]} to {layers[-1]}"
