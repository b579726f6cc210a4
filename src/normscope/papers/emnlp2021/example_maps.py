"""Maps of an example: attention alone, with the residual, and with normalization (EMNLP 2021, Fig. 2).

A single example decides nothing, so whether the diagonal dominates is decided by the share of the diagonal in the maps
of all sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl
from torch import Tensor

from normscope.analysis import Analysis
from normscope.analyzer import Analyzer
from normscope.corpus.entries import Entry
from normscope.corpus.entry_inputs import entry_input
from normscope.errors import NormscopeError
from normscope.measures.first_token import normalise_rows
from normscope.measures.uncertainty import Resampled, resample_means
from normscope.papers.common import describe_common_masking, layer_numbers, layer_table, masked_run, scan_paper_side
from normscope.papers.emnlp2021.ratios import aggregate_rounded, attention_block_scopes, scope_of_alias
from normscope.papers.emnlp2021.sequences import intervals_evidence, reversed_layers_text
from normscope.papers.resampling import estimate_mean_along, pick
from normscope.papers.study import Runs, Setting
from normscope.papers.verdicts import decided_claim
from normscope.reports import map_charts
from normscope.reports.report import Claim, Picture, Section, Table

LONGEST = 22  # most tokens that can all be labelled along the axis of a small map
SEPARATOR = "[SEP]"
KINDS = {"norms": ("-N", "norm of the contribution"), "weights": ("-W", "weight")}  # suffix of the scopes, label
OWN = "own_share"  # table of the run
TITLE = "Maps of an example with attention, residual and normalization"
SHARES = "Share of the diagonal (%): each token's share in its own row, mean over tokens"


def example_maps_section(setting: Setting, runs: Runs) -> Section:
    """The maps of one layer by all methods, of all layers by each method, and the share of the diagonal."""
    depth, asked = setting.depth, setting.readings.example_layer
    result = _analyze_example(setting.lens, example_maps_encoding(setting))
    tokens = list(result.tokens)
    layer = min(asked, depth) if asked > 0 else (depth + 1) // 2
    look: dict[str, Any] = {"rows": tokens, "columns": tokens, "xlabel": "input", "ylabel": "output"}
    pictures = []
    for kind, (suffix, label) in KINDS.items():
        maps = {name: result[name][layer - 1].numpy() for name in result.scopes if name.endswith(suffix)}
        chart = map_charts.heat_map_charts(maps, label=label, shared=False, **look)
        title = f"Maps of the example by {kind}, layer {layer} of {depth}"
        pictures.append(Picture(f"comparison-{kind}", title, chart, "Each map has its own colour scale."))
    for name in result.scopes:
        shares = 100 * normalise_rows(result[name].double()).numpy()
        chart = map_charts.heat_map_charts(
            {f"layer {n}": one for n, one in enumerate(shares, 1)}, label="share of the row (%)", **look
        )
        note = "Each row is divided by its sum, so that layers can be compared."
        note += " Some tokens have no label." if len(tokens) > LONGEST else ""
        pictures.append(Picture(f"comparison-layers-{name}", f"Maps of the example by {name}, all layers", chart, note))
    own = {name: example_maps_own_shares(result[name]) for name in result.scopes}
    table = layer_table("comparison-own", f"{SHARES}, in the example", own, range(1, depth + 1), ".1f")
    text = f"Example ({len(tokens)} tokens): {' '.join(tokens)}"
    if not runs:
        why = "One example decides nothing, so that no claim is tested without a corpus."
        return Section("comparison", TITLE, f"{text}\n\n{why}", (*pictures, table))
    over_corpus, claim, numbers = _diagonal_of_corpus(setting, runs)
    return Section("comparison", TITLE, text, (*pictures, table, over_corpus), (claim,), numbers)


def missing_example_maps(setting: Setting) -> str | None:
    """Why no example can be analysed, or None."""
    if setting.lens.family.input != "text":
        return "The example is a text, but this model does not read text."
    if setting.lens.tokenizer is None:
        return "The example is a text, which needs a tokenizer."
    given = setting.example is not None or setting.entries
    return None if given else "No example text: pass DATA or --example."


def example_maps_encoding(setting: Setting) -> dict[str, list[int]]:
    """The example as a whole, never cut: the given text, or the pair on both sides of a [SEP] in it; by default the
    first entry with at most LONGEST tokens, or else the shortest."""
    lens = setting.lens
    if setting.example is not None:
        return _encode_texts(lens, *(part.strip() for part in setting.example.split(SEPARATOR, 1)))
    shortest: dict[str, list[int]] | None = None
    for encoding in _encoded_entries(setting):
        if len(encoding["input_ids"]) <= LONGEST:
            return encoding
        if shortest is None or len(encoding["input_ids"]) < len(shortest["input_ids"]):
            shortest = encoding
    if shortest is None:
        raise NormscopeError("No entry of the data can be drawn as an example: pass one with --example.")
    return shortest


def example_maps_own_shares(maps: Tensor) -> list[float]:
    """By layer: ``m_ii / sum_j m_ij`` in percent, mean over rows."""
    found: list[float] = (100 * normalise_rows(maps.double()).diagonal(dim1=1, dim2=2).mean(-1)).tolist()
    return found


def _diagonal_of_corpus(setting: Setting, runs: Runs) -> tuple[Table, Claim, dict[str, float]]:
    """The share of the diagonal by method and layer, mean over sequences; the claim about it; its numbers."""
    table = scan_paper_side(runs[masked_run(setting)], OWN, setting.side)
    keys = ["id", "scope", "layer"]
    rows = aggregate_rounded(table, keys, (pl.col("share") * 100).mean()).sort(keys)
    scopes = [name for name in attention_block_scopes(setting.lens) if name in rows["scope"].unique()]
    by_scope = {name: rows.filter(rows["scope"] == name)["share"].to_numpy() for name in scopes}
    values = np.stack([some.reshape(-1, setting.depth) for some in by_scope.values()], 1)
    found = resample_means(values)  # (scopes, layers)
    layers = range(1, setting.depth + 1)
    columns = {name: found.value[n].tolist() for n, name in enumerate(scopes)}
    over_corpus = layer_table(
        "comparison-diagonal",
        f"{SHARES} and sequences",
        columns,
        layers,
        ".1f",
        f"{len(values)} sequences. {describe_common_masking(setting)}",
    )
    numbers = {f"diagonal.{name}": float(np.mean(some)) for name, some in columns.items()}
    for name, some in columns.items():
        numbers |= layer_numbers(f"diagonal.{name}", some)
    return over_corpus, _diagonal_claim(setting, found, scopes), numbers


def _diagonal_claim(setting: Setting, found: Resampled, scopes: list[str]) -> Claim:
    alone, block = (scope_of_alias(setting.lens, alias) for alias in ("attention", "attention-block"))
    by_layer = {name: pick(found, scopes.index(name), -2) for name in (alone, block)}
    means = {name: one.map(lambda v: v.mean(-1)) for name, one in by_layer.items()}
    margins = [by_layer[alone].map(lambda v: 50 - v), by_layer[block].map(lambda v: v - 50)]
    return decided_claim(
        "The diagonal dominates the map with residual and normalization, but not with attention alone",
        [estimate_mean_along(one) for one in margins],
        "share of the diagonal " + ", ".join(f"{float(one.value):.1f} % in {name}" for name, one in means.items()),
        evidence=intervals_evidence(means) + reversed_layers_text(margins),
    )


def _encoded_entries(setting: Setting) -> Iterator[dict[str, list[int]]]:
    """The entries that the model can read, encoded one after the other."""
    lens, positions = setting.lens, setting.lens.loaded.limits.positions
    for entry in setting.entries:
        try:
            given = entry_input(entry, lens) if entry.pieces else _entry_texts(entry)
        except NormscopeError:
            continue
        texts = (given,) if isinstance(given, str) else given
        encoding = given if isinstance(given, dict) else _encode_texts(lens, *texts)
        if positions is None or len(encoding["input_ids"]) <= positions:
            yield encoding


def _encode_texts(lens: Analyzer, *texts: str) -> dict[str, list[int]]:
    encoding = lens.tokenizer(*texts, verbose=False)
    keys = ("input_ids", "token_type_ids") if "token_type_ids" in lens.loaded.limits.keys else ("input_ids",)
    return {key: list(encoding[key]) for key in keys if key in encoding}


def _analyze_example(lens: Analyzer, encoding: Mapping[str, Any]) -> Analysis:
    """The maps up to the end of the attention block, for an encoder-decoder those of the encoder."""
    given = dict(encoding)
    if lens.two_sided:  # the encoder does not depend on the decoder input
        given["decoder_input_ids"] = given["input_ids"][:1]
    result = lens.analyze(given, scopes=attention_block_scopes(lens))
    return result if isinstance(result, Analysis) else result.side(lens.loaded.stacks[0].side)


def _entry_texts(entry: Entry) -> tuple[str, ...]:
    return entry.pair or (entry.text if entry.text is not None else " ".join(entry.words or ()),)
