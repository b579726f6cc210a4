"""Mixing ratios (EMNLP 2021): overall (Table 2), by layer and kind of token (Fig. 3), and in relation to depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from normscope.measures.correlation import spearman_p_value
from normscope.papers.common import (
    claim_with_published,
    describe_common_masking,
    finite_numbers,
    layer_picture,
    masked_run,
    published_curves,
    rank_correlation,
)
from normscope.papers.emnlp2021.ratios import (
    TYPES,
    ByLayer,
    attention_block_scopes,
    mixing_by_method,
    mixing_ratios_of_run,
    overall_mixing,
    scope_of_alias,
    summarise_mixing,
    weights_residual_scope,
)
from normscope.papers.emnlp2021.shared import PUBLISHED, REFERENCE, THEIRS, layer_correlation_claim
from normscope.papers.published import quote_published
from normscope.papers.study import Runs, Setting
from normscope.reports import map_charts
from normscope.reports.report import Claim, Picture, Section, Table, none_if_nan

KEYS = ("mean", "max", "min")
ALIASES = {  # method of the paper -> alias of the scope
    "ATTN-W": "weights",
    "ATTN-N": "attention",
    "ATTNRES-N": "attention-residual",
    "ATTNRESLN-N": "attention-block",
}
MEANS = {"micro": "Means over all tokens (micro).", "macro": "Means over the sequence means (macro)."}


def mixing_section(setting: Setting, runs: Runs) -> Section:
    """Table 2: mean, max and min of the mixing ratio by each method."""
    lens, average = setting.lens, setting.readings.table_average
    found = summarise_mixing(mixing_ratios_of_run(lens, runs[masked_run(setting)]), average)
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
        _mixing_claims(setting, {name: found[name]["mean"] for name in names}),
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
        _middle_layer_claims(setting, found[scope_of_alias(setting.lens, "attention-block")]),
        {f"mixing.{name}.L{layer}.{kind}": value for name in names for (layer, kind), value in found[name].items()},
    )


def mixing_depth_section(setting: Setting, runs: Runs) -> Section:
    """Spearman's correlation of a layer's overall mixing ratio with its index."""
    found = {name: overall_mixing(means) for name, means in mixing_by_method(setting, runs).items()}
    numbers = range(1, setting.depth + 1)
    rho = {name: rank_correlation(means, numbers) for name, means in found.items()}
    p = {name: none_if_nan(spearman_p_value(means, numbers)) for name, means in found.items()}
    columns = {"method": "", "first layer (%)": ".1f", "last layer (%)": ".1f"}
    table = Table.of(
        "depth-spearman",
        "Spearman's correlation of a layer's mean mixing ratio with its index",
        {**columns, "Spearman": ".2f", "p": ".2f", PUBLISHED: ".2f"},
        ((name, some[0], some[-1], rho[name], p[name], THEIRS.get(f"depth.{name}")) for name, some in found.items()),
        f"p: two-sided permutation test. {REFERENCE}",
    )
    theirs = quote_published(THEIRS, "Spearman {:.2f} over 12 layers", "depth.ATTNRESLN-N")
    means = found[scope_of_alias(setting.lens, "attention-block")]
    return Section(
        "depth",
        "Mixing ratio and depth",
        f"Correlations over {setting.depth} layers; with few layers, chance correlations are often strong.",
        (table,),
        (layer_correlation_claim(setting, "The mixing ratio decreases with depth", means, numbers, -1, theirs),),
        finite_numbers({f"depth.{name}": value for name, value in rho.items()}),
    )


def middle_layers(depth: int) -> list[int]:
    """The middle half of the layers, from 1: 4 to 9 of 12."""
    return [layer for layer in range(1, depth + 1) if depth < 4 * layer <= 3 * depth] or [1]


def _mixing_claims(setting: Setting, means: Mapping[str, float]) -> tuple[Claim, ...]:
    names = {alias: scope_of_alias(setting.lens, alias) for alias in ALIASES.values()}
    ours = {method: means[names[alias]] for method, alias in ALIASES.items()}

    def claim(text: str, holds: bool, template: str, *methods: str) -> Claim:
        keys = (f"mixing.{method}.mean" for method in methods)
        return claim_with_published(text, holds, template, [ours[method] for method in methods], THEIRS, *keys)

    weights, attention, residual, block = (ours[method] for method in ALIASES)
    fall, versus = "from {:.1f} % to {:.1f} %", "{:.1f} % against {:.1f} %"
    claims = [
        claim(
            "Mixing dominates by weights, but by norms with residual and normalization tokens mostly keep their own",
            weights > 50 > block,
            versus,
            *("ATTN-W", "ATTNRESLN-N"),
        ),
        claim(
            "The residual connection reduces norm-based mixing to less than half",
            residual < attention / 2,
            fall,
            *("ATTN-N", "ATTNRES-N"),
        ),
    ]
    half = weights_residual_scope(setting.lens)
    if half is not None:
        claims.append(
            Claim(
                "Weights with the residual as half (Abnar and Zuidema) still overestimate mixing",
                means[half] > residual,
                f"{versus} by norms".format(means[half], residual),
                quote_published(THEIRS, versus, "mixing.ATTNRES-W.mean", "mixing.ATTNRES-N.mean"),
            )
        )
    last = claim("Layer normalization reduces mixing further", block < residual, fall, "ATTNRES-N", "ATTNRESLN-N")
    if names["attention-residual"] == names["attention-block"]:
        last = replace(last, holds=None, ours="no norm follows the residual here")
    return (*claims, last)


def _middle_layer_claims(setting: Setting, means: ByLayer) -> tuple[Claim, ...]:
    keys = {(n, kind): f"mixing.ATTNRESLN-N.L{n}.{kind}" for n in range(1, 13) for kind in TYPES}
    theirs = {place: THEIRS[key] for place, key in keys.items() if key in THEIRS}
    claims = []
    for kind, less, text in (
        ("separator", True, "In the middle layers, separators ([SEP]) mix less than ordinary tokens"),
        ("first", True, "In the middle layers, the first token ([CLS]) mixes less than ordinary tokens"),
        ("mask", False, "In the middle layers, [MASK] mixes more than ordinary tokens"),
    ):
        ours, why = _middle_means(means, kind, setting.depth), "no such tokens in the corpus"
        if kind == "first" and setting.side == "decoder":
            ours, why = None, "the first token of a causal model attends only to itself"
        holds = None if ours is None else (ours[0] < ours[1]) == less
        published = _describe_middle_means(_middle_means(theirs, kind, 12), 12)
        claims.append(Claim(text, holds, _describe_middle_means(ours, setting.depth, why), published))
    return tuple(claims)


def _middle_means(means: ByLayer, kind: str, depth: int) -> tuple[float, float] | None:
    """Means over the middle layers for a kind of token and for ordinary tokens."""
    layers = middle_layers(depth)
    of_kind, ordinary = ([means[n, one] for n in layers if (n, one) in means] for one in (kind, "other"))
    return (float(np.mean(of_kind)), float(np.mean(ordinary))) if of_kind and ordinary else None


def _describe_middle_means(pair: Sequence[float] | None, depth: int, why: str = "") -> str:
    if pair is None:
        return why
    layers = middle_layers(depth)
    return f"{pair[0]:.1f} % against {pair[1]:.1f} % in layers {layers[0]} to {layers[-1]}"
