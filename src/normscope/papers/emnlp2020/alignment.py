"""Word alignment from cross-attention, by weights and by norms (EMNLP 2020, section 5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import nan
from statistics import fmean
from typing import Any

import torch

from normscope.corpus.entries import Entry
from normscope.corpus.store import Run
from normscope.measures.alignment import SETTINGS
from normscope.measures.correlation import pearson, spearman_of_lists
from normscope.papers.common import finite_numbers, layer_picture
from normscope.papers.emnlp2020.alignment_claims import Others, alignment_claims
from normscope.papers.emnlp2020.alignment_example import alignment_examples
from normscope.papers.emnlp2020.alignment_rates import (
    METHODS,
    WAYS,
    WORDS,
    AlignmentItems,
    AlignmentResult,
    alignment_error_rates,
    cross_attention_head_norms,
    read_alignment_items,
)
from normscope.papers.emnlp2020.measures import LAYER_LEVEL
from normscope.papers.emnlp2020.shared import PARALLEL, THEIRS, head_maps_picture, other_readings
from normscope.papers.study import Runs, Setting
from normscope.reports import charts
from normscope.reports.report import Cell, Picture, Section, Table, none_if_nan

REFERENCE = "German-English, published"
RATES = dict.fromkeys(("AER (%)", "AER of linked words (%)", "precision (%)", "recall (%)"), ".1f")
LABELS = dict(zip(WORDS, RATES, strict=False))  # words -> the column with the error rate over them
KEYS = {"all": "", "linked": ".linked"}  # in the keys of numbers
NORM = "mean ||alpha f||"
LINKED = 0.8  # with fewer target words linked, the error rate over linked words decides
TEXT = (
    "The decoder reads the gold translation (teacher forcing). AWO (alignment with output) uses the row of the "
    "cross-attention that predicts a word, AWI (alignment with input) the row that reads it, one position later. "
    "Subword maps are merged into word maps by summing over the subwords of a source word and averaging over those of "
    "a target word. Each target word is linked to the source word with the largest cell, or to none if that cell "
    "belongs to an end token.\n\n"
    "AER = 1 - (|A and S| + |A and P|) / (|A| + |S|) over the corpus, where A are the predicted links and S and "
    "P the sure and possible links of the gold data: {:,} sure and {:,} possible links in {:,} sentence pairs; {:.0%} "
    "of the target words have a link. Gold data that leave many words unlinked penalise any method that links every "
    "word, so the error rate is also given for the target words with a gold link alone. Best layers, figures and "
    "claims use the error rate {}."
)
USED = {"all": "over all target words", "linked": "over linked target words"}


def alignment_section(setting: Setting, runs: Runs) -> Section:
    """AER by layer and head, of the best layers and those with the highest norm, and an example."""
    run, readings = runs[PARALLEL], setting.readings
    gold = _count_gold_links(setting, run)
    words, why = _decisive_words(readings.aer, gold[-1])
    found = AlignmentResult(alignment_error_rates(run), cross_attention_head_norms(run, readings.average_norm), words)
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
    curves = {f"{way}, {method}": [rates.aer(words) for rates in found.by_layer(way, method)] for way, method in WAYS}
    layers = [layer + 1 for layer in found.layers]
    return Section(
        "alignment",
        "Word alignment from cross-attention",
        TEXT.format(*gold, f"{USED[words]}{why}"),
        (
            _alignment_summary(found, best),
            layer_picture("table3-layers", f"{title} layer", curves, layers, LABELS[words], "Lower is better."),
            folded("table3-by-layer", f"{title} layer", {**columns, **RATES}, layer_rows),
            *_error_rates_and_norms(found, readings.aer_correlation),
            _error_rate_correlations(numbers),
            folded("table3-by-head", f"{title} head", {**columns, "head": "", **RATES, NORM: ".4f"}, head_rows),
            *alignment_examples(setting, best),
        ),
        alignment_claims(found, *_items_of_readings(found, run, readings)),
        finite_numbers(numbers),
    )


def _decisive_words(reading: str, linked: float) -> tuple[str, str]:
    """Over which target words the error rate decides, and the reason."""
    if reading != "auto":
        return reading, ", as requested"
    few = linked < LINKED
    return "linked" if few else "all", f", since {'fewer' if few else 'no fewer'} than {LINKED:.0%} of them are linked"


def _items_of_readings(found: AlignmentResult, run: Run, readings: Any) -> tuple[AlignmentItems, str, Others]:
    """What the claims are decided on: the sentence pairs, the method of the heads' error rates, and the results with
    another average of the norms."""
    others = {
        reading: (
            replace(found, norms=cross_attention_head_norms(run, other.average_norm)),
            read_alignment_items(run, other.average_norm),
        )
        for reading, other in other_readings(readings, average_norm=("cells", "sentences")).items()
    }
    return read_alignment_items(run, readings.average_norm), readings.aer_correlation, others


def _alignment_numbers(found: AlignmentResult, method_of_errors: str) -> dict[str, float]:
    """Mean and best AER by method, AER of the highest norms, and the correlations of a head's error with its norm; over
    all target words, and over linked ones."""
    numbers: dict[str, float] = {}
    norms = list(found.norms.values())
    for way in SETTINGS:
        for words, infix in KEYS.items():
            key = f"alignment.{way}"
            for method in METHODS:
                by_layer = [rates.aer(words) for rates in found.by_layer(way, method)]
                one = f"{key}.{method}{infix}"
                numbers |= {f"{one}.mean": fmean(by_layer), f"{one}.best": min(by_layer)}
            rates = found.rates[way, "norm"]
            numbers[f"{key}{infix}.highest_layer"] = rates[found.highest_layer, LAYER_LEVEL].aer(words)
            numbers[f"{key}{infix}.highest_head"] = rates[found.highest_head].aer(words)
            errors = found.head_errors(way, method_of_errors, words)
            numbers[f"{key}{infix}.rho"] = spearman_of_lists(errors, norms)
            x, y = (torch.tensor(values, dtype=torch.float64) for values in (errors, norms))
            numbers[f"{key}{infix}.r"] = float(pearson(x, y)) if len(x) > 1 else nan
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
        "Published: mean of five models for another language pair, over all target words.",
    )


def _error_rates_and_norms(found: AlignmentResult, method: str) -> Iterator[Picture]:
    """Maps of the error rates (by norms) and mean norms of all heads, and a scatter plot of both."""
    by_norm, chosen = (
        {way: dict(zip(found.norms, found.head_errors(way, one, found.words), strict=True)) for way in SETTINGS}
        for one in ("norm", method)
    )
    label = LABELS[found.words]
    panels = {f"{label}, {way}": errors for way, errors in by_norm.items()}
    title = "Alignment error rate by norms, and mean norm, of each head"
    yield head_maps_picture("table3-heads", title, {**panels, NORM: found.norms})
    points = [(found.norms[place], error, way) for way in SETTINGS for place, error in chosen[way].items()]
    x, y, groups = (list(column) for column in zip(*points, strict=True))
    chart = charts.scatter_chart(x, y, xlabel=NORM, ylabel=label, groups=groups)
    yield Picture("table3-norms", f"Mean norm and error rate (by {method}) of each head", chart)


def _error_rate_correlations(numbers: Mapping[str, float]) -> Table:
    kinds = ("Spearman", "Pearson")
    columns = [*kinds, *(f"{kind}, linked words" for kind in kinds), *(f"{kind}, {REFERENCE}" for kind in kinds)]
    return Table.of(
        "table3-correlation",
        "Correlation of a head's error rate with its mean norm",
        {"setting": "", **dict.fromkeys(columns, ".2f")},
        (
            (
                way,
                *(
                    none_if_nan(numbers[f"alignment.{way}{infix}.{one}"])
                    for infix in KEYS.values()
                    for one in ("rho", "r")
                ),
                *(THEIRS.get(f"alignment.{way}.{one}") for one in ("rho", "r")),
            )
            for way in SETTINGS
        ),
    )
