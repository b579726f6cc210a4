"""The maps of an example with attention alone, with the residual, with normalization (EMNLP 2021, Fig. 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normscope.analysis import Analysis
from normscope.measures.first_token import normalised
from normscope.papers import map_charts
from normscope.papers.emnlp2021.ratios import methods, scope
from normscope.papers.report import Claim, Picture, Section, Table

if TYPE_CHECKING:
    from normscope.analyzer import Analyzer
    from normscope.corpus.items import Entry
    from normscope.corpus.store import Run
    from normscope.papers.experiments import Setting

LONGEST = 40  # tokens that can be read along an axis


def comparison(setting: Setting, runs: Mapping[str, Run]) -> Section:
    """ATTN-N, ATTNRES-N and ATTNRESLN-N side by side, and the weights."""
    lens = setting.lens
    result = analysed(lens, example(setting))
    tokens = list(result.tokens)
    depth = lens.depths[0]
    asked = setting.readings.example_layer
    layer = min(asked, depth) if asked > 0 else (depth + 1) // 2
    groups = {
        "norms": [name for name in result.scopes if name.endswith("-N")],
        "weights": [name for name in result.scopes if name.endswith("-W")],
    }
    pictures = [
        Picture(
            f"comparison-{kind}",
            f"Maps of the example by {kind}, layer {layer} of {depth}",
            map_charts.heat_maps(
                {name: result[name][layer - 1].numpy() for name in names},
                rows=tokens,
                columns=tokens,
                label="norm of the contribution" if kind == "norms" else "weight",
                xlabel="input",
                ylabel="output",
                shared=False,
            ),
            "Each map has its own scale of colours.",
        )
        for kind, names in groups.items()
    ]
    shares = {name: own_share(result[name]) for name in result.scopes}
    table = Table(
        "comparison-own",
        "Share of a token itself in its row of the map (%), mean over the example's tokens",
        ("layer", *result.scopes),
        tuple((n + 1, *(shares[name][n] for name in result.scopes)) for n in range(depth)),
        dict.fromkeys(result.scopes, ".1f"),
    )
    alone, block = (scope(lens, alias) for alias in ("attention", "attention-block"))
    means = {name: sum(shares[name]) / depth for name in (alone, block)}
    claim = Claim(
        "With residual and normalization the diagonal dominates the map; attention alone looks at other tokens",
        means[block] > 50 > means[alone],
        f"share of the diagonal {means[alone]:.1f} % by {alone}, {means[block]:.1f} % by {block}",
    )
    return Section(
        "comparison",
        "Attention, residual and normalization in an example",
        f"The example: {' '.join(tokens)}",
        (*pictures, table),
        (claim,),
    )


def example(setting: Setting) -> dict[str, list[int]]:
    """The example, or else the first entry, as an encoding of at most 40 tokens."""
    tokenizer = setting.lens.tokenizer
    texts: tuple[str, ...]
    if setting.example is not None:
        texts = (setting.example,)
    else:
        entry = setting.entries[0]
        if entry.pieces and entry.words is not None:
            return {"input_ids": tokenizer.convert_tokens_to_ids(list(entry.words[:LONGEST]))}
        texts = _texts(entry)
    encoding = tokenizer(*texts, truncation=True, max_length=LONGEST)
    kept = ("input_ids", "token_type_ids") if "token_type_ids" in setting.lens.limits.keys else ("input_ids",)
    return {key: list(encoding[key]) for key in kept if key in encoding}


def analysed(lens: Analyzer, encoding: Mapping[str, Any]) -> Analysis:
    """Its maps up to the end of the attention block, of an encoder-decoder those of the encoder."""
    given = dict(encoding)
    if lens.two_sided:  # what the decoder reads does not matter to the encoder
        given["decoder_input_ids"] = given["input_ids"][:1]
    result = lens.analyze(given, scopes=methods(lens))
    return result if isinstance(result, Analysis) else result.side(lens.stacks[0].side)


def own_share(maps: Tensor) -> list[float]:
    """By layer: ``m_ii / sum_j m_ij`` in percent, mean over rows."""
    found: list[float] = (100 * normalised(maps.double()).diagonal(dim1=1, dim2=2).mean(-1)).tolist()
    return found


def _texts(entry: Entry) -> tuple[str, ...]:
    if entry.pair is not None:
        return entry.pair
    return (entry.text if entry.text is not None else " ".join(entry.words or ()),)
