"""ALTI and ALTI+ against plain loops over the vectors of the naive oracles."""

from __future__ import annotations

import pytest
import torch

from normscope.flow import attention_blocks
from tests.helpers.compare import relative
from tests.helpers.flow_cases import ONE_SIDED, heads, open_case
from tests.helpers.naive_flow import (
    end,
    inputs_of_layers,
    layer_map,
    naive,
    naive_joint_rollout,
    naive_rollout,
    nearness,
    to_one,
)
from tests.helpers.tiny import ENCODER_DECODER


@pytest.mark.parametrize("name", ONE_SIDED)
def test_alti(name: str) -> None:
    lens, given, _, _ = open_case(name, heads(name)[0])
    (layers,) = naive(name, heads(name)[0]).values()
    maps = [layer_map(layer, x) for layer, x in zip(layers, inputs_of_layers(name), strict=True)]
    found = lens.flow(given, method="alti")
    assert relative(found.map, naive_rollout(maps)) <= 1e-5  # some softmaxes are float32
    assert relative(found.maps[0], maps[0]) <= 1e-5
    torch.testing.assert_close(found.map.sum(-1), torch.ones(len(found.map), dtype=torch.float64))


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_alti_plus(name: str) -> None:
    """Cross-attention's residual connection is a separate column: the output of self-attention."""
    lens, given, _, _ = open_case(name, "Seq2SeqLM")
    sides = naive(name, "Seq2SeqLM")
    post = "ATTNRESLN-N" in sides["decoder"][0].vectors and "LNATTN-N" not in sides["decoder"][0].vectors
    maps = []
    for number, layer in enumerate(sides["decoder"]):
        scope, start = ("ATTNRESLNXATTNRESLN-N", "ATTNRESLN-N") if post else ("LNATTNRESLNXATTNRES-N", "LNATTNRES-N")
        n = len(layer.actual[start])
        residual = layer.actual[start]
        if post:  # through the norm, with the deviation that it really had
            norm = lens.loaded.base.get_submodule(f"decoder.layers.{number}.encoder_attn_layer_norm")
            s = (layer.actual["ATTNRESLNXATTNRES-N"].var(-1, correction=0) + norm.eps).sqrt()  # type: ignore[operator]
            residual = norm.weight * (residual - residual.mean(-1, keepdim=True)) / s[:, None]  # type: ignore[operator]
        T = torch.cat([layer.vectors[scope][:, n:], residual[:, None]], dim=1).detach()
        cross = to_one(nearness(T, layer.actual[scope]))
        own = to_one(nearness(layer.vectors[start][:, :n], layer.actual[start]))
        maps.append(torch.cat([cross[:, -1:] * own, cross[:, :-1]], dim=1))
    encoder = [to_one(nearness(one.vectors[end(one)], one.actual[end(one)])) for one in sides["encoder"]]
    found = lens.flow(given, method="alti+")
    assert relative(found.map, naive_joint_rollout(maps, encoder)) <= 1e-5
    assert relative(found.maps[0], naive_joint_rollout(maps[:1], encoder)) <= 1e-5
    torch.testing.assert_close(found.map.sum(-1), torch.ones(len(found.map), dtype=torch.float64))


@pytest.mark.parametrize(("name", "method"), [("bert", "alti"), ("gpt2", "alti"), ("bart", "alti+")])
def test_rows_in_blocks_of_any_size(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens, given, _, _ = open_case(name, heads(name)[0])
    whole = lens.flow(given, method=method).map
    for size in (1, 3 * 8 * 7 * 24):
        monkeypatch.setattr(attention_blocks, "ROW_BYTES", size)
        torch.testing.assert_close(lens.flow(given, method=method).map, whole)


def test_masked_tokens_are_left_out() -> None:
    for name, method, shape in (("bert", "alti", (5, 5)), ("bart", "alti+", (5, 10))):
        lens, given, _, _ = open_case(name, heads(name)[0])
        given = {key: value.clone() for key, value in given.items()}
        given["attention_mask"][0, [2, 4]] = 0
        found = lens.flow(given, method=method)
        assert found.map.shape == shape
        torch.testing.assert_close(found.map.sum(-1), torch.ones(shape[0], dtype=torch.float64))
