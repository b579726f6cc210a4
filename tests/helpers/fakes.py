"""Analyses of synthetic tensors, for tests of the views that need no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normscope.analysis import Analysis
from normscope.encoder_decoder_analysis import EncoderDecoderAnalysis
from normscope.flow.result import Flow, Scores
from normscope.labels import Label
from normscope.result_base import HeadMaps, Measured
from tests.helpers.toys import SCOPES

ALIASES = {
    "weights": "ATTN-W",
    "attention": "ATTN-N",
    "attention-residual": "ATTNRES-N",
    "attention-block": "ATTNRESLN-N",
    "ff": "ATTNRESLNFF-N",
    "ff-residual": "ATTNRESLNFFRES-N",
    "layer": "ATTNRESLNFFRESLN-N",
}
SENTENCE = ("[CLS]", "colin", "fleming", "played", "the", "highway", "tiny", "soap", "opera", ".", "[SEP]")
NASTY = (
    "</script><img src=x onerror=alert(1)>",
    "[bold]x[/bold]",
    "$x^2$",
    "\u05e9\u05dc\u05d5\u05dd",  # Hebrew, right to left
    "\u0645\u0631\u062d\u0628\u0627",  # Arabic, joined letters, right to left
    "\u202eoverride",
    "\U0001f469\u200d\U0001f680",  # one emoji of three code points
    "\u6f22\u5b57",
    "tab\tnew\nline\x1b[31mred\x00",
    "\u2028",
    "\ud800",  # half of a surrogate pair
    "&amp;<b>",
    "[/]",
    "\\",
    "  ",
    "",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 3,
)


def fake(
    tokens: Sequence[str] = SENTENCE,
    *,
    layers: Sequence[int] = (0, 1, 2, 3, 4, 5),
    scopes: Sequence[str] = SCOPES,
    rows: Sequence[int] | None = None,
    heads: int = 0,
    source: Sequence[str] = (),
    side: str | None = None,
    dtype: torch.dtype = torch.float32,
    info: dict[str, Any] | None = None,
) -> Analysis:
    """An analysis of `tokens` with peaked random attention and a residual that dominates the diagonal.

    `source` adds columns of another side, as in a decoder; `side` is that of the tokens.
    """
    noise = torch.Generator().manual_seed(0)
    n, m = len(tokens), len(tokens) + len(source)
    side = side or ("decoder" if source else "encoder")
    columns = [Label(token, side, j) for j, token in enumerate(tokens)]
    columns += [Label(token, "encoder", j) for j, token in enumerate(source)]
    kept = list(range(n)) if rows is None else [range(n)[i] for i in rows]
    measured = {}
    for scope in scopes:
        weights = (2.2 * torch.randn(len(layers), n, m, generator=noise, dtype=torch.float64)).softmax(-1)
        own = torch.eye(n, m, dtype=torch.float64) * (8 if "RES" in scope and scope.endswith("-N") else 0)
        map = (0.5 * weights + 0.5 * torch.eye(n, m)) if scope == "ATTNRES-W" else weights + own
        map = map[:, kept]
        diagonal = map[:, range(len(kept)), kept]
        measured[scope] = Measured(
            map.to(dtype),
            (1 - diagonal / map.sum(-1)).to(dtype),
            torch.zeros(len(layers), len(kept), dtype=dtype) + 0.25,
            torch.full((len(layers),), 2.5e-7, dtype=dtype),
        )
    return Analysis(
        measured=measured,
        rows=tuple(columns[i] for i in kept),
        columns=tuple(columns),
        layers=tuple(layers),
        aliases={alias: scope for alias, scope in ALIASES.items() if scope in scopes},
        heads=HeadMaps(_heads(heads, measured, noise), ALIASES),
        value_norms=torch.ones(len(layers), heads, m, dtype=dtype) if heads else None,
        head_indices=tuple(range(heads)),
        info={"model": "some/model", "family": "BERT", "dtype": "float32"} if info is None else info,
    )


def _heads(heads: int, measured: dict[str, Measured], noise: torch.Generator) -> dict[str, Tensor]:
    if not heads:
        return {}
    layers, rows, columns = measured["ATTN-W"].map.shape
    return {
        scope: torch.rand(layers, heads, rows, columns, generator=noise).to(measured[scope].map.dtype)
        for scope in ("ATTN-W", "ATTN-N")
    }


def fake_translation(**options: Any) -> EncoderDecoderAnalysis:
    """Both sides of an encoder-decoder."""
    decoder = fake(("le", "chat", "dort"), source=("the", "cat"), **options)
    return EncoderDecoderAnalysis(fake(("the", "cat"), **options), decoder)


def fake_picture(rows: Sequence[int] | None = None) -> Analysis:
    """The analysis of an image of 2 x 3 patches."""
    tokens = ("[CLS]", "1,1", "1,2", "1,3", "2,1", "2,2", "2,3")
    return fake(tokens, layers=(0, 1), rows=rows, info={"model": "some/vit", "family": "ViT", "grid": [2, 3]})


def fake_flow(analysis: Any, target: str = "logit of 'x'", **changes: Any) -> Flow:
    """A flow to the tokens of an analysis."""
    count = len(analysis.columns)
    scores = torch.linspace(-1, 2, count)
    value = float(scores.sum()) + 0.25
    to = replace(Scores(target, value, scores, 0.25, 1e-7), **changes)
    return Flow("exact", analysis.rows, analysis.columns, analysis.layers, to)
