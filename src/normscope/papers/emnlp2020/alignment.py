"""Word alignment from cross-attention, by weights and by norms (EMNLP 2020, section 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import nan
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from normscope.corpus.entries import Entry
from normscope.corpus.measure_registry import Sample
from normscope.corpus.store import Run
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.engine.request import Options, requests_for
from normscope.engine.run import run_batch
from normscope.errors import NormscopeError
from normscope.inputs.encode import encode
from normscope.measures.alignment import SETTINGS, Hits, alignment_maps_of_words
from normscope.measures.correlation import pearson, spearman_of_lists
from normscope.papers.common import CLEAR, claim_with_published, finite_numbers, layer_picture
from normscope.papers.emnlp2020.measures import LAYER_LEVEL, aligned_word_ids, cross_attention_maps
from normscope.papers.emnlp2020.shared import PARALLEL, THEIRS, head_maps_picture
from normscope.papers.published import quote_published
from normscope.papers.study import Runs, Setting
from normscope.reports import charts, map_charts
from normscope.reports.report import Cell, Claim, Picture, Section, Table, none_if_nan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Place = tuple[int, int]  # layer and head, from 0; head LAYER_LEVEL: the whole layer
METHODS = ("weight", "norm")
WAYS = tuple(product(SETTINGS, METHODS))
REFERENCE = "German-English, published"
RATES = dict.fromkeys(("AER (%)", "AER of linked words (%)", "precision (%)", "recall (%)"), ".1f")
NORM = "mean ||alpha f||"
FEWEST, MOST = 6, 16  # preferred number of words on each side of the sentence pair in the figure
GOLD = "#d55e00"
TEXT = (
    "The decoder reads the gold translation (teacher forcing). AWO (alignment with output) uses the row of the "
    "cross-attention that predicts a word, AWI (alignment with input) the row that reads it, one position later. "
    "Subword maps are merged into word maps by summing over the subwords of a source word and averaging over those of "
    "a target word. Each target word is linked to the source word with the largest cell, or to none if that cell "
    "belongs to an end token.\n\n"
    "AER = 1 - (|A and S| + |A and P|) / (|A| + |S|) over the corpus, where A are the predicted links and S and "
    "P the sure and possible links of the gold data: {:,} sure and {:,} possible links in {:,} sentence pairs; {:.0%} "
    "of the target words have a link. Gold data that leave many words unlinked penalise any method that links every "
    "word, so the error rate is also given for the target words with a gold link alone."
)


@dataclass(frozen=True)
class AlignmentRates:
    """Error rates of one layer or head."""

    all: Hits
    linked: Hits  # of target words with a gold link

    @property
    def aer(self) -> float:
        """AER of all words in percent."""
        return 100 * self.all.aer

    def cells(self) -> tuple[float | None, ...]:
        """AER, AER of linked words, precision, recall, in percent."""
        values = (self.all.aer, self.linked.aer, self.all.precision, self.all.recall)
        return tuple(none_if_nan(100 * value) for value in values)


@dataclass(frozen=True)
class AlignmentResult:
    """Error rates and norms of every layer and head."""

    rates: Mapping[tuple[str, str], Mapping[Place, AlignmentRates]]  # setting, method -> place -> rates
    norms: Mapping[Place, float]  # of each head

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.norms})

    @property
    def highest_layer(self) -> int:
        """The layer with the highest norm."""
        return max(self.layers, key=lambda layer: sum(norm for (one, _), norm in self.norms.items() if one == layer))

    @property
    def highest_head(self) -> Place:
        """The head with the highest norm."""
        return max(self.norms, key=lambda place: self.norms[place])

    def by_layer(self, way: str, method: str) -> list[AlignmentRates]:
        return [self.rates[way, method][layer, LAYER_LEVEL] for layer in self.layers]

    def best_layer(self, way: str, method: str) -> int:
        """The layer with the lowest error rate."""
        rates = self.rates[way, method]
        return min(self.layers, key=lambda layer: rates[layer, LAYER_LEVEL].aer)


def alignment_section(setting: Setting, runs: Runs) -> Section:
    """AER by layer and head, of the best layers and those with the highest norm, and an example."""
    run, readings = runs[PARALLEL], setting.readings
    found = AlignmentResult(alignment_error_rates(run), cross_attention_head_norms(run, readings.average_norm))
    best = {key: found.best_layer(*key) for key in WAYS}
    numbers = _alignment_numbers(found, readings.aer_correlation)
    layer_rows = (
        (way, method, layer + 1, *rates.cells())
        for way, method in WAYS
        for layer, rates in zip(found.layers, found.by_layer(way, method), strict=True)
    )
    head_rows = (
        (way, method, layer + 1, head + 1, *found.rates[way, method][layer, head].cells(), norm)
        for way, method in WAYS
        for (layer, head), norm in found.norms.items()
    )
    folded = partial(Table.of, folded=True)
    columns = {"setting": "", "method": "", "layer": ""}
    title = "Alignment error rate by"
    curves = {f"{way}, {method}": [rates.aer for rates in found.by_layer(way, method)] for way, method in WAYS}
    layers = [layer + 1 for layer in found.layers]
    return Section(
        "alignment",
        "Word alignment from cross-attention",
        TEXT.format(*_count_gold_links(setting, run)),
        (
            _alignment_summary(found, best),
            layer_picture("table3-layers", f"{title} layer", curves, layers, "AER (%)", "Lower is better."),
            folded("table3-by-layer", f"{title} layer", {**columns, **RATES}, layer_rows),
            *_error_rates_and_norms(found, readings.aer_correlation),
            _error_rate_correlations(numbers),
            folded("table3-by-head", f"{title} head", {**columns, "head": "", **RATES, NORM: ".4f"}, head_rows),
            *alignment_examples(setting, best),
        ),
        _alignment_claims(found, best, numbers),
        finite_numbers(numbers),
    )


def alignment_error_rates(run: Run) -> dict[tuple[str, str], dict[Place, AlignmentRates]]:
    """The error rates of every layer (head -1) and head over the corpus."""
    keys, counts = ("setting", "method", "layer", "head"), ("links", "linked", "sure", "in_sure", "in_possible")
    frame = run.scan("alignment_hits").group_by(keys).agg(pl.col(*counts).sum()).sort(keys).collect()
    found: dict[tuple[str, str], dict[Place, AlignmentRates]] = {}
    for way, method, layer, head, links, linked, sure, in_sure, in_possible in frame.iter_rows():
        both = (Hits(predicted, sure, in_sure, in_possible) for predicted in (links, linked))
        found.setdefault((way, method), {})[layer, head] = AlignmentRates(*both)
    return found


def cross_attention_head_norms(run: Run, average: str) -> dict[Place, float]:
    """layer, head -> mean of alpha ||f(x)||: over all cells of all sentences, or over the means of the sentences."""
    mean = (pl.col("sum") / pl.col("cells")).mean() if average == "sentences" else pl.col("sum").sum() / pl.sum("cells")
    frame = run.scan("cross_norms").group_by("layer", "head").agg(mean.alias("norm")).sort("layer", "head").collect()
    return {(layer, head): norm for layer, head, norm in frame.iter_rows()}


def _alignment_numbers(found: AlignmentResult, method_of_errors: str) -> dict[str, float]:
    """Mean and best AER by method, AER of the highest norms, and the correlations of a head's error with its norm."""
    numbers: dict[str, float] = {}
    norms = list(found.norms.values())
    for way in SETTINGS:
        key = f"alignment.{way}"
        for method in METHODS:
            by_layer = [rates.aer for rates in found.by_layer(way, method)]
            numbers |= {f"{key}.{method}.mean": fmean(by_layer), f"{key}.{method}.best": min(by_layer)}
        rates = found.rates[way, "norm"]
        numbers[f"{key}.highest_layer"] = rates[found.highest_layer, LAYER_LEVEL].aer
        numbers[f"{key}.highest_head"] = rates[found.highest_head].aer
        errors = [found.rates[way, method_of_errors][place].all.aer for place in found.norms]
        numbers[f"{key}.rho"] = spearman_of_lists(errors, norms)
        x, y = (torch.tensor(values, dtype=torch.float64) for values in (errors, norms))
        numbers[f"{key}.r"] = float(pearson(x, y)) if len(x) > 1 else nan
    return numbers


