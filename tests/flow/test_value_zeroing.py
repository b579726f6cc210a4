"""Value Zeroing against a hand-written layer, and against the model's own attention with one value zeroed."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope.flow import value_zeroing, zeroed_values
from tests.helpers.bert_oracle import LayerTrace, trace
from tests.helpers.compare import relative
from tests.helpers.detached import layer_names
from tests.helpers.flow_cases import ONE_SIDED, heads, open_case
from tests.helpers.naive_flow import naive_rollout, to_one
from tests.helpers.oracle_parts import normalise
from tests.helpers.tiny import ENCODERS, IMAGES

EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
OUTSIDE = ("mpnet", "deberta-v2", "gptj")  # have their own attention code


def layer_without(layer: LayerTrace, gone: int) -> Tensor:
    """The output of a post-LN layer without the value vector of one token, computed by hand."""
    heads, n, _ = layer.weights.shape
    width = layer.values.shape[1] // heads
    out = torch.empty_like(layer.x)
    for i in range(n):
        mixed = torch.zeros_like(layer.values[0])
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            for j in range(n):
                if j != gone:
                    mixed[part] += layer.weights[h, i, j] * layer.values[j, part]
        y = anew(mixed @ layer.output.weight + layer.output.bias + layer.x[i], layer.norm1)
        hidden = layer.activation(y @ layer.ff_in.weight + layer.ff_in.bias)
        out[i] = anew(y + hidden @ layer.ff_out.weight + layer.ff_out.bias, layer.norm2)
    return out


def anew(x: Tensor, norm: Any) -> Tensor:
    s = (((x - x.mean()) ** 2).mean() + norm.eps).sqrt()
    return normalise(x, norm, s) + norm.beta


def distance(a: Tensor, b: Tensor) -> Tensor:
    """1 - cos, row by row."""
    return torch.stack([1 - x @ y / (x.norm() * y.norm()) for x, y in zip(a, b, strict=True)])


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "distilbert", "albert", "mpnet"])
def test_against_a_layer_written_out(name: str) -> None:
    lens, given, _, _ = open_case(name, "MaskedLM")
    maps = []
    for layer in trace(lens.model, given):
        n = len(layer.x)
        actual = layer.actual["ATTNRESLNFFRESLN-N"]
        maps.append(to_one(torch.stack([distance(actual, layer_without(layer, j)) for j in range(n)], dim=1)))
    found = lens.flow(given, method="value_zeroing")
    assert relative(found.maps[0], maps[0]) <= 1e-9
    assert relative(found.map, naive_rollout(maps)) <= 1e-9


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in ONE_SIDED if name not in OUTSIDE])
def test_against_the_models_own_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model runs, and one value is zero in one layer's attention function."""
    lens, given, _, _ = open_case(name, heads(name)[0])
    model = copy.deepcopy(lens.model)
    model.set_attn_implementation("eager")
    ((_, names),) = layer_names(model).items()
    layers = [model.base_model.get_submodule(one) for one in names]
    outputs: list[Tensor] = []
    count, gone = -1, (-1, -1)  # the attention that is running; in which of them, and whose value is taken away

    def keep(module: nn.Module, args: Any, made: Any) -> None:
        outputs.append((made[0] if isinstance(made, tuple) else made)[0].double())

    for layer in layers:
        layer.register_forward_hook(keep)
    modules = {sys.modules[type(one).__module__] for one in model.modules()}
    for module in modules:
        own = getattr(module, "eager_attention_forward", None)
        if own is None:
            continue

        def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, own: Any = own, **kw: Any) -> Any:
            nonlocal count
            count += 1
            if count == gone[0]:
                value = value.clone()
                value[:, :, gone[1]] = 0
            return own(self, query, key, value, *args, **kw)

        monkeypatch.setattr(module, "eager_attention_forward", attend)

    def run() -> list[Tensor]:
        nonlocal count
        count = -1
        outputs.clear()
        model(**given)
        return list(outputs)

    whole = run()
    depth, n = len(whole), len(whole[0])
    maps = []
    for layer in range(depth):
        columns = []
        for j in range(n):
            gone = (layer, j)
            columns.append(distance(whole[layer], run()[layer]))
        maps.append(to_one(torch.stack(columns, dim=1).clamp_min(0)))
    assert count == depth - 1
    assert relative(lens.flow(given, method="value_zeroing").map, naive_rollout(maps)) <= 1e-4  # some are float32


def test_masked_tokens_are_left_out() -> None:
    lens, given, _, _ = open_case("bert", "MaskedLM")
    given = {key: value.clone() for key, value in given.items()}
    given["attention_mask"][0, [2, 4]] = 0
    found = lens.flow(given, method="value_zeroing")
    assert found.map.shape == (5, 5)
    torch.testing.assert_close(found.map.sum(-1), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("name", ONE_SIDED)
def test_all_tokens_at_once_equal_one_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer runs once, to prove what was computed for all tokens; layers with experts run once for each token."""
    lens, given, _, _ = open_case(name, heads(name)[0])
    runs = count_runs(monkeypatch)
    fast = lens.flow(given, method="value_zeroing").maps
    depth, n = fast.shape[:2]
    assert len(runs) == depth * (n if name in EXPERTS else 1)
    monkeypatch.setattr(value_zeroing, "takes_zeroed_values", lambda layer: False)
    slow = lens.flow(given, method="value_zeroing").maps
    assert len(runs) == depth * (2 * n if name in EXPERTS else n + 1)
    assert relative(fast, slow) <= 1e-6  # some compute their attention weights or norms in float32
    if name not in (*ENCODERS, *IMAGES, *EXPERTS):
        assert float(fast.triu(1).max()) == 0  # no token reads a later one


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens without whose values a layer is run, from now on."""
    runs: list[int] = []

    def counted(run_layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Any) -> Tensor:
            runs.append(args[-1])
            return run_layer(*args)

        return run

    for name in ("_run_with_value_zeroing", "_run_with_zeroed_product"):
        monkeypatch.setattr(value_zeroing, name, counted(getattr(value_zeroing, name)))
    return runs


def test_what_the_proof_contradicts_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that computes something else than its maps say: every token is run."""
    lens, given, _, _ = open_case("bert", "MaskedLM")
    expected = lens.flow(given, method="value_zeroing").maps
    right, runs = zeroed_values.zeroed_value_distances, count_runs(monkeypatch)
    monkeypatch.setattr(value_zeroing, "zeroed_value_distances", lambda *args: 1.01 * right(*args))
    found = lens.flow(given, method="value_zeroing").maps
    assert len(runs) == len(expected) * (1 + expected.shape[1])
    assert relative(found, expected) <= 1e-9


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_rows_in_blocks_of_any_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens, given, _, _ = open_case(name, heads(name)[0])
    whole = lens.flow(given, method="value_zeroing").maps
    monkeypatch.setattr(zeroed_values, "BLOCK_BYTES", 1)
    assert relative(lens.flow(given, method="value_zeroing").maps, whole) <= 1e-9
