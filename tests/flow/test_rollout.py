"""Rollout of attention weights and of any scope, against products of the naive oracles' maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normscope.flow.rollout import rollout, rollout_half_residual
from tests.helpers.compare import refused, relative
from tests.helpers.flow_cases import ONE_SIDED, heads, open_case, tolerance
from tests.helpers.naive_flow import naive, naive_joint_rollout, naive_rollout, to_one
from tests.helpers.tiny import ENCODER_DECODER
from tests.helpers.toys import speaker


def test_by_hand() -> None:
    one = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    other = torch.tensor([[0.2, 0.8], [0.0, 1.0]])
    found = rollout(torch.stack([one, other]))
    torch.testing.assert_close(found[0], one)
    torch.testing.assert_close(found[1], torch.tensor([[0.6, 0.4], [0.5, 0.5]]))
    torch.testing.assert_close(rollout_half_residual(one), torch.tensor([[1.0, 0.0], [0.25, 0.75]]))


@pytest.mark.parametrize("name", ONE_SIDED)
def test_attention_rollout(name: str) -> None:
    """Abnar & Zuidema (2020): 0.5 A + 0.5 I, A the mean of the heads, multiplied."""
    lens, given, _, _ = open_case(name, heads(name)[0])
    (layers,) = naive(name, heads(name)[0]).values()
    mixed = [0.5 * one.weights.mean(0) + 0.5 * torch.eye(len(one.weights[0]), dtype=torch.float64) for one in layers]
    found = lens.flow(given, method="rollout")
    assert relative(found.map, naive_rollout(mixed)) <= 1e-5  # some softmaxes are float32
    torch.testing.assert_close(found.maps[0], mixed[0], rtol=1e-5, atol=1e-6)
    assert found.completeness is None


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("scope", ["layer", "attention-block", "attention"])
@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "gptj", "llama", "gemma2", "vit"])
def test_rollout_of_a_scope(name: str, scope: str, raw: bool) -> None:
    lens, given, _, _ = open_case(name, heads(name)[0])
    full = lens.analyze(given, scopes=[scope]).scopes[0]
    (layers,) = naive(name, heads(name)[0]).values()
    maps = [one.vectors[full].norm(dim=-1) for one in layers]
    expected = naive_rollout(maps if raw else [to_one(one) for one in maps])
    found = lens.flow(given, method=f"rollout{'-raw' * raw}:{scope}")
    assert relative(found.map, expected) <= max(1e-6, tolerance(name))
    same = lens.flow(given, method=f"rollout{'-raw' * raw}:{full.lower()}")
    torch.testing.assert_close(same.map, found.map)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("scope", ["layer", "attention-block"])
@pytest.mark.parametrize("name", ENCODER_DECODER)
def test_rollout_across_two_sides(name: str, scope: str, raw: bool) -> None:
    lens, given, _, _ = open_case(name, "Seq2SeqLM")
    names = lens.analyze(given, scopes=[scope])
    maps: dict[str, list[Tensor]] = {}
    for side, found in (("encoder", names.encoder), ("decoder", names.decoder)):
        vectors = [one.vectors[found.scopes[0]].norm(dim=-1) for one in naive(name, "Seq2SeqLM")[side]]
        maps[side] = vectors if raw else [to_one(one) for one in vectors]
    expected = naive_joint_rollout(maps["decoder"], maps["encoder"])
    assert relative(lens.flow(given, method=f"rollout{'-raw' * raw}:{scope}").map, expected) <= 1e-5


def test_masked_tokens_have_no_row_and_no_column() -> None:
    lens, given, _, _ = open_case("bert", "MaskedLM")
    given = {key: value.clone() for key, value in given.items()}
    given["attention_mask"][0, [2, 4]] = 0
    for method in ("rollout", "rollout:layer"):
        found = lens.flow(given, method=method)
        assert found.map.shape == (5, 5)
        torch.testing.assert_close(found.map.sum(-1), torch.ones(5, dtype=torch.float64))


def test_scopes_that_cannot_be_rolled_out() -> None:
    bert, given, _, _ = open_case("bert", "MaskedLM")
    refused(lambda: bert.flow(given, method="rollout:LNATTN-N"), "Unknown scope", "ATTNRESLN-N")
    refused(lambda: bert.flow(given, method="rollout-raw"), "needs a scope")
    bart, given, _, _ = open_case("bart", "Seq2SeqLM")
    refused(lambda: bart.flow(given, method="rollout"), "BART", "cross-attention is not in its definition")
    for scope in ("ATTNRESLN-N", "attention", "XATTN-N", "ATTNRESLNXATTNRESLN-N"):
        refused(lambda scope=scope: bart.flow(given, method=f"rollout:{scope}"), "both sides", "rollout:layer")


@pytest.mark.parametrize("method", ["rollout", "rollout:layer", "rollout-raw:layer"])
def test_sources_do_not_change_the_maps(method: str) -> None:
    lens = speaker()
    found = lens.flow("the cat sat", method=method, target="top", sources="word")
    assert relative(found.maps, lens.flow("the cat sat", method=method).maps) <= 1e-9
    assert sum(map(len, found.sources.values())) == len(found.columns)
