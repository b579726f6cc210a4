"""Mixing ratios: of all tokens (Table 2), by layer and kind of token (Fig. 3), against depth (EMNLP 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from normscope.measures.permutation import spearman_p
from normscope.papers import charts, map_charts, published
from normscope.papers.emnlp2021.ratios import (
    TYPES,
    by_layer,
    methods,
    overall,
    rank_correlation,
    ratios,
    residual_weights,
    scope,
    summary,
)
from normscope.papers.emnlp2021.shared import PAPER, PUBLISHED, REFERENCE, described_input, masked_run, over_layers
from normscope.papers.published import said
from normscope.papers.report import Claim, Picture, Section, Table, known

if TYPE_CHECKING:
    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting


def mixing(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Table 2: mean, max and min of the mixing ratio by each method."""
    lens, readings = setting.lens, setting.readings
    found = summary(ratios(lens, runs[masked_run(setting)]), readings.table_average)
    reference = published.reference(PAPER)
    names = [name for name in methods(lens) if name in found]
    table = Table(
        "table2-mixing",
        "Table 2. Mixing ratio (%)",
        ("method", "mean", "max", "min", *(f"{PUBLISHED} {key}" for key in ("mean", "max", "min"))),
        tuple(
            (name, *found[name].values(), *(reference.get(f"mixing.{name}.{key}") for key in ("mean", "max", "min")))
            for name in names
        ),
        {f"{of}{key}": ".1f" for of in ("", f"{PUBLISHED} ") for key in ("mean", "max", "min")},
        f"{_means(readings.table_average)} {REFERENCE}",
    )
    numbers = {f"mixing.{name}.{key}": value for name in names for key, value in found[name].items()}
    return Section(
        "mixing",
        "Mixing ratio",
        "How much of a token's new vector comes from the other tokens, and how much from itself. "
        + described_input(setting),
        (table,),
        _mixing_claims(setting, {name: found[name]["mean"] for name in names}),
        numbers,
    )


