"""GlobEnc against plain loops over the vectors of the naive oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.bert_oracle import LayerTrace, trace
from tests.helpers.compare import relative
from tests.helpers.flow_cases import open_case
from tests.helpers.naive_flow import naive, naive_rollout, to_one
from tests.helpers.oracle_parts import deviation, normalise
from tests.helpers.tiny import BERT_FAMILIES


def encoder_vectors(name: str) -> list[Tensor]:
    """(n, n, d) of each layer: the vectors after the first norm, taken through the second with its real deviation."""
    lens, given, _, _ = open_case(name, "MaskedLM")
    traces: list[LayerTrace] = trace(lens.model, given)
    found = []
    for layer, oracle in zip(traces, naive(name, "MaskedLM")["encoder"], strict=True):
        z = oracle.vectors["ATTNRESLN-N"]
        e = torch.empty_like(z)
        for i in range(len(z)):
            s = deviation(layer.actual["ATTNRESLNFFRES-N"][i], layer.norm2)
            for j in range(len(z)):
                e[i, j] = normalise(z[i, j], layer.norm2, s)
        found.append(e.detach())
    return found


@pytest.mark.parametrize("name", BERT_FAMILIES)
def test_encoder_norms(name: str) -> None:
    lens, given, _, _ = open_case(name, "MaskedLM")
    expected = naive_rollout([e.norm(dim=-1) for e in encoder_vectors(name)])
    assert relative(lens.flow(given, method="globenc").map, expected) <= 1e-9
    assert relative(lens.flow(given, method="globenc:N_Enc").map, expected) <= 1e-9


def weights_with_residual(name: str) -> list[Tensor]:
    found = []
    for e, oracle in zip(encoder_vectors(name), naive(name, "MaskedLM")["encoder"], strict=True):
        A = oracle.weights.mean(0)
        made = torch.zeros_like(A)
        for i in range(len(A)):
            others = sum((e[i, j] for j in range(len(A)) if j != i), torch.zeros_like(e[i, i])).norm()
            r = others / (others + e[i, i].norm())
            rest = sum(A[i, j] for j in range(len(A)) if j != i)
            for j in range(len(A)):
                made[i, j] = 1 - r if i == j else r * A[i, j] / rest
        found.append(made)
    return found


@pytest.mark.parametrize("name", ["bert", "electra", "albert"])
def test_variants(name: str) -> None:
    lens, given, _, _ = open_case(name, "MaskedLM")
    layers = naive(name, "MaskedLM")["encoder"]
    eye = torch.eye(len(layers[0].weights[0]), dtype=torch.float64)
    norms = {scope: [one.vectors[scope].norm(dim=-1) for one in layers] for scope in layers[0].vectors}
    expected = {
        "W": [one.weights.mean(0) for one in layers],
        "W_FixedRes": [0.5 * one.weights.mean(0) + 0.5 * eye for one in layers],
        "W_Res": weights_with_residual(name),
        "N": norms["ATTN-N"],
        "N_FixedRes": [0.5 * to_one(one) + 0.5 * eye for one in norms["ATTN-N"]],
        "N_Res": norms["ATTNRES-N"],
        "N_ResLN": norms["ATTNRESLN-N"],
    }
    for variant, maps in expected.items():
        found = lens.flow(given, method=f"globenc:{variant}")
        assert relative(found.map, naive_rollout(maps)) <= 1e-9, variant


def test_masked_tokens_are_left_out() -> None:
    lens, given, _, _ = open_case("bert", "MaskedLM")
    given = {key: value.clone() for key, value in given.items()}
    given["attention_mask"][0, [2, 4]] = 0
    for variant in ("n_enc", "w_res"):
        assert lens.flow(given, method=f"globenc:{variant}").map.shape == (5, 5)
