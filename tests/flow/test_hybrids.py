"""Flows through recurrences."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope import Analyzer
from normscope.flow.freeze import freeze_model
from normscope.flow.maps import FrozenAttention
from normscope.flow.value_zeroing import value_zeroing_maps
from normscope.inputs.encode import encode
from tests.helpers.compare import relative
from tests.helpers.free_oracle import free_oracle
from tests.helpers.naive_flow import to_one
from tests.helpers.tiny import HYBRIDS, inputs, tiny

TOLERANCE = 1e-5  # transformers computes recurrences in float32


@cache
def lens_of(name: str) -> Analyzer:
    return Analyzer(tiny(name, "CausalLM"))


@pytest.mark.parametrize("length", [1, 2, 9, 70])
@pytest.mark.parametrize("name", HYBRIDS)
def test_sums_to_the_models_own_logits(name: str, length: int) -> None:
    lens = lens_of(name)
    encoding = inputs(name, lens.model, length)
    with torch.no_grad():
        logits = lens.model(**encoding).logits[0]
    found = lens.flow(encoding, target=1, position=length - 1)
    assert found.value == pytest.approx(float(logits[-1, 1]), rel=1e-5, abs=1e-5)
    size = max(abs(found.value), float(found.scores.abs().sum()))
    assert abs(float(found.scores.sum()) + found.remainder - found.value) <= TOLERANCE * size
    assert found.to is not None
    assert found.to.completeness <= TOLERANCE
    assert float(found.completeness.max()) <= 2 * TOLERANCE


@pytest.mark.parametrize("name", HYBRIDS)
def test_one_layer_is_the_layer_scope(name: str) -> None:
    """Every kind of layer, alone in a model, which the oracle without descriptions decomposes too."""
    lens = Analyzer(tiny(name, num_hidden_layers=1, **KINDS.get(name, {})))
    encoding = inputs(name, lens.model, 9)
    scope = lens.analyze(encoding, value_bias="remainder", scopes=["layer"])
    found = lens.flow(encoding)
    torch.testing.assert_close(found.maps, scope["layer"], rtol=1e-6, atol=1e-9)
    ((layer,),) = free_oracle(lens.model, encoding, own_biases=False, linear_gates=name.startswith("lfm2")).values()
    norms = layer.output.parts[:, 0].transpose(0, 1).norm(dim=-1)
    torch.testing.assert_close(found.maps[0], norms, rtol=1e-5, atol=1e-9)


KINDS: dict[str, dict[str, Any]] = {
    name: {"layer_types": ["linear_attention"]}
    for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid")
} | {
    "bamba": {"attn_layer_indices": []},
    "lfm2": {"layer_types": ["conv"]},
    "lfm2_moe": {"layer_types": ["conv"], "num_dense_layers": 0},
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_adjoint_is_the_transpose(name: str) -> None:
    """<G, L X> = <L* G, X> for every map of every layer, and a map for some rows gives these rows."""
    lens = lens_of(name)
    (item,) = encode(lens.loaded, inputs(name, lens.model, 70))
    frozen = freeze_model(lens.loaded, item)
    generator = torch.Generator().manual_seed(0)
    width = frozen.stacks[0].states[0].shape[1]
    X, G = (torch.randn(70, n, width, generator=generator, dtype=torch.float64) for n in (2, 3))
    attentions = 0
    for layer in frozen.stacks[0].layers:
        for block in layer.blocks:
            for one in block.branches[0]:
                Y, back = one.forward(X, None), one.adjoint(G.transpose(0, 1))[0]
                there, here = torch.einsum("nsd,ntd->st", Y, G), torch.einsum("nsd,tnd->st", X, back)
                torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-8)
                mixes = isinstance(one, FrozenAttention)
                some = one.for_rows(slice(60, 70)).forward(X if mixes else X[60:], None)
                torch.testing.assert_close(some, Y[60:])
                attentions += mixes
    assert attentions == len(frozen.stacks[0].layers)


MIXERS = ("linear_attn", "mamba", "mixer", "conv")
SPLIT = ("in_proj_qkv", [*range(24, 56)])  # 2 queries and 2 keys of 6, then 4 values of 8
VALUES: dict[str, tuple[str, list[int]]] = {  # where the values of a recurrence are
    "qwen3_next": ("in_proj_qkvz", [*range(12, 28), *range(56, 72)]),  # 2 groups: query and key, 2 values, 2 gates
    "qwen3_5_text": SPLIT,
    "qwen3_5_moe_text": SPLIT,
    **{name: ("in_proj", [*range(48, 72)]) for name in ("lfm2", "lfm2_moe")},  # B, C and values
    **{name: ("in_proj", [*range(48, 96)]) for name in ("mamba2", "bamba", "granitemoehybrid")},  # gate, values, ...
}


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_value_zeroing(name: str) -> None:
    """The model's own code, with the values of one token zeroed where the projection of one layer returns them."""
    lens = Analyzer(tiny(name))
    encoding = inputs(name, lens.model, 5)
    (item,) = encode(lens.loaded, encoding)
    found = value_zeroing_maps(lens.loaded, item, freeze_model(lens.loaded, item))
    for n, layer in enumerate(lens.model.layers):
        recurrent = next((part for path, part in layer.named_children() if path in MIXERS), None)
        path, columns = VALUES[name] if recurrent is not None else ("v_proj", slice(None))
        value = (layer.self_attn if recurrent is None else recurrent).get_submodule(path)
        assert relative(found[n], zeroing_map(lens, encoding, n, value, columns)) <= 1e-6


