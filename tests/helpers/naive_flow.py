"""Flows across layers in plain loops over the vectors of the naive oracles."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import bert_oracle, layer_oracle
from tests.helpers.detached import layer_names
from tests.helpers.flow_cases import heads, open_case
from tests.helpers.tiny import BERT_FAMILIES

BLOCK = "ATTNRESLN-N", "LNATTNRES-N", "LNATTNLNRES-N"  # the end of the attention block: post-LN, pre-LN, sandwich


@cache
def naive(name: str, head: str | None = None) -> dict[str, list[Any]]:
    """side -> its layers, from the naive oracle for the family."""
    lens, given, _, _ = open_case(name, head)
    if name in BERT_FAMILIES:
        return {"encoder": list(bert_oracle.oracle(lens.model, given))}
    return {side: list(found) for side, found in layer_oracle.oracle(lens.model, given).items()}


def naive_rollout(maps: list[Tensor]) -> Tensor:
    """The product of the maps of all layers, the last first, by plain loops."""
    found = maps[0]
    for one in maps[1:]:
        product = torch.zeros(len(one), found.shape[1], dtype=torch.float64)
        for i in range(product.shape[0]):
            for k in range(product.shape[1]):
                for j in range(len(found)):
                    product[i, k] += one[i, j] * found[j, k]
        found = product
    return found


def naive_joint_rollout(decoder: list[Tensor], encoder: list[Tensor]) -> Tensor:
    """Rollout of one model of all tokens, in which the layers of one side leave the tokens of the other unchanged."""
    n, m = len(decoder[0]), len(encoder[0])
    steps = []
    for one in encoder:
        steps.append(torch.block_diag(torch.eye(n, dtype=torch.float64), one))
    for one in decoder:
        steps.append(torch.cat([one, torch.eye(n + m, dtype=torch.float64)[n:]]))
    return naive_rollout(steps)[:n]


def to_one(row: Tensor) -> Tensor:
    """Rows scaled to sum to one."""
    return row / row.sum(-1, keepdim=True)


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
    if "LNATTNFFRES-N" in layer.vectors:  # parallel: attention and the residual connection, without the feed-forward
        T = layer.vectors["LNATTN-N"].clone()
        for i in range(len(T)):
            T[i, i] += x[i]
        return to_one(nearness(T, x + layer.actual["LNATTN-N"]))
    n = len(layer.actual[end(layer)])
    return to_one(nearness(layer.vectors[end(layer)][:, :n], layer.actual[end(layer)]))


def inputs_of_layers(name: str) -> list[Tensor]:
    """The input of each layer, from hooks on the model itself."""
    lens, given, _, _ = open_case(name, heads(name)[0])
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


class ZeroValues(TorchDispatchMode):
    """Sets the values of one token to zero in every product of probabilities over `length` tokens with values."""

    def __init__(self, token: int, length: int) -> None:
        super().__init__()
        self.token, self.length, self.products = token, length, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default and args[0].shape[2] == self.length:
            weights, values = args
            if bool((weights >= 0).all()) and torch.allclose(weights.sum(-1), torch.ones(()).to(weights)):
                self.products += 1
                kept = torch.arange(self.length) != self.token
                return func(weights, values * kept[:, None], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def turned_by_zeroing(model: Any, layer: Any, given: Any, j: int) -> Tensor:
    """(n,): how far each output of a layer turns if token j's values are zero."""
    outputs: list[Tensor] = []
    watch = ZeroValues(j, given["input_ids"].shape[1])
    handle = layer.register_forward_hook(
        lambda module, args, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad(), sdpa_kernel([SDPBackend.MATH]):
        model(**given)
        with watch:
            model(**given)
    handle.remove()
    assert watch.products
    plain, changed = outputs
    return 1 - torch.cosine_similarity(plain[0].double(), changed[0].double(), dim=-1)
