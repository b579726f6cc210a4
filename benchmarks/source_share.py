"""Do translations that do not belong to their source stand out by how little they rest on it?

`python -m benchmarks.source_share MODEL DATA [COUNT]` lets an encoder-decoder read COUNT translations (default 100)
twice: with their own source, and with the source of another pair of nearly the same length. For each score it prints
the area under the ROC curve, how often a right source scores higher than a wrong one, with a bootstrap over the
translations. DATA has sentence pairs in the format `alignments`, of which only the words are used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from normscope import Analyzer, EncoderDecoderAnalysis
from normscope.corpus import read, strict
from normscope.corpus.word_links import parallel_words
from normscope.inputs.encode import encode, forward_inputs
from normscope.labels import Label, source_labels
from normscope.measures.separation import estimate_area_under_curve
from normscope.measures.source_share import source_share

SHORTEST = 6  # words of a translation; shorter ones fit many sources
CANDIDATES = 200  # the shortest translations, from which COUNT are drawn
Pair = tuple[str, str]
SCORES = {
    "exact": "share of the source in the last states, exact decomposition",
    "ALTI+": "share of the source in the last states, ALTI+",
    "logit": "what the source adds to the logits of the translation's tokens, exact decomposition, mean",
    "layer norms": "share of the source in the layers' outputs, mean over layers",
    "attention": "cross-attention that is not on the source's end token, mean over layers",
    "log-probability": "log-probability of the translation's tokens, mean",
}


def sentence_pairs(path: Path) -> list[Pair]:
    """The shortest pairs with at least SHORTEST target words, in the order of their sources' lengths."""
    words = [parallel_words(entry) for entry in strict(read(path, "alignments"))]
    long = sorted((pair for pair in words if len(pair[1]) >= SHORTEST), key=lambda pair: len(pair[1]))
    chosen = sorted(long[:CANDIDATES], key=lambda pair: len(pair[0]))
    return [(" ".join(source), " ".join(target)) for source, target in chosen]


def swap_sources(pairs: Sequence[Pair]) -> list[Pair]:
    """Each translation with the source of the next pair in the order of length, the last one with the one before."""
    others = [*pairs[1:], pairs[-2]]
    return [(source, target) for (_, target), (source, _) in zip(pairs, others, strict=True)]


def mean_source_share(maps: Tensor, columns: Sequence[Label]) -> float:
    """The mean share of the source in maps (..., rows, columns), without the last row, which writes the end."""
    return float(source_share(maps[..., :-1, :], source_labels(columns)).mean())


def score_pair(lens: Analyzer, pair: Pair) -> dict[str, float]:
    """Every score of one translation."""
    flow = lens.flow(pair)
    alti = lens.flow(pair, method="alti+")
    logits = lens.flow(pair, target=slice(1, len(flow.rows)), each=True)
    result = lens.analyze(pair, scopes=["XATTN-W", "layer"])
    assert isinstance(result, EncoderDecoderAnalysis)
    decoder = result.side("decoder")
    return {
        "exact": mean_source_share(flow.map, flow.columns),
        "ALTI+": mean_source_share(alti.map, alti.columns),
        "logit": float(logits.scores[:, source_labels(logits.columns)].sum(-1).mean()),
        "layer norms": mean_source_share(decoder["layer"], decoder.columns),
        "attention": 1 - float(result.cross("XATTN-W")[:, :-1, -1].mean()),
        "log-probability": log_probability(lens, pair),
    }


def log_probability(lens: Analyzer, pair: Pair) -> float:
    """The mean log-probability of the tokens that the decoder reads after its start token."""
    (item,) = encode(lens.loaded, pair)
    with torch.no_grad():
        logits = lens.model(**forward_inputs(lens.loaded, [item])).logits[0]
    ids = item.tensors["decoder_input_ids"][1:]
    return float(logits[:-1].log_softmax(-1).gather(1, ids[:, None]).mean())


def main(model: str, path: str, count: str = "100") -> None:
    lens: Analyzer = Analyzer.from_pretrained(model)
    pairs = sentence_pairs(Path(path))
    both = list(zip(pairs, swap_sources(pairs), strict=True))
    Random(0).shuffle(both)
    drawn = track(both[: int(count)], console=Console(stderr=True))
    found = [(score_pair(lens, right), score_pair(lens, wrong)) for right, wrong in drawn]
    table = Table("score", "right", "swapped", "AUROC", "95 % interval", title=f"{len(found)} translations")
    for name in SCORES:
        right, wrong = ([scores[side][name] for scores in found] for side in (0, 1))
        area = estimate_area_under_curve(right, wrong, "translations")
        means = (f"{sum(values) / len(values):.3f}" for values in (right, wrong))
        table.add_row(name, *means, f"{area.value:.3f}", f"{area.low:.3f} to {area.high:.3f}")
    Console(width=100).print(table)
    for name, what in SCORES.items():
        print(f"{name}: {what}")


if __name__ == "__main__":
    main(*sys.argv[1:])