def zeroing_map(lens: Analyzer, encoding: Any, n: int, value: nn.Module, columns: Any) -> Tensor:
    outputs: list[Tensor] = []
    gone: list[int] = []

    def zero(module: nn.Module, args: Any, made: Tensor) -> Tensor:
        made = made.clone()
        for j in gone:
            made[:, j, columns] = 0
        return made

    def keep(module: nn.Module, args: Any, made: Any) -> None:
        outputs.append((made[0] if isinstance(made, tuple) else made)[0])

    handles = [value.register_forward_hook(zero), lens.model.layers[n].register_forward_hook(keep)]
    for one in [None, *range(5)]:
        gone[:] = [] if one is None else [one]
        lens.model(**encoding, use_cache=False)
    for handle in handles:
        handle.remove()
    whole, *others = outputs
    return to_one(torch.stack([1 - torch.cosine_similarity(whole, one, dim=-1) for one in others], dim=1))


@pytest.mark.parametrize("method", ["decompx", "alti", "alti_logit", "rollout:layer", "gradient_x_input"])
def test_other_methods(method: str) -> None:
    """They give rows that fit what they say."""
    lens = lens_of("qwen3_5_text")
    encoding = inputs("qwen3_5_text", lens.model, 9)
    scored = method in ("decompx", "alti_logit", "gradient_x_input")
    found = lens.flow(encoding, method=method, **({"target": 1, "position": 8} if scored else {}))
    if method in ("decompx", "alti_logit"):
        size = max(abs(found.value), float(found.scores.abs().sum()))
        assert abs(float(found.scores.sum()) + (found.remainder or 0) - found.value) <= TOLERANCE * size
    if method in ("alti", "rollout:layer"):
        torch.testing.assert_close(found.map.sum(-1), torch.ones(9, dtype=torch.float64))


@pytest.mark.parametrize("name", HYBRIDS)
def test_alti_sees_the_vectors_of_the_attention_block(name: str) -> None:
    """ALTI's first map, from the contribution vectors of the analysis."""
    lens = Analyzer(tiny(name, num_hidden_layers=1, **KINDS.get(name, {})))
    encoding = inputs(name, lens.model, 9)
    found = lens.flow(encoding, method="alti").maps[0]
    vectors = lens.analyze(encoding).parts("attention-block", 0)
    away = (vectors.actual[:, None] - vectors.contributions).abs().sum(-1)
    nearness = (vectors.actual.abs().sum(-1)[:, None] - away).clamp_min(0)
    torch.testing.assert_close(found, to_one(nearness).nan_to_num(0), rtol=1e-5, atol=1e-7)
