"""Attention weights recomputed by blocks of rows, and rows of maps, against passes that keep all weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import normscope.tracing.attention_rows
import normscope.tracing.recorded
import normscope.tracing.trace
from normscope import Analyzer
from normscope.flow.freeze import freeze_model
from normscope.flow.maps import FrozenAttention, FrozenModel
from normscope.inputs.encode import encode
from tests.helpers.compare import relative
from tests.helpers.flow_cases import LANGUAGE, encoding, open_case, place, tolerance
from tests.helpers.tiny import FAMILIES, inputs, tiny

CAUSAL = ("llama", "mistral", "gemma2", "gpt_oss", "qwen2", "gpt2")  # windows of 4 tokens, softcap, sinks, biases


def keep_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every pass keep all attention weights, as if no attention could be recomputed."""
    monkeypatch.setattr(normscope.tracing.trace, "uses_known_attention", lambda base: False)


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one or a few rows."""
    monkeypatch.setattr(normscope.tracing.recorded, "CACHED_SCORES", 60)
    monkeypatch.setattr(normscope.tracing.attention_rows, "BLOCK_SCORES", 60)


def attentions(model: FrozenModel) -> list[FrozenAttention]:
    layers = [layer for stack in model.stacks for layer in stack.layers]
    chains = [chain for layer in layers for block in layer.blocks for chain in block.branches]
    return [one for chain in chains for one in chain if isinstance(one, FrozenAttention)]


@pytest.mark.parametrize(("name", "head"), LANGUAGE)
def test_recomputed_weights_give_the_scores_of_stored_ones(
    name: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens, given, _, frozen = open_case(name, head)
    row = place(frozen)
    small_blocks(monkeypatch)
    found = lens.flow(given, target=1, position=row).scores
    keep_all_weights(monkeypatch)
    assert relative(found, lens.flow(given, target=1, position=row).scores) <= tolerance(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_rows_of_the_full_maps(name: str) -> None:
    model = tiny(name)
    lens: Analyzer[Any] = Analyzer(model)
    given = encoding(name, model)
    full, some = lens.analyze(given, heads=True), lens.analyze(given, heads=True, rows=[-1, 1])
    full, some = (getattr(one, "decoder", one) for one in (full, some))
    for scope in full.scopes:
        assert relative(some[scope], full[scope][:, [-1, 1]]) <= 1e-9, scope


def masked(length: int, side: str) -> dict[str, Tensor]:
    """An input with a masked token near one end; tokens masked at the end itself are left out."""
    ids = torch.randint(3, 50, (1, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if side != "none":
        mask[0, 1 if side == "left" else -2] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("length", "side"), [(1, "none"), (2, "none"), (12, "none"), (12, "left"), (12, "right")])
@pytest.mark.parametrize("name", CAUSAL)
def test_fused_attention_recomputes_the_weights(
    name: str, length: int, side: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(name, "CausalLM").to(dtype)
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    lens = Analyzer(model)
    given = masked(length, side)
    (item,) = encode(lens.loaded, given)
    small_blocks(monkeypatch)
    found = [one.weights.all for one in attentions(freeze_model(lens.loaded, item))]
    scores = lens.flow(given, target="top", position=length // 2).scores
    row = lens.analyze(given, rows=[-1])
    keep_all_weights(monkeypatch)
    expected = [one.weights.all for one in attentions(freeze_model(lens.loaded, item))]
    limit = 1e-9 if dtype == torch.float64 else 1e-4
    real = item.sides["decoder"].real
    for one, other in zip(found, expected, strict=True):
        assert float((one[:, real] - other[:, real]).abs().max()) <= limit
    assert relative(scores, lens.flow(given, target="top", position=length // 2).scores) <= limit
    full = lens.analyze(given)
    for scope in full.scopes:
        assert relative(row[scope], full[scope][:, -1:]) <= limit, scope


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_in_a_padded_batch(side: str, dtype: torch.dtype) -> None:
    model = tiny("mistral").to(dtype)
    model.set_attn_implementation("sdpa")
    lens: Analyzer[Any] = Analyzer(model)
    given = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(given)
    mask[0, slice(0, 5) if side == "left" else slice(7, None)] = 0
    batch = {"input_ids": given, "attention_mask": mask}
    for some, full in zip(lens.stream(batch, rows=[-1, 0]), lens.stream(batch), strict=True):
        for scope in full.scopes:
            assert relative(some[scope], full[scope][:, [-1, 0]]) <= (1e-9 if dtype == torch.float64 else 1e-4)


def test_only_the_logits_that_a_target_reads_are_computed() -> None:
    model = tiny("llama", "CausalLM")
    lens = Analyzer(model)
    given = inputs("llama", model, 20, 5) | {"attention_mask": torch.ones(1, 20, dtype=torch.long)}
    seen: list[int] = []
    with torch.no_grad():
        logits = model(**given).logits[0]
    handle = model.get_output_embeddings().register_forward_hook(lambda m, a, y: seen.append(y.shape[1]))
    try:
        found = lens.flow(given, target="top", position=3)
    finally:
        handle.remove()
    assert max(seen) == 9  # one, and the last eight
    assert found.value == pytest.approx(float(logits[3].max()), rel=1e-6)
    assert found.to is not None
    assert found.to.completeness <= 1e-6