def _count_gold_links(setting: Setting, run: Run) -> tuple[int, int, int, float]:
    """Sure links, possible links, sentence pairs and the share of linked target words, over the analysed entries."""
    done = set(run.scan("items").select("id").collect()["id"].to_list())
    entries = [entry for entry in setting.read() if isinstance(entry, Entry) and entry.id in done]
    words = sum(len(entry.target or ()) for entry in entries)
    linked = sum(len({target for _, target in entry.possible}) for entry in entries)
    sure, possible = sum(len(entry.sure) for entry in entries), sum(len(entry.possible) for entry in entries)
    return sure, possible, len(entries), linked / words


def _alignment_summary(found: AlignmentResult, best: Mapping[tuple[str, str], int]) -> Table:
    """Table 3 of the paper, for both AWO and AWI."""
    rows: list[tuple[Cell, ...]] = []
    layer, (head_layer, head) = found.highest_layer, found.highest_head
    highest = {
        "highest_layer": (f"layer with the highest norm: {layer + 1}", (layer, LAYER_LEVEL)),
        "highest_head": (f"head with the highest norm: L{head_layer + 1}H{head + 1}", (head_layer, head)),
    }
    for way in SETTINGS:
        key = f"alignment.{way}"
        for method in METHODS:
            columns = zip(*(rates.cells() for rates in found.by_layer(way, method)), strict=True)
            means = [none_if_nan(fmean(nan if value is None else value for value in column)) for column in columns]
            rows.append((way, method, "mean over layers", *means, THEIRS.get(f"{key}.{method}.mean")))
            at = best[way, method]
            cells = found.rates[way, method][at, LAYER_LEVEL].cells()
            rows.append((way, method, f"best layer: {at + 1}", *cells, THEIRS.get(f"{key}.{method}.best")))
        for name, (label, place) in highest.items():
            cells = found.rates[way, "norm"][place].cells()
            rows.append((way, "norm", label, *cells, THEIRS.get(f"{key}.{name}")))
    return Table.of(
        "table3-alignment",
        "Table 3. Alignment error rate",
        {"setting": "", "method": "", "of": "", **RATES, f"AER (%), {REFERENCE}": ".1f"},
        rows,
        "Published: mean of five models for another language pair.",
    )


