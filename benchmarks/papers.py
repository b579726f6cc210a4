"""The papers' experiments compared with a naive implementation."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import polars as pl
import torch
from scipy.stats import spearmanr

from benchmarks.measures import Row
from benchmarks.published import Published
from normscope import Analyzer, corpus, default_model
from normscope.corpus.readers.paragraph_pairs import read_paragraph_pairs
from normscope.inputs.encode import encode

NAME = "MiniLM"
SCOPES = ("ATTN-W", "ATTN-N", "ATTNRES-N", "ATTNRESLN-N", "ATTNRESLNFF-N", "ATTNRESLNFFRES-N", "ATTNRESLNFFRESLN-N")


def rows() -> Iterator[Callable[[], Row]]:
    """Every measurement with its bar. The pairs come from NORMSCOPE_TEST_DATA, if it is set."""
    data = Path(os.environ.get("NORMSCOPE_TEST_DATA", "/nowhere")) / "data/wikitext2.raw.test.txt"
    if data.is_file():
        yield lambda: similarity_of_all_scopes(data)
    else:
        missing = "NORMSCOPE_TEST_DATA has no data/wikitext2.raw.test.txt"
        yield lambda: Row("naive / similarity of all scopes", NAME, "", note=missing)
    yield bootstrap_of_a_layer


def similarity_of_all_scopes(data: Path, entries: int = 100) -> Row:
    """Fig. 12 and Table 1 of the FF paper: the naive way, which materialises every vector and passes every pair of maps
    to scipy, relative to a corpus run. Both use the first pairs of paragraphs of `data`, with at most 128 tokens."""
    lens = Analyzer.from_pretrained(default_model.find())
    texts = [entry.given for entry in corpus.strict(read_paragraph_pairs(data, tokenizer=lens.tokenizer))][:entries]
    begin = time.perf_counter()
    expected = _naive(lens, texts)
    naive = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        corpus.run(
            data, lens, Path(folder) / "run", format="pairs", measures=["similarity"], scopes=SCOPES, limit=entries
        )
        found = corpus.open(Path(folder) / "run").scan("similarity").collect()
        frame = found.group_by("scope", "other").agg(pl.col("spearman").mean())
        means = {(scope, other): value for scope, other, value in frame.iter_rows()}
        ours = time.perf_counter() - begin
    worst = max(abs(means[pair] - expected[pair]) for pair in expected)
    if not worst < 1e-3:
        raise AssertionError(f"The two ways differ by {worst:.1e}: the measurement would be meaningless.")
    return Row(
        "naive / similarity of all scopes",
        NAME,
        f"{len(texts)} pairs of up to 128 tokens",
        naive / ours,
        2.3,
        True,
        seconds={"naive": [naive], "ours": [ours]},
        note=f"they differ by {worst:.0e}",
    )


def _naive(lens: Analyzer, texts: Sequence[object]) -> dict[tuple[str, str], float]:
    """(scope, other) -> the mean over entries and layers."""
    published = Published(lens.loaded.base, feed_forward=True)
    found: dict[tuple[str, str], list[float]] = {pair: [] for pair in combinations(SCOPES, 2)}
    for text in texts:
        (item,) = encode(lens.loaded, text)
        batch = {key: value[None] for key, value in item.tensors.items()}
        for layer in published(batch):
            for a, b in found:
                one, other = (layer[scope][0].flatten().numpy() for scope in (a, b))
                found[a, b].append(float(spearmanr(one, other).statistic))
    return {pair: float(np.mean(values)) for pair, values in found.items()}


def bootstrap_of_a_layer(instances: int = 200_000) -> Row:
    """Seconds for 10,000 resamples of the difference of two means."""
    from normscope.measures.bootstrap import bootstrap_mean_difference

    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(instances, generator=generator, dtype=torch.float64).numpy()
    others = torch.randn(instances, generator=generator, dtype=torch.float64).numpy()
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        bootstrap_mean_difference(targets, others, resamples=10_000, seed=0)
        seconds.append(time.perf_counter() - begin)
    return Row(
        "bootstrap, 10,000 resamples", "", f"{instances:,} + {instances:,} instances", min(seconds), 2.0,
        unit=" s", seconds={"ours": seconds},
    )  # fmt: skip
