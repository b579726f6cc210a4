"""DecompX against the published algorithm in plain loops, its completeness everywhere, and its limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normscope import Analyzer
from normscope.flow import attention_blocks, decompx
from tests.helpers.bert_oracle import trace
from tests.helpers.compare import refused, relative
from tests.helpers.flow_cases import CASES, LANGUAGE, POST_NORM, encoding, heads, open_case, place, tolerance
from tests.helpers.oracle_parts import deviation, normalise
from tests.helpers.tiny import tiny

VALUE_BIASES = ("value.bias", "v_lin.bias", "attn.v.bias", "v_proj.bias", "value_proj.bias")
SPLITS = ("absdot", "abssim", "norm", "equal")


def split(vectors: Tensor, b: Tensor, kind: str) -> Tensor:
    """The vectors (k, d) of one output with a bias b (d,) given to them."""
    weights = []
    for vector in vectors:
        size = float(vector.norm())
        if size == 0:
            weights.append(0.0)
        elif kind == "absdot":
            weights.append(abs(float(vector @ b)))
        elif kind == "abssim":
            weights.append(abs(float(vector @ b)) / (size * float(b.norm())))
        else:
            weights.append(size if kind == "norm" else 1.0)
    return torch.stack([vector + w / sum(weights) * b for vector, w in zip(vectors, weights, strict=True)])


@torch.no_grad()
def published(
    model: Any, given: dict[str, Tensor], kind: str, bias_inside: bool = False
) -> tuple[list[Tensor], Tensor]:
    """(n, n, d) after every layer of a BERT classifier, and (n, classes) its logits by token, as in the paper. With
    `bias_inside`, as in the code: the values of the first layer have their bias."""
    traces = trace(model, given)
    n, d = traces[0].x.shape
    X = torch.zeros(n, n, d, dtype=torch.float64)
    for k in range(n):
        X[k, k] = traces[0].x[k]
    found = []
    for layer, module in zip(traces, model.bert.encoder.layer, strict=True):
        value, inside = module.attention.self.value, bias_inside and not found
        heads = len(layer.weights)
        new = torch.zeros_like(X)
        for i in range(n):
            sums = torch.zeros(n, d, dtype=torch.float64)
            for k in range(n):
                mixed = torch.zeros(heads, d // heads, dtype=torch.float64)
                for j in range(n):
                    v = (X[j, k] @ value.weight.T).view(heads, -1)
                    for h in range(heads):
                        mixed[h] += layer.weights[h, i, j] * v[h]
                        if inside and j == k:
                            mixed[h] += layer.weights[h, i, j] * value.bias.view(heads, -1)[h]
                sums[k] = mixed.flatten() @ layer.output.weight + X[i, k]
            outside = torch.zeros_like(value.bias) if inside else value.bias
            sums = split(sums, outside @ layer.output.weight + layer.output.bias, kind)
            s = deviation(layer.actual["ATTNRES-N"][i], layer.norm1)
            z = split(torch.stack([normalise(one, layer.norm1, s) for one in sums]), layer.norm1.beta, kind)
            p = split(torch.stack([one @ layer.ff_in.weight for one in z]), layer.ff_in.bias, kind)
            theta = layer.activation(layer.pre_activation[i]) / layer.pre_activation[i]
            y = split(torch.stack([(theta * one) @ layer.ff_out.weight for one in p]), layer.ff_out.bias, kind)
            s = deviation(layer.actual["ATTNRESLNFFRES-N"][i], layer.norm2)
            out = torch.stack([normalise(one, layer.norm2, s) for one in y + z])
            new[i] = split(out, layer.norm2.beta, kind)
        X = new
        found.append(X)
    pooler, classifier = model.bert.pooler.dense, model.classifier
    pooled = split(torch.stack([one @ pooler.weight.T for one in X[0]]), pooler.bias, kind)
    a = traces[-1].actual["ATTNRESLNFFRESLN-N"][0] @ pooler.weight.T + pooler.bias
    pooled = pooled * (torch.tanh(a) / a)
    return found, split(torch.stack([one @ classifier.weight.T for one in pooled]), classifier.bias, kind)


@pytest.mark.parametrize("kind", SPLITS)
def test_against_the_published_algorithm(kind: str) -> None:
    lens, given, _, _ = open_case("bert", "SequenceClassification")
    states, logits = published(lens.model, given, kind)
    found = lens.flow(given, method=f"decompx:{kind}", target=1)
    for ours, theirs in zip(found.maps, states, strict=True):
        assert relative(ours, theirs.norm(dim=-1)) <= 1e-9
    assert relative(found.scores, logits[:, 1]) <= 1e-9
    torch.testing.assert_close(logits.sum(0)[1], torch.tensor(found.value, dtype=torch.float64))
    if kind == "absdot":
        torch.testing.assert_close(lens.flow(given, method="decompx", target=1).scores, found.scores)


def test_against_the_published_code() -> None:
    """It leaves the value bias of the first layer inside the values of its token."""
    lens, given, _, _ = open_case("bert", "SequenceClassification")
    states, logits = published(lens.model, given, "absdot", bias_inside=True)
    found = lens.flow(given, method="decompx:published", target=1)
    for ours, theirs in zip(found.maps, states, strict=True):
        assert relative(ours, theirs.norm(dim=-1)) <= 1e-9
    assert relative(found.scores, logits[:, 1]) <= 1e-9
    assert found.to is not None
    assert found.to.completeness <= 1e-9
    paper = lens.flow(given, method="decompx", target=1)
    assert relative(found.scores, paper.scores) > 1e-3


@pytest.mark.parametrize("name", POST_NORM)
def test_the_published_variant_is_complete_and_differs_by_the_first_value_bias(name: str) -> None:
    model = tiny(name, heads(name)[0])
    lens, given = Analyzer(model), encoding(name, model)
    ours, paper = (lens.flow(given, method=method) for method in ("decompx:published", "decompx"))
    assert ours.completeness is not None
    assert float(ours.completeness.max()) <= 1e-9
    assert relative(ours.maps, paper.maps) > 1e-4
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(VALUE_BIASES):
                parameter.zero_()
    lens = Analyzer(model)
    ours, paper = (lens.flow(given, method=method) for method in ("decompx:published", "decompx"))
    torch.testing.assert_close(ours.maps, paper.maps, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_the_published_variant_is_for_post_norm_encoders(name: str) -> None:
    lens, given, _, _ = open_case(name, heads(name)[0])
    refused(lambda: lens.flow(given, method="decompx:published"), "post-LN", "use decompx")


def test_a_difference_of_two_classes() -> None:
    lens, given, _, _ = open_case("bert", "SequenceClassification")
    _, logits = published(lens.model, given, "absdot")
    found = lens.flow(given, method="decompx", target=(0, 1))
    assert relative(found.scores, logits[:, 0] - logits[:, 1]) <= 1e-9


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize(("name", "head"), CASES)
def test_scores_sum_to_the_logit_and_vectors_to_the_states(name: str, head: str, kind: str) -> None:
    lens, given, _, frozen = open_case(name, head)
    found = lens.flow(given, method=f"decompx:{kind}", target=1, position=place(frozen))
    assert found.remainder == 0
    assert found.to is not None
    assert found.to.completeness <= tolerance(name)
    assert found.completeness is not None
    assert float(found.completeness.max()) <= tolerance(name)


@pytest.mark.parametrize(("name", "head"), LANGUAGE)
def test_without_biases_it_is_the_exact_flow(name: str, head: str) -> None:
    model = tiny(name, head)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "beta")) or "bias_" in key:
                parameter.zero_()
        for key, buffer in model.named_buffers():
            if key.endswith("bias"):
                buffer.zero_()
    lens, given = Analyzer(model), encoding(name, model)
    ours, exact = (lens.flow(given, method=method, target=1, position=-1) for method in ("decompx", "exact"))
    torch.testing.assert_close(ours.maps, exact.maps, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(ours.scores, exact.scores, rtol=1e-9, atol=1e-12)


def test_bias_kept_apart_is_the_exact_flow() -> None:
    lens, given, _, _ = open_case("bert", "MaskedLM")
    ours, exact = (lens.flow(given, method=method, target=1, position=3) for method in ("decompx:none", "exact"))
    torch.testing.assert_close(ours.maps, exact.maps)
    torch.testing.assert_close(ours.scores, exact.scores)
    assert ours.remainder == exact.remainder


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("name", ["bert", "gpt2", "gptj", "bart", "t5-gated", "gpt_oss", "dinov2"])
def test_rows_in_blocks_of_any_size(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = dict(LANGUAGE)[name]
    _, _, _, frozen = open_case(name, head)
    whole, _ = decompx.decompx_maps(frozen, kind)
    for size in (1, 3 * 8 * 7 * 36):
        monkeypatch.setattr(attention_blocks, "ROW_BYTES", size)
        found, _ = decompx.decompx_maps(frozen, kind)
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)


def test_a_bias_goes_to_no_token_that_has_not_come_yet() -> None:
    """A causal model: zeros stay zero with every split, and masked tokens get no share."""
    lens, given, _, _ = open_case("gpt2", "CausalLM")
    for kind in SPLITS:
        assert float(lens.flow(given, method=f"decompx:{kind}").maps.triu(1).abs().max()) == 0
    lens, given, _, _ = open_case("bert", "MaskedLM")
    given = {key: value.clone() for key, value in given.items()}
    given["attention_mask"][0, [2, 4]] = 0
    for kind in SPLITS:
        found = lens.flow(given, method=f"decompx:{kind}", target=1, position=3)
        assert found.map.shape == (5, 5)
        assert found.completeness is not None
        assert float(found.completeness.max()) <= 1e-9
        assert found.to is not None
        assert found.to.completeness <= 1e-9
