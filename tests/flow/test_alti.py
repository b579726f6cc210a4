"""ALTI and ALTI+ against plain loops over the vectors of the naive oracles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normscope.flow import attention_blocks
from tests.flow.cases import (
    ENCODER_DECODER,
    ONE_SIDED,
    heads,
    naive,
    naive_joint_rollout,
    naive_rollout,
    opened,
    relative,
    to_one,
)
from tests.flow.detached import layer_names

BLOCK = "ATTNRESLN-N", "LNATTNRES-N", "LNATTNLNRES-N"  # the end of the attention block: post-LN, pre-LN, sandwich


def nearness(T: Tensor, y: Tensor) -> Tensor:
    """c_ij = max(0, ||y_i||_1 - ||y_i - T_ij||_1)"""
    found = torch.zeros(T.shape[:2], dtype=torch.float64)
    for i in range(T.shape[0]):
        for j in range(T.shape[1]):
            found[i, j] = max(0.0, float(y[i].abs().sum() - (y[i] - T[i, j]).abs().sum()))
    return found


def end(layer: Any) -> str:
    return next(scope for scope in BLOCK if scope in layer.vectors)


def layer_map(layer: Any, x: Tensor) -> Tensor:
    if "LNATTNFFRES-N" in layer.vectors:  # parallel: what attention and the residual connection make, by themselves
        T = layer.vectors["LNATTN-N"].clone()
        for i in range(len(T)):
            T[i, i] += x[i]
        return to_one(nearness(T, x + layer.actual["LNATTN-N"]))
    n = len(layer.actual[end(layer)])
    return to_one(nearness(layer.vectors[end(layer)][:, :n], layer.actual[end(layer)]))


def inputs_of_layers(name: str) -> list[Tensor]:
    """The input of each layer, from hooks on the model."""
    lens, given, _, _ = opened(name, heads(name)[0])
    seen: list[Tensor] = []
    ((_, names),) = layer_names(lens.model).items()
    handles = [
        lens.loaded.base.get_submodule(one).register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"])[0].double()),
            with_kwargs=True,
        )
        for one in names
    ]
    with torch.no_grad():
        lens.model(**given)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", ONE_SIDED)
def test_alti(name: str) -> None:
    lens, given, _, _ = opened(name, heads(name)[0])
    (layers,) = naive(name, heads(name)[0]).values()
    maps = [layer_map(layer, x) for layer, x in zip(layers, inputs_of_layers(name), strict=True)]
    found = lens.flow(given, method="alti")
    assert relative(found.map, naive_rollout(maps)) <= 1e-5  # some softmaxes are float32
    assert relative(found.maps[0], maps[0]) <= 1e-5
    torch.testing.assert_close(found.map.sum(-1), torch.ones(len(found.map), dtype=torch.float64))


@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_alti_plus(name: str) -> None:
    """Cross-attention's residual connection is a separate column, which stands for the output of self-attention."""
    lens, given, _, _ = opened(name, "Seq2SeqLM")
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
    lens, given, _, _ = opened(name, heads(name)[0])
    whole = lens.flow(given, method=method).map
    for size in (1, 3 * 8 * 7 * 24):
        monkeypatch.setattr(attention_blocks, "ROW_BYTES", size)
        torch.testing.assert_close(lens.flow(given, method=method).map, whole)


def test_masked_tokens_are_left_out() -> None:
    for name, method, shape in (("bert", "alti", (5, 5)), ("bart", "alti+", (5, 10))):
        lens, given, _, _ = opened(name, heads(name)[0])
        given = {key: value.clone() for key, value in given.items()}
        given["attention_mask"][0, [2, 4]] = 0
        found = lens.flow(given, method=method)
        assert found.map.shape == shape
        torch.testing.assert_close(found.map.sum(-1), torch.ones(shape[0], dtype=torch.float64))
