"""Word alignment from cross-attention, by weights and by norms (EMNLP 2020, section 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from normscope.corpus.items import Entry
from normscope.corpus.measuring import Sample
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.errors import NormscopeError
from normscope.measures.alignment import SETTINGS, Hits, word_maps
from normscope.measures.frequency import spearman
from normscope.measures.similarity import correlation
from normscope.papers import charts, map_charts, published
from normscope.papers.emnlp2020.measures import LAYER_LEVEL, cross_maps, words_of
from normscope.papers.emnlp2020.shared import CLEAR, PAPER, PARALLEL, finite
from normscope.papers.published import said
from normscope.papers.report import Cell, Claim, Picture, Section, Table, known

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

METHODS = ("weight", "norm")
REFERENCE = "German-English, published"
FEWEST, MOST = 6, 16  # words on either side of the sentence pair that is drawn, where there is such a one
MARK = "#d55e00"
TEXT = (
    "The decoder is given the gold translation (teacher forcing). AWO (alignment with output) takes the row of the "
    "cross-attention that writes a word, AWI (alignment with input) the row that reads it, one later. Subwords become "
    "words: sums over the subwords of a source word, means over those of a target word. Each target word is linked to "
    "the source word with the largest cell; where that is an end token, it has no link.\n\n"
    "AER = 1 - (|A and S| + |A and P|) / (|A| + |S|) over the corpus, for the links A that are drawn, the sure ones S "
    "and the possible ones P of the gold data: {:,} sure and {:,} possible links in {:,} sentence pairs, {:.0%} of the "
    "target words with a link. Gold data that leave many words unlinked punish whatever links every word, so the error "
    "rate is also given for the links of those target words alone that have one."
)


@dataclass(frozen=True)
class Rates:
    """Error rates of one layer or head."""

    all: Hits
    linked: Hits  # of target words with a gold link

    def cells(self) -> tuple[float | None, ...]:
        """AER, AER of linked words, precision, recall, in percent."""
        values = (self.all.aer, self.linked.aer, self.all.precision, self.all.recall)
        return tuple(known(100 * value) for value in values)


Found = Mapping[tuple[str, str], Mapping[tuple[int, int], Rates]]  # setting, method -> layer, head -> rates
RATES = ("AER (%)", "AER of linked words (%)", "precision (%)", "recall (%)")
FORMATS = dict.fromkeys(RATES, ".1f")


def alignment(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """The alignment study: AER by layer and head, the best ones, those of the highest norm, and drawn alignments."""
    run = runs[PARALLEL]
    found, norms = rates(run), average_norms(run, setting.readings.average_norm)
    layers = sorted({layer for layer, _ in norms})
    strongest = max(layers, key=lambda layer: sum(norm for (one, _), norm in norms.items() if one == layer))
    head = max(norms, key=lambda place: norms[place])
    reference = published.reference(PAPER)
    numbers: dict[str, float] = {}
    for way in SETTINGS:
        for method in METHODS:
            by_layer = [100 * found[way, method][layer, LAYER_LEVEL].all.aer for layer in layers]
            numbers[f"alignment.{way}.{method}.mean"] = fmean(by_layer)
            numbers[f"alignment.{way}.{method}.best"] = min(by_layer)
        numbers[f"alignment.{way}.highest_layer"] = 100 * found[way, "norm"][strongest, LAYER_LEVEL].all.aer
        numbers[f"alignment.{way}.highest_head"] = 100 * found[way, "norm"][head].all.aer
        errors = [found[way, setting.readings.aer_correlation][place].all.aer for place in norms]
        numbers |= _correlations(f"alignment.{way}", errors, list(norms.values()))
    best = {(way, method): _best(found[way, method], layers) for way in SETTINGS for method in METHODS}
    return Section(
        "alignment",
        "Word alignment from cross-attention",
        TEXT.format(*_gold(setting, run)),
        (
            _summary(found, layers, best, strongest, head, reference),
            _layer_chart(found, layers),
            _layer_table(found, layers),
            _head_maps(found, norms),
            _norm_scatter(setting, found, norms),
            _correlation_table(numbers, reference),
            _head_table(found, norms),
            *drawn_example(setting, best),
        ),
        _claims(found, layers, best, strongest, numbers, reference),
        finite(numbers),
    )


def rates(run: Run) -> dict[tuple[str, str], dict[tuple[int, int], Rates]]:
    """The error rates of every layer (head -1) and head over the corpus."""
    import polars as pl

    keys, counts = ("setting", "method", "layer", "head"), ("links", "linked", "sure", "in_sure", "in_possible")
    frame = run.scan("alignment_hits").group_by(keys).agg(pl.col(*counts).sum()).sort(keys).collect()
    found: dict[tuple[str, str], dict[tuple[int, int], Rates]] = {}
    for way, method, layer, head, links, linked, sure, in_sure, in_possible in frame.iter_rows():
        both = (Hits(drawn, sure, in_sure, in_possible) for drawn in (links, linked))
        found.setdefault((way, method), {})[layer, head] = Rates(*both)
    return found


def average_norms(run: Run, average: str) -> dict[tuple[int, int], float]:
    """layer, head -> mean of alpha ||f(x)||: over all cells of all sentences, or over the means of the sentences."""
    import polars as pl

    mean = (pl.col("sum") / pl.col("cells")).mean() if average == "sentences" else pl.col("sum").sum() / pl.sum("cells")
    frame = run.scan("cross_norms").group_by("layer", "head").agg(mean.alias("norm")).sort("layer", "head").collect()
    return {(layer, head): norm for layer, head, norm in frame.iter_rows()}


def _correlations(key: str, errors: Sequence[float], norms: Sequence[float]) -> dict[str, float]:
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (errors, norms))
    return {f"{key}.rho": spearman(errors, norms), f"{key}.r": float(correlation(x, y)) if len(x) > 1 else nan}


def _best(by_place: Mapping[tuple[int, int], Rates], layers: Sequence[int]) -> int:
    """The layer of the lowest error rate."""
    return min(layers, key=lambda layer: by_place[layer, LAYER_LEVEL].all.aer)


def _gold(setting: Setting, run: Run) -> tuple[int, int, int, float]:
    """Sure and possible links, sentence pairs, and the share of target words with a link, of what was analysed."""
    done = set(run.scan("items").select("id").collect()["id"].to_list())
    entries = [entry for entry in setting.read() if isinstance(entry, Entry) and entry.id in done]
    words = sum(len(entry.target or ()) for entry in entries)
    linked = sum(len({target for _, target in entry.possible}) for entry in entries)
    sure, possible = sum(len(entry.sure) for entry in entries), sum(len(entry.possible) for entry in entries)
    return sure, possible, len(entries), linked / words


def _summary(
    found: Found,
    layers: Sequence[int],
    best: Mapping[tuple[str, str], int],
    strongest: int,
    head: tuple[int, int],
    reference: Mapping[str, float],
) -> Table:
    """Table 3 of the paper, with AWI beside it."""
    rows: list[tuple[Cell, ...]] = []
    for way in SETTINGS:
        for method in METHODS:
            some = found[way, method]
            means = [
                known(fmean(nan if value is None else value for value in column))
                for column in zip(*(some[layer, LAYER_LEVEL].cells() for layer in layers), strict=True)
            ]
            key = f"alignment.{way}.{method}"
            rows.append((way, method, "mean over layers", *means, reference.get(f"{key}.mean")))
            at = best[way, method]
            cells = some[at, LAYER_LEVEL].cells()
            rows.append((way, method, f"best layer: {at + 1}", *cells, reference.get(f"{key}.best")))
        cells = found[way, "norm"][strongest, LAYER_LEVEL].cells()
        theirs = [reference.get(f"alignment.{way}.highest_{what}") for what in ("layer", "head")]
        rows.append((way, "norm", f"layer of the highest norm: {strongest + 1}", *cells, theirs[0]))
        name = f"head of the highest norm: L{head[0] + 1}H{head[1] + 1}"
        rows.append((way, "norm", name, *found[way, "norm"][head].cells(), theirs[1]))
    column = f"AER (%), {REFERENCE}"
    return Table(
        "table3-alignment",
        "Table 3. Alignment error rate",
        ("setting", "method", "of", *RATES, column),
        tuple(rows),
        FORMATS | {column: ".1f"},
        "Published: the mean of five models of another language pair.",
    )


def _layer_chart(found: Found, layers: Sequence[int]) -> Picture:
    series = {
        f"{way}, {method}": [100 * found[way, method][layer, LAYER_LEVEL].all.aer for layer in layers]
        for way in SETTINGS
        for method in METHODS
    }
    chart = charts.line_chart(series, x=[layer + 1 for layer in layers], ylabel="AER (%)")
    return Picture("table3-layers", "Alignment error rate by layer", chart, "Lower is better.")


def _layer_table(found: Found, layers: Sequence[int]) -> Table:
    return Table(
        "table3-by-layer",
        "Alignment error rate by layer",
        ("setting", "method", "layer", *RATES),
        tuple(
            (way, method, layer + 1, *found[way, method][layer, LAYER_LEVEL].cells())
            for way in SETTINGS
            for method in METHODS
            for layer in layers
        ),
        FORMATS,
        folded=True,
    )


def _head_table(found: Found, norms: Mapping[tuple[int, int], float]) -> Table:
    return Table(
        "table3-by-head",
        "Alignment error rate by head",
        ("setting", "method", "layer", "head", *RATES, "mean ||alpha f||"),
        tuple(
            (way, method, layer + 1, head + 1, *found[way, method][layer, head].cells(), norm)
            for way in SETTINGS
            for method in METHODS
            for (layer, head), norm in norms.items()
        ),
        FORMATS | {"mean ||alpha f||": ".4f"},
        folded=True,
    )


def _head_maps(found: Found, norms: Mapping[tuple[int, int], float]) -> Picture:
    panels = {
        f"AER (%), {way}": _grid({place: 100 * found[way, "norm"][place].all.aer for place in norms})
        for way in SETTINGS
    }
    panels["mean ||alpha f||"] = grid = _grid(norms)
    chart = map_charts.heat_maps(
        panels,
        rows=range(1, grid.shape[0] + 1),
        columns=range(1, grid.shape[1] + 1),
        xlabel="head",
        ylabel="layer",
        shared=False,
    )
    return Picture("table3-heads", "Alignment error rate by norms, and mean norm, of each head", chart)


def _grid(values: Mapping[tuple[int, int], float]) -> NDArray[np.float64]:
    """(layers, heads)."""
    shape = tuple(1 + max(place[n] for place in values) for n in (0, 1))
    grid = np.full(shape, nan)
    for place, value in values.items():
        grid[place] = value
    return grid


def _norm_scatter(setting: Setting, found: Found, norms: Mapping[tuple[int, int], float]) -> Picture:
    method = setting.readings.aer_correlation
    errors = [100 * found[way, method][place].all.aer for way in SETTINGS for place in norms]
    chart = charts.scatter(
        [*norms.values()] * len(SETTINGS),
        errors,
        xlabel="mean ||alpha f||",
        ylabel="AER (%)",
        groups=[way for way in SETTINGS for _ in norms],
    )
    return Picture("table3-norms", f"Mean norm and error rate (by {method}) of each head", chart)


def _correlation_table(numbers: Mapping[str, float], reference: Mapping[str, float]) -> Table:
    columns = ("setting", "Spearman", "Pearson", f"Spearman, {REFERENCE}", f"Pearson, {REFERENCE}")
    return Table(
        "table3-correlation",
        "Correlation of a head's error rate with its mean norm",
        columns,
        tuple(
            (
                way,
                *(known(numbers[f"alignment.{way}.{key}"]) for key in ("rho", "r")),
                *(reference.get(f"alignment.{way}.{key}") for key in ("rho", "r")),
            )
            for way in SETTINGS
        ),
        dict.fromkeys(columns[1:], ".2f"),
    )


def drawn_example(setting: Setting, best: Mapping[tuple[str, str], int]) -> Iterator[Picture]:
    """The alignment matrices of one sentence pair, by weights and by norms, at the best layer by norms."""
    for entry in _candidates(setting):
        try:
            source, target, maps = _matrices(setting, entry, best)
        except NormscopeError:  # its words cannot be told apart; another one's can
            continue
        for way in SETTINGS:
            panels = {f"{method}, layer {best[way, 'norm'] + 1}": maps[way, method] for method in METHODS}
            figure = map_charts.heat_maps(
                panels, rows=target, columns=source, xlabel="source", ylabel="target", shared=False
            )
            _mark(figure, len(panels), entry)
            yield Picture(
                f"alignment-{way.lower()}",
                f"Alignment of one sentence pair, {way}",
                figure,
                f"{entry.id}. Framed: gold links, dashed where they are merely possible. The layer is the best one by "
                "norms over the corpus.",
            )
        return


def _candidates(setting: Setting) -> list[Entry]:
    """The entry that was asked for by its id; else those with links, of a good length first."""
    linked = [entry for entry in setting.entries if entry.possible]
    asked = [entry for entry in linked if entry.id == setting.example]

    def long(entry: Entry) -> bool:
        return not all(FEWEST <= len(side or ()) <= MOST for side in (entry.words, entry.target))

    return asked or sorted(linked, key=long)[:20]


def _matrices(
    setting: Setting, entry: Entry, best: Mapping[tuple[str, str], int]
) -> tuple[list[str], list[str], dict[tuple[str, str], NDArray[np.float64]]]:
    """The labels of source and target, and the matrix of each setting and method."""
    lens = setting.lens
    (item,) = lens.items((" ".join(entry.words or ()), " ".join(entry.target or ())))
    (result,) = lens.run([item], lens.requests(scopes=("XATTN-W", "XATTN-N"), heads=[0]))
    assert isinstance(result, EncoderDecoderAnalysis)
    decoder = result.side("decoder")
    words = words_of(Sample(entry, item, item, lens, decoder, result))
    special = [item.sides["encoder"].names[n] for n, word in enumerate(words[0]) if word is None]
    maps = {
        (way, method): word_maps(found[best[way, "norm"], 0], *words, way).double().numpy()
        for way in SETTINGS
        for method, found in cross_maps(decoder).items()
    }
    return [*(entry.words or ()), *special], list(entry.target or ()), maps


def _mark(figure: Figure, panels: int, entry: Entry) -> None:
    """Frames around the gold links."""
    from matplotlib.patches import Rectangle

    for axes in figure.axes[:panels]:
        for source, target in sorted(entry.possible):
            line = "-" if (source, target) in entry.sure else (0, (1.5, 1))
            corner = (source - 0.44, target - 0.44)
            axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=MARK, linewidth=1.0, linestyle=line))


def _claims(
    found: Found,
    layers: Sequence[int],
    best: Mapping[tuple[str, str], int],
    strongest: int,
    numbers: Mapping[str, float],
    reference: Mapping[str, float],
) -> tuple[Claim, ...]:
    claims = []
    for key, what in (("mean", "on average over layers"), ("best", "in the best layer")):
        for way in SETTINGS:
            keys = [f"alignment.{way}.{method}.{key}" for method in METHODS]
            weight, norm = (numbers[one] for one in keys)
            claims.append(
                Claim(
                    f"Norms align better than weights {what} ({way})",
                    norm < weight,
                    f"AER {norm:.1f} % against {weight:.1f} %",
                    said(reference, "AER {:.1f} % against {:.1f} %", *reversed(keys)),
                )
            )
    early = layers[: max(1, len(layers) // 2)]
    rates = {way: fmean(100 * found[way, "norm"][n, LAYER_LEVEL].all.aer for n in early) for way in SETTINGS}
    claims.append(
        Claim(
            "In early layers AWI aligns better than AWO",
            rates["AWI"] < rates["AWO"],
            f"AER by norms {rates['AWI']:.1f} % against {rates['AWO']:.1f} % in layers 1 to {early[-1] + 1}",
            said(
                reference, "best layer by norms: {:.1f} % (2) against {:.1f} % (5)", "alignment.AWI.norm.best",
                "alignment.AWO.norm.best",
            ),
        )
    )  # fmt: skip
    claims.append(
        Claim(
            "With AWI the layer of the highest norm is the best one",
            strongest == best["AWI", "norm"],
            f"layer {strongest + 1} has the highest norm, layer {best['AWI', 'norm'] + 1} the lowest AER",
            "layer 2 in all five models",
        )
    )
    for way, sign, text in (
        ("AWI", -1, "With AWI heads of a higher norm align better: error rate and norm correlate negatively, below {}"),
        ("AWO", 1, "With AWO they align worse: error rate and norm correlate positively, above {}"),
    ):
        rho = numbers[f"alignment.{way}.rho"]
        claims.append(
            Claim(
                text.format(sign * CLEAR),
                None if isnan(rho) else sign * rho > CLEAR,
                "there are too few heads" if isnan(rho) else f"Spearman {rho:.2f}",
                said(reference, "Spearman {:.2f}", f"alignment.{way}.rho"),
            )
        )
    return tuple(claims)