def _error_rates_and_norms(found: AlignmentResult, method: str) -> Iterator[Picture]:
    """Maps of the error rates (by norms) and mean norms of all heads, and a scatter plot of both."""
    by_norm, chosen = (
        {way: {place: found.rates[way, one][place].aer for place in found.norms} for way in SETTINGS}
        for one in ("norm", method)
    )
    panels = {f"AER (%), {way}": errors for way, errors in by_norm.items()}
    title = "Alignment error rate by norms, and mean norm, of each head"
    yield head_maps_picture("table3-heads", title, {**panels, NORM: found.norms})
    points = [(found.norms[place], error, way) for way in SETTINGS for place, error in chosen[way].items()]
    x, y, groups = (list(column) for column in zip(*points, strict=True))
    chart = charts.scatter_chart(x, y, xlabel=NORM, ylabel="AER (%)", groups=groups)
    yield Picture("table3-norms", f"Mean norm and error rate (by {method}) of each head", chart)


def _error_rate_correlations(numbers: Mapping[str, float]) -> Table:
    columns = ("Spearman", "Pearson", f"Spearman, {REFERENCE}", f"Pearson, {REFERENCE}")
    keys = {way: (f"alignment.{way}.rho", f"alignment.{way}.r") for way in SETTINGS}
    return Table.of(
        "table3-correlation",
        "Correlation of a head's error rate with its mean norm",
        {"setting": "", **dict.fromkeys(columns, ".2f")},
        ((way, *(none_if_nan(numbers[key]) for key in both), *map(THEIRS.get, both)) for way, both in keys.items()),
    )


def alignment_examples(setting: Setting, best: Mapping[tuple[str, str], int]) -> Iterator[Picture]:
    """The alignment matrices of one sentence pair, by weights and by norms, at the best layer by norms."""
    for entry in _example_pairs(setting):
        try:
            source, target, maps = _word_matrices(setting, entry, best)
        except NormscopeError:  # its tokens cannot be assigned to words; try another pair
            continue
        for way in SETTINGS:
            panels = {f"{method}, layer {best[way, 'norm'] + 1}": maps[way, method] for method in METHODS}
            axes = {"rows": target, "columns": source}
            figure = map_charts.heat_map_charts(panels, **axes, xlabel="source", ylabel="target", shared=False)  # type: ignore[arg-type]
            _frame_gold_links(figure, len(panels), entry)
            yield Picture(
                f"alignment-{way.lower()}",
                f"Alignment of one sentence pair, {way}",
                figure,
                f"{entry.id}. Frames: gold links, dashed if only possible. The layer is the one with the lowest AER by "
                "norms over the corpus.",
            )
        return


