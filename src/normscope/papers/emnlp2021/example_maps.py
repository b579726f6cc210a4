"""Maps of an example: attention alone, with the residual, and with normalization (EMNLP 2021, Fig. 2)."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from torch import Tensor

from normscope.analysis import Analysis
from normscope.analyzer import Analyzer
from normscope.corpus.entries import Entry
from normscope.measures.first_token import normalise_rows
from normscope.papers.common import layer_table
from normscope.papers.emnlp2021.ratios import attention_block_scopes, scope_of_alias
from normscope.papers.study import Runs, Setting
from normscope.reports import map_charts
from normscope.reports.report import Claim, Picture, Section

LONGEST = 40  # most tokens that stay legible along an axis
KINDS = {"norms": ("-N", "norm of the contribution"), "weights": ("-W", "weight")}  # suffix of the scopes, label


def example_maps_section(setting: Setting, runs: Runs) -> Section:
    """ATTN-N, ATTNRES-N and ATTNRESLN-N side by side, and the weights."""
    lens, depth, asked = setting.lens, setting.depth, setting.readings.example_layer
    result = _analyze_example(lens, example_maps_encoding(setting))
    tokens = list(result.tokens)
    layer = min(asked, depth) if asked > 0 else (depth + 1) // 2
    look: dict[str, Any] = {"rows": tokens, "columns": tokens, "xlabel": "input", "ylabel": "output", "shared": False}
    pictures = []
    for kind, (suffix, label) in KINDS.items():
        maps = {name: result[name][layer - 1].numpy() for name in result.scopes if name.endswith(suffix)}
        chart = map_charts.heat_map_charts(maps, label=label, **look)
        title = f"Maps of the example by {kind}, layer {layer} of {depth}"
        pictures.append(Picture(f"comparison-{kind}", title, chart, "Each map has its own colour scale."))
    shares = {name: example_maps_own_shares(result[name]) for name in result.scopes}
    title = "Share of the diagonal (%): each token's share in its own row, mean over tokens"
    table = layer_table("comparison-own", title, shares, range(1, depth + 1), ".1f")
    alone, block = (scope_of_alias(lens, alias) for alias in ("attention", "attention-block"))
    by_alone, by_block = fmean(shares[alone]), fmean(shares[block])
    claim = Claim(
        "The diagonal dominates the map with residual and normalization, but not with attention alone",
        by_block > 50 > by_alone,
        f"share of the diagonal {by_alone:.1f} % in {alone}, {by_block:.1f} % in {block}",
    )
    title = "Maps of an example with attention, residual and normalization"
    return Section("comparison", title, f"Example: {' '.join(tokens)}", (*pictures, table), (claim,))


def missing_example_maps(setting: Setting) -> str | None:
    """Why no example can be analysed, or None."""
    if setting.lens.family.input != "text":
        return "The example is a text, but this model does not read text."
    if setting.lens.tokenizer is None:
        return "The example is a text, which needs a tokenizer."
    given = setting.example is not None or setting.entries
    return None if given else "No example text: pass DATA or --example."


def example_maps_encoding(setting: Setting) -> dict[str, list[int]]:
    """The example, by default the first entry, as an encoding of at most LONGEST tokens."""
    tokenizer = setting.lens.tokenizer
    texts: tuple[str, ...] = () if setting.example is None else (setting.example,)
    if not texts:
        entry = setting.entries[0]
        if entry.pieces and entry.words is not None:
            return {"input_ids": tokenizer.convert_tokens_to_ids(list(entry.words[:LONGEST]))}
        texts = _entry_texts(entry)
    encoding = tokenizer(*texts, truncation=True, max_length=LONGEST)
    keys = ("input_ids", "token_type_ids") if "token_type_ids" in setting.lens.loaded.limits.keys else ("input_ids",)
    return {key: list(encoding[key]) for key in keys if key in encoding}


def example_maps_own_shares(maps: Tensor) -> list[float]:
    """By layer: ``m_ii / sum_j m_ij`` in percent, mean over rows."""
    found: list[float] = (100 * normalise_rows(maps.double()).diagonal(dim1=1, dim2=2).mean(-1)).tolist()
    return found


def _analyze_example(lens: Analyzer, encoding: Mapping[str, Any]) -> Analysis:
    """The maps up to the end of the attention block, for an encoder-decoder those of the encoder."""
    given = dict(encoding)
    if lens.two_sided:  # the encoder does not depend on the decoder input
        given["decoder_input_ids"] = given["input_ids"][:1]
    result = lens.analyze(given, scopes=attention_block_scopes(lens))
    return result if isinstance(result, Analysis) else result.side(lens.loaded.stacks[0].side)


def _entry_texts(entry: Entry) -> tuple[str, ...]:
    return entry.pair or (entry.text if entry.text is not None else " ".join(entry.words or ()),)
