"""Every family against the oracle without descriptions, which runs the layers' own code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope import Analysis, Analyzer
from tests.helpers.compare import sides
from tests.helpers.free_oracle import FreeLayer, Shares, free_oracle
from tests.helpers.tiny import ENCODER_DECODER, FAMILIES, FLOAT32_NORMS, inputs, tiny

OUTPUT = re.compile(r"(.*\.)?(o|o_proj|out_proj|c_proj|out_lin|Wo|dense)")  # an attention's last projection comes first


@cache
def given(name: str) -> tuple[Analyzer, dict[str, Tensor]]:
    lens = Analyzer(tiny(name))
    return lens, inputs(name, lens.model, 7, 5)


@cache
def found(name: str) -> Any:
    lens, encoding = given(name)
    return lens.analyze(encoding)


@cache
def expected(name: str) -> list[list[FreeLayer]]:
    """The layers of each side."""
    lens, encoding = given(name)
    return list(free_oracle(lens.model, encoding).values())


def pairs(name: str) -> Iterator[tuple[Analysis, int, FreeLayer]]:
    """Each layer of the oracle with the analysis of its side and its place there."""
    assert len(sides(found(name))) == len(expected(name)) == (2 if name in ENCODER_DECODER else 1)
    for analysis, layers in zip(sides(found(name)).values(), expected(name), strict=True):
        assert analysis.layers == tuple(range(len(layers)))
        for n, layer in enumerate(layers):
            yield analysis, n, layer


def tolerance_of(name: str) -> float:
    """The oracle takes a norm's statistic from the model, in float32 where transformers computes it so."""
    return 1e-6 if name in FLOAT32_NORMS else 1e-9


def vectors(shares: Shares, item: int = 0) -> Tensor:
    """(n, columns, d), as in the library; some modules see all tokens in one axis."""
    parts = shares.parts[:, item] if shares.parts.dim() == 4 else shares.parts
    return parts.transpose(0, 1)


def boundaries(layer: FreeLayer) -> Iterator[Shares]:
    """What enters and leaves the modules of a layer."""
    for kept in (layer.modules, layer.inputs):
        for some in kept.values():
            yield from some


@pytest.mark.parametrize("name", FAMILIES)
def test_layer_output(name: str) -> None:
    """Every cell of the map, every contribution vector and the remainder after the last component."""
    close = partial(torch.testing.assert_close, rtol=tolerance_of(name), atol=1e-14)
    loose = partial(torch.testing.assert_close, rtol=0, atol=10 * tolerance_of(name))
    for analysis, n, layer in pairs(name):
        scope = analysis.scopes[-1]
        close(analysis[scope][n], vectors(layer.output).norm(dim=-1))
        loose(analysis.remainder(scope)[n], layer.output.rest[0].norm(dim=-1))
        if n == len(analysis.layers) - 1:
            loose(analysis.parts(scope, n).contributions, vectors(layer.output))
            loose(analysis.parts(scope, n).bias, layer.output.rest[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_attention(name: str) -> None:
    """After the output projection of the self-attention, and of the cross-attention."""
    close = partial(torch.testing.assert_close, rtol=tolerance_of(name), atol=1e-14)
    for analysis, n, layer in pairs(name):
        outputs = [path for path in layer.modules if OUTPUT.fullmatch(path)]
        scopes = [scope for scope in analysis.scopes if re.fullmatch(r"(LN)?ATTN-N|XATTN-N", scope)]
        assert len(scopes) == (2 if "XATTN-N" in analysis.scopes else 1)
        for scope, path in zip(scopes, outputs[: len(scopes)], strict=True):
            (shares,) = layer.modules[path]
            close(analysis[scope][n], vectors(shares).norm(dim=-1))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_scope(name: str) -> None:
    """Every scope's map is that of something that enters or leaves a module of the layer."""
    for analysis, n, layer in pairs(name):
        shape = analysis[analysis.scopes[-1]][n].shape
        seen = [v.norm(dim=-1) for v in map(vectors, boundaries(layer)) if v.shape[:2] == shape]
        for scope in analysis.scopes:
            if scope.endswith("-N"):
                cells = analysis[scope][n]
                close = [torch.allclose(one, cells, rtol=tolerance_of(name), atol=1e-14) for one in seen]
                assert any(close), (scope, n)


@pytest.mark.parametrize("name", FAMILIES)
def test_value_biases_in_the_remainder(name: str) -> None:
    lens, encoding = given(name)
    result = sides(lens.analyze(encoding, value_bias="remainder")).values()
    oracle = free_oracle(lens.model, encoding, own_biases=False).values()
    for analysis, layers in zip(result, oracle, strict=True):
        for n, layer in enumerate(layers):
            cells = vectors(layer.output).norm(dim=-1)
            torch.testing.assert_close(analysis["layer"][n], cells, rtol=tolerance_of(name), atol=1e-14)


VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"hidden_act": "mish"}),
    ("llama", {"hidden_act": "relu"}),
    ("gemma2", {"attn_logit_softcapping": 2.0}),
    ("modernbert", {"norm_bias": True, "attention_bias": True, "mlp_bias": True}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("gpt_oss", {"swiglu_limit": 0.3}),
    ("t5", {"feed_forward_proj": "gelu_new"}),
    ("bert", {"hidden_act": "quick_gelu"}),
    ("bert", {"hidden_act": "relu2"}),
    ("bert", {"hidden_act": "sigmoid"}),
)


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=str)
def test_variants(name: str, options: dict[str, Any]) -> None:
    model = tiny(name, **options)
    encoding = inputs(name, model, 7, 5)
    result = sides(Analyzer(model).analyze(encoding)).values()
    for analysis, layers in zip(result, free_oracle(model, encoding).values(), strict=True):
        for n, layer in enumerate(layers):
            cells = vectors(layer.output).norm(dim=-1)
            torch.testing.assert_close(analysis["layer"][n], cells, rtol=tolerance_of(name), atol=1e-14)


@pytest.mark.parametrize(
    "name", ["bert", "albert", "gpt2", "opt", "llama", "mixtral", "deberta-v2", "bart", "t5-gated"]
)
def test_padded_batch(name: str) -> None:
    """Two inputs of different lengths in one batch; padding is neither row nor column of the library's maps."""
    lens, encoding = given(name)
    short = {key: tensor[:, :-2] for key, tensor in inputs(name, lens.model, 7, 5, seed=1).items()}
    padded = {key: nn.functional.pad(tensor, (0, 2)) for key, tensor in short.items()}
    batch = {key: torch.cat((tensor, padded[key])) for key, tensor in encoding.items()}
    oracle = list(free_oracle(lens.model, batch).values())
    masks = [batch["attention_mask"].bool(), batch.get("decoder_attention_mask", batch["attention_mask"]).bool()]
    for item, result in enumerate(lens.stream(batch)):
        for place, analysis in enumerate(sides(result).values()):
            rows = masks[place][item]
            columns = rows if place == 0 else torch.cat((rows, masks[0][item]))
            for n, layer in enumerate(oracle[place]):
                cells = vectors(layer.output, item).norm(dim=-1)[rows][:, columns]
                torch.testing.assert_close(analysis[analysis.scopes[-1]][n], cells, rtol=1e-6, atol=1e-12)
