"""The published algorithm (Kobayashi et al. 2020, 2021) as the baseline: it materialises every contribution vector.

In each layer, the weighted vectors alpha^h_ij f^h(x_j) are formed as one tensor (batch, heads, n, n, d), summed over
the heads, added to the residual connection and passed through the LayerNorm rule; each step gives n x n vectors and
their norms. `feed_forward=True` continues in the same way: all n x n vectors through W_1, the gate Phi(a_i), W_2, the
second residual connection and LayerNorm. `heads=True` adds the norms of f^h(x_j) and of the weighted vectors
themselves, which the published code always computes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks import models
from normscope import Analysis, Analyzer

Maps = dict[str, Tensor]  # scope -> (batch, n, n), "<scope> mixing" -> (batch, n), "<scope> heads" -> (batch, h, n, n)


class Published:
    """A copy of a BERT model with eager attention; calling it runs the model and returns the maps of each layer."""

    def __init__(self, model: PreTrainedModel, *, feed_forward: bool = False, heads: bool = False) -> None:
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("eager")
        self.feed_forward, self.heads = feed_forward, heads
        self.seen: dict[str, Tensor] = {}
        self.maps: list[Maps] = []
        for layer in self.model.get_submodule("encoder.layer").children():
            self._watch(layer)

    @torch.inference_mode()
    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Maps]:
        self.maps = []
        self.model(**inputs)
        return self.maps

    def _watch(self, layer: nn.Module) -> None:
        def keep(name: str, path: str, *, before: bool = False, item: int | None = None) -> None:
            def hook(module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
                self.seen[name] = given[0] if before else made if item is None else made[item]

            layer.get_submodule(path).register_forward_hook(hook)

        def done(module: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            self.maps.append(layer_maps(layer, self.seen, self.feed_forward, self.heads))
            self.seen.clear()

        keep("input", "attention.self.value", before=True)
        keep("values", "attention.self.value")
        keep("weights", "attention.self", item=1)
        keep("sum1", "attention.output.LayerNorm", before=True)
        keep("preactivation", "intermediate.dense")
        keep("sum2", "output.LayerNorm", before=True)
        layer.register_forward_hook(done)


def layer_maps(layer: nn.Module, seen: Mapping[str, Tensor], feed_forward: bool, per_head: bool) -> Maps:
    """The maps of one layer, from the values of its forward pass."""
    x, values, alpha = seen["input"], seen["values"], seen["weights"]
    batch, n, d = x.shape
    heads = alpha.shape[1]
    W_O = _linear(layer, "attention.output.dense").weight.T.view(heads, d // heads, d)
    diagonal = torch.arange(n)

    f = values.view(batch, n, heads, d // heads).transpose(1, 2) @ W_O  # (batch, heads, n, d)
    weighted = alpha[..., None] * f[:, :, None]  # (batch, heads, n, n, d)
    maps: Maps = {}
    if per_head:
        maps |= {"values heads": f.norm(dim=-1), "ATTN-N heads": weighted.norm(dim=-1)}
    t = weighted.sum(1)  # (batch, n, n, d)
    del weighted
    u = t.clone()
    u[:, diagonal, diagonal] += x
    z = _normalised(u, seen["sum1"], _norm(layer, "attention.output.LayerNorm"))
    mean = alpha.mean(1)
    maps |= {"ATTN-W": mean, "ATTNRES-W": 0.5 * mean + 0.5 * torch.eye(n)}
    vectors = {"ATTN-N": t, "ATTNRES-N": u, "ATTNRESLN-N": z}
    if feed_forward:
        gate = torch.special.ndtr(seen["preactivation"])  # erf GELU: g(a) / a = Phi(a)
        W_1, W_2 = _linear(layer, "intermediate.dense").weight, _linear(layer, "output.dense").weight
        y = (gate[:, :, None] * (z @ W_1.T)) @ W_2.T
        w = y + z
        last = _normalised(w, seen["sum2"], _norm(layer, "output.LayerNorm"))
        vectors |= {"ATTNRESLNFF-N": y, "ATTNRESLNFFRES-N": w, "ATTNRESLNFFRESLN-N": last}
    for scope, c in vectors.items():
        maps[scope] = c.norm(dim=-1)
        own = c[:, diagonal, diagonal]
        mixing, preserving = (c.sum(2) - own).norm(dim=-1), own.norm(dim=-1)
        maps[f"{scope} mixing"] = mixing / (mixing + preserving)
    return maps


def _normalised(vectors: Tensor, total: Tensor, norm: nn.LayerNorm) -> Tensor:
    """The LayerNorm rule: each vector minus its mean, divided by the standard deviation of the model's vector."""
    s = (total.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()[:, :, None]
    return norm.weight * (vectors - vectors.mean(-1, keepdim=True)) / s


def _linear(layer: nn.Module, path: str) -> nn.Linear:
    found = layer.get_submodule(path)
    assert isinstance(found, nn.Linear)
    return found


def _norm(layer: nn.Module, path: str) -> nn.LayerNorm:
    found = layer.get_submodule(path)
    assert isinstance(found, nn.LayerNorm)
    return found


def verify(tolerance: float = 1e-5) -> float:
    """The largest relative difference between the baseline and normscope on a small model; raises above `tolerance`."""
    model = models.tiny()
    inputs = models.encoding(2, 9)
    expected = Published(model, feed_forward=True, heads=True)(inputs)
    worst = 0.0
    lens: Analyzer[Analysis] = Analyzer(model)
    for number, found in enumerate(lens.stream(inputs, heads=True)):
        assert found.value_norms is not None
        ours = {scope: found[scope] for scope in found.scopes}
        ours |= {f"{scope} mixing": found.mixing_ratio(scope) for scope in found.scopes if scope.endswith("-N")}
        ours |= {"values heads": found.value_norms, "ATTN-N heads": found.heads["ATTN-N"]}
        for name in expected[0]:
            theirs = torch.stack([layer[name][number] for layer in expected])
            worst = max(worst, float(((ours[name] - theirs).abs() / theirs).max()))
    if not worst <= tolerance:
        raise AssertionError(
            f"The baseline and normscope differ by {worst:.1e}: the measurements would be meaningless."
        )
    return worst