def _example_pairs(setting: Setting) -> list[Entry]:
    """The entry whose id is the example; otherwise entries with links, those of preferred length first."""
    linked = [entry for entry in setting.entries if entry.possible]
    asked = [entry for entry in linked if entry.id == setting.example]

    def is_long(entry: Entry) -> bool:
        return not all(FEWEST <= len(side or ()) <= MOST for side in (entry.words, entry.target))

    return asked or sorted(linked, key=is_long)[:20]


def _word_matrices(
    setting: Setting, entry: Entry, best: Mapping[tuple[str, str], int]
) -> tuple[list[str], list[str], dict[tuple[str, str], NDArray[np.float64]]]:
    """Source labels, target labels, and the word-level matrix for each setting and method."""
    lens = setting.lens
    (item,) = encode(lens.loaded, (" ".join(entry.words or ()), " ".join(entry.target or ())))
    (result,) = run_batch(
        lens.loaded,
        [item],
        requests_for(lens.loaded, Options(scopes=("XATTN-W", "XATTN-N"), heads=[0])),
        lens.workspace,
    )
    assert isinstance(result, EncoderDecoderAnalysis)
    decoder = result.side("decoder")
    words = aligned_word_ids(Sample(entry, item, item, lens, decoder, result))
    special = [item.sides["encoder"].names[n] for n, word in enumerate(words[0]) if word is None]
    maps = {
        (way, method): alignment_maps_of_words(found[best[way, "norm"], 0], *words, way).double().numpy()
        for way in SETTINGS
        for method, found in cross_attention_maps(decoder).items()
    }
    return [*(entry.words or ()), *special], list(entry.target or ()), maps


def _frame_gold_links(figure: Figure, panels: int, entry: Entry) -> None:
    """Draw a frame around each gold link."""
    from matplotlib.patches import Rectangle

    for axes in figure.axes[:panels]:
        for source, target in sorted(entry.possible):
            line = "-" if (source, target) in entry.sure else (0, (1.5, 1))
            corner = (source - 0.44, target - 0.44)
            axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=GOLD, linewidth=1.0, linestyle=line))


def _alignment_claims(
    found: AlignmentResult, best: Mapping[tuple[str, str], int], numbers: Mapping[str, float]
) -> tuple[Claim, ...]:
    claims = []
    for end, what in (("mean", "on average over layers"), ("best", "in the best layer")):
        for way in SETTINGS:
            text = f"Norms give better alignments than weights {what} ({way})"
            keys = [f"alignment.{way}.{method}.{end}" for method in ("norm", "weight")]
            norm, weight = ours = [numbers[key] for key in keys]
            template = "AER {:.1f} % against {:.1f} %"
            claims.append(claim_with_published(text, norm < weight, template, ours, THEIRS, *keys))
    early = found.layers[: max(1, len(found.layers) // 2)]
    awi, awo = (fmean(found.rates[way, "norm"][n, LAYER_LEVEL].aer for n in early) for way in ("AWI", "AWO"))
    both = ("alignment.AWI.norm.best", "alignment.AWO.norm.best")
    claims += [
        Claim(
            "In early layers AWI gives better alignments than AWO",
            awi < awo,
            f"AER by norms {awi:.1f} % against {awo:.1f} % in layers 1 to {early[-1] + 1}",
            quote_published(THEIRS, "best layer by norms: {:.1f} % (2) against {:.1f} % (5)", *both),
        ),
        Claim(
            "With AWI the layer with the highest norm has the lowest error rate",
            found.highest_layer == best["AWI", "norm"],
            f"layer {found.highest_layer + 1} has the highest norm, layer {best['AWI', 'norm'] + 1} the lowest AER",
            "layer 2 in all five models",
        ),
    ]
    for way, sign, end in (
        ("AWI", -1, "align better: error rate and norm correlate negatively (below {})"),
        ("AWO", 1, "align worse: error rate and norm correlate positively (above {})"),
    ):
        text = f"With {way}, heads with a higher norm {end.format(sign * CLEAR)}"
        key = f"alignment.{way}.rho"
        rho = numbers[key]
        holds, why = sign * rho > CLEAR, "too few heads"
        claims.append(claim_with_published(text, holds, "Spearman {:.2f}", (rho,), THEIRS, key, undefined=why))
    return tuple(claims)