def layers(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Fig. 3: the mean mixing ratio by layer and kind of token."""
    lens, readings = setting.lens, setting.readings
    found = by_layer(ratios(lens, runs[masked_run(setting)]), readings.layer_average)
    names = [name for name in methods(lens) if name in found]
    depth = lens.depths[0]
    kinds = [kind for kind in TYPES if any((layer, kind) in found[names[0]] for layer in range(1, depth + 1))]
    table = Table(
        "fig3-layers",
        "Fig. 3. Mixing ratio (%) by layer and kind of token",
        ("method", "layer", *kinds),
        tuple(
            (name, layer, *(found[name].get((layer, kind)) for kind in kinds))
            for name in names
            for layer in range(1, depth + 1)
        ),
        dict.fromkeys(kinds, ".1f"),
        _means(readings.layer_average),
        folded=len(names) * depth > 20,
    )
    panels = {
        name: np.array([[found[name].get((layer, kind), np.nan) for kind in kinds] for layer in range(1, depth + 1)])
        for name in names
    }
    heat = map_charts.heat_maps(
        panels,
        rows=range(1, depth + 1),
        columns=kinds,
        label="mixing ratio (%)",
        ylabel="layer",
        annotate=True,
        shared=False,
        decimals=0,
    )
    lines = charts.line_chart(
        {name: overall(found[name]) for name in names},
        x=range(1, depth + 1),
        ylabel="mixing ratio (%)",
        reference=_published_lines(names, depth),
        ylim=(0, 100),
    )
    return Section(
        "layers",
        "Mixing ratio by layer and kind of token",
        "The first token is [CLS] or what begins a text, a separator is [SEP] or what ends one. "
        + described_input(setting),
        (
            Picture("fig3-heat", "Fig. 3. Mixing ratio (%), each method on its own scale of colours", heat),
            Picture("fig3-lines", "Mixing ratio of all tokens, layer by layer", lines, _dashes(names, depth)),
            table,
        ),
        _layer_claims(setting, found[scope(lens, "attention-block")]),
        {f"mixing.{name}.L{layer}.{kind}": value for name in names for (layer, kind), value in found[name].items()},
    )


def depth(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """Spearman's correlation of the mixing ratio of a layer, over all tokens, with the number of the layer."""
    lens = setting.lens
    found = by_layer(ratios(lens, runs[masked_run(setting)]), setting.readings.layer_average)
    names = [name for name in methods(lens) if name in found]
    numbers = range(1, lens.depths[0] + 1)
    rho = {name: rank_correlation(overall(found[name]), numbers) for name in names}
    reference = published.reference(PAPER)
    last = scope(lens, "attention-block")
    claim = over_layers(
        setting,
        "The mixing ratio falls with depth",
        overall(found[last]),
        numbers,
        -1,
        said(reference, "Spearman {:.2f} over 12 layers", "depth.ATTNRESLN-N"),
    )
    return Section(
        "depth",
        "Mixing ratio against depth",
        f"Over the {lens.depths[0]} layers of this model. Of few layers, chance often makes a strong correlation.",
        (
            Table(
                "depth-spearman",
                "Spearman's correlation of a layer's mean mixing ratio with its number",
                ("method", "first layer (%)", "last layer (%)", "Spearman", "p", PUBLISHED),
                tuple(
                    (
                        name,
                        means[0],
                        means[-1],
                        rho[name],
                        known(spearman_p(means, numbers)),
                        reference.get(f"depth.{name}"),
                    )
                    for name in names
                    for means in [overall(found[name])]
                ),
                {
                    "first layer (%)": ".1f",
                    "last layer (%)": ".1f",
                    "Spearman": ".2f",
                    "p": ".2f",
                    PUBLISHED: ".2f",
                },
                f"p: two-sided, by permutation. {REFERENCE}",
            ),
        ),
        (claim,),
        {f"depth.{name}": value for name, value in rho.items() if value is not None},
    )


def middle(depth: int) -> list[int]:
    """The middle half of the layers, from 1: 4 to 9 of 12."""
    return [layer for layer in range(1, depth + 1) if depth < 4 * layer <= 3 * depth] or [1]


def _mixing_claims(setting: Setting, means: Mapping[str, float]) -> tuple[Claim, ...]:
    lens, reference = setting.lens, published.reference(PAPER)
    weights, attention, residual, block = (
        scope(lens, alias) for alias in ("weights", "attention", "attention-residual", "attention-block")
    )
    both = said(reference, "{:.1f} % against {:.1f} %", "mixing.ATTN-W.mean", "mixing.ATTNRESLN-N.mean")
    claims = [
        Claim(
            "By weights mixing dominates; by norms, with residual and normalization, a token mostly keeps its own",
            means[weights] > 50 > means[block],
            f"{means[weights]:.1f} % against {means[block]:.1f} %",
            both,
        ),
        Claim(
            "The residual connection lowers the mixing by norms to less than a half",
            means[residual] < means[attention] / 2,
            f"from {means[attention]:.1f} % to {means[residual]:.1f} %",
            said(reference, "from {:.1f} % to {:.1f} %", "mixing.ATTN-N.mean", "mixing.ATTNRES-N.mean"),
        ),
    ]
    half = residual_weights(lens)
    if half is not None:
        claims.append(
            Claim(
                "Weights with half a residual (Abnar and Zuidema) still put the mixing too high",
                means[half] > means[residual],
                f"{means[half]:.1f} % against {means[residual]:.1f} % by norms",
                said(reference, "{:.1f} % against {:.1f} %", "mixing.ATTNRES-W.mean", "mixing.ATTNRES-N.mean"),
            )
        )
    apart = block != residual
    claims.append(
        Claim(
            "Layer normalization lowers the mixing further",
            means[block] < means[residual] if apart else None,
            f"from {means[residual]:.1f} % to {means[block]:.1f} %" if apart else "no norm follows the residual here",
            said(reference, "from {:.1f} % to {:.1f} %", "mixing.ATTNRES-N.mean", "mixing.ATTNRESLN-N.mean"),
        )
    )
    return tuple(claims)


def _layer_claims(setting: Setting, means: Mapping[tuple[int, str], float]) -> tuple[Claim, ...]:
    reference = published.reference(PAPER)
    depth = setting.lens.depths[0]
    theirs = {
        (layer, kind): reference[f"mixing.ATTNRESLN-N.L{layer}.{kind}"]
        for layer in range(1, 13)
        for kind in TYPES
        if f"mixing.ATTNRESLN-N.L{layer}.{kind}" in reference
    }
    claims = []
    causal = setting.lens.stacks[0].side == "decoder"
    for kind, less, text in (
        ("separator", True, "In the middle layers separators ([SEP]) mix less than ordinary tokens"),
        ("first", True, "In the middle layers the first token ([CLS]) mixes less than ordinary tokens"),
        ("mask", False, "In the middle layers [MASK] mixes more than ordinary tokens"),
    ):
        ours, published_ = _pair(means, kind, middle(depth)), _pair(theirs, kind, middle(12))
        if kind == "first" and causal:
            ours, why = None, "the first token of a causal model sees no other"
        else:
            why = "there is no such token"
        claims.append(
            Claim(
                text,
                None if ours is None else (ours[0] < ours[1]) == less,
                why if ours is None else _against(ours, middle(depth)),
                "" if published_ is None else _against(published_, middle(12)),
            )
        )
    return tuple(claims)


def _pair(means: Mapping[tuple[int, str], float], kind: str, layers: Sequence[int]) -> tuple[float, float] | None:
    """The mean over some layers of a kind of token and of ordinary ones."""
    values = [[means[layer, one] for layer in layers if (layer, one) in means] for one in (kind, "other")]
    return (float(np.mean(values[0])), float(np.mean(values[1]))) if all(values) else None


def _against(pair: tuple[float, float], layers: Sequence[int]) -> str:
    return f"{pair[0]:.1f} % against {pair[1]:.1f} % in layers {layers[0]} to {layers[-1]}"


def _published_lines(names: Sequence[str], depth: int) -> dict[str, list[float]] | None:
    """The published curves, where they are of as many layers."""
    reference = published.reference(PAPER)
    keys = {name: [f"mixing.{name}.L{layer}.overall" for layer in range(1, depth + 1)] for name in names}
    longer = any(f"mixing.{name}.L{depth + 1}.overall" in reference for name in names)
    found = {name: [reference[key] for key in some] for name, some in keys.items() if all(k in reference for k in some)}
    return found if found and not longer else None


def _dashes(names: Sequence[str], depth: int) -> str:
    return f"Dashed: {REFERENCE[0].lower()}{REFERENCE[1:]}" if _published_lines(names, depth) else ""


def _means(average: str) -> str:
    return "Means over all tokens (micro)." if average == "micro" else "Means over the means of the sequences (macro)."
