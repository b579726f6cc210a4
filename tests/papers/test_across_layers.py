"""The study across layers: every number against flow() itself and scipy."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import entropy, spearmanr

from normscope import Analyzer
from normscope.papers.across_layers import PAPER
from normscope.papers.across_layers.measures import effective_inputs
from normscope.papers.study import reproduce
from normscope.reports.report import Report
from tests.helpers.toys import speaker, toy_lens, translator

TEXTS = ("the cat sat on a mat", "the cat sat", "a mat on the cat sat on the mat")


def report_of(lens: Analyzer, folder: Path) -> Report:
    path = folder / "data.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return reproduce(PAPER, lens, path, folder / "out")[0]


def shares(maps: torch.Tensor) -> np.ndarray[Any, Any]:
    values = maps.double().numpy()
    return np.asarray(values / values.sum(-1, keepdims=True))


@pytest.mark.parametrize("make", [toy_lens, speaker])
def test_shares_and_inputs(make: Any, tmp_path: Path) -> None:
    lens = make()
    report = report_of(lens, tmp_path)
    numbers = report.numbers
    found = [shares(lens.flow(text).maps) for text in TEXTS]
    for layer in range(lens.depth):
        own = np.concatenate([np.diagonal(one[layer]) for one in found])
        assert numbers[f"own.L{layer + 1}"] == pytest.approx(own.mean(), rel=1e-5)
        inputs = np.concatenate([np.exp(entropy(one[layer], axis=-1)) for one in found])
        assert numbers[f"inputs.L{layer + 1}"] == pytest.approx(inputs.mean(), rel=1e-5)
        first = np.concatenate([one[layer][1:, 0] for one in found])
        assert numbers[f"first.L{layer + 1}"] == pytest.approx(first.mean(), rel=1e-5)
    causal = lens.loaded.stacks[0].side == "decoder"
    each = [1 / (row + 1 if causal else len(one[0])) for one in found for row in range(1, len(one[0]))]
    (claim,) = (claim for claim in report.claims if "even share" in claim.text)
    assert claim.ours.endswith(f"an even share is {np.mean(each):.3f}")
    assert numbers["completeness"] < 1e-5
    assert [title for title, _ in report.skipped] == ["Source and target"]


@pytest.mark.parametrize("make", [toy_lens, speaker])
def test_methods_against_the_exact_flow(make: Any, tmp_path: Path) -> None:
    lens = make()
    numbers = report_of(lens, tmp_path).numbers
    causal = lens.loaded.stacks[0].side == "decoder"
    for method in ("rollout", "rollout:layer", "alti"):
        for layer in range(lens.depth):
            each = []
            for text in TEXTS:
                a, b = (lens.flow(text, method=one).maps[layer].double().numpy() for one in ("exact", method))
                cells = np.tril(np.ones_like(a, dtype=bool)) if causal else np.ones_like(a, dtype=bool)
                each.append(spearmanr(a[cells], b[cells]).statistic)
            assert numbers[f"spearman.{method}.L{layer + 1}"] == pytest.approx(np.mean(each), abs=1e-4)


def test_an_encoder_decoder_has_a_source(tmp_path: Path) -> None:
    lens, pairs = translator(), [("the cat sat", "le chat"), ("the cat", "un tapis sur le chat")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"text": a, "target": b}) + "\n" for a, b in pairs))
    report, page = reproduce(PAPER, lens, path, tmp_path / "out", reader={"target": "target"})
    assert not report.skipped
    for layer in range(lens.loaded.depths[-1]):
        each = []
        for pair in pairs:
            flow = lens.flow(pair)
            other = [label.side == "encoder" for label in flow.columns]
            each.append(shares(flow.maps)[layer][:, other].sum(-1))
        assert report.numbers[f"source.L{layer + 1}"] == pytest.approx(np.concatenate(each).mean(), rel=1e-5)
    assert "Source and target" in page.read_text()


@pytest.mark.parametrize("make", [toy_lens, speaker])
def test_claims_are_decided_over_entries(make: Any, tmp_path: Path) -> None:
    """The last layer's first-token claim against a bootstrap by hand over all resamples of three texts."""
    lens = make()
    report = report_of(lens, tmp_path)
    assert len(report.claims) == 5
    assert all(claim.own for claim in report.claims)
    assert all("bootstrap over 3 entries" in claim.evidence for claim in report.claims)
    found = [shares(lens.flow(text).maps)[-1] for text in TEXTS]
    causal = lens.loaded.stacks[0].side == "decoder"
    sums = np.array([sum(one[n, 0] - 1 / (n + 1 if causal else len(one)) for n in range(1, len(one))) for one in found])
    counts = np.array([len(one) - 1 for one in found])
    (claim,) = (claim for claim in report.claims if "even share" in claim.text)
    assert f"difference {sums.sum() / counts.sum():.3f}, 95 % interval" in claim.evidence
    draws = [sums[list(some)].sum() / counts[list(some)].sum() for some in product(range(3), repeat=3)]
    low, high = (float(end) for end in re.findall(r"-?\d\.\d+", claim.evidence.split("interval")[1])[:2])
    assert (low, high) == (
        pytest.approx(min(draws), abs=1e-3),
        pytest.approx(max(draws), abs=1e-3),
    )  # 3 entries: widest


def test_one_entry_decides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(TEXTS[0] + "\n")
    report, _ = reproduce(PAPER, toy_lens(), path, tmp_path / "out")
    assert all(claim.holds is None for claim in report.claims)


def test_effective_number() -> None:
    even = torch.full((3, 8), 1 / 8)
    torch.testing.assert_close(effective_inputs(even), torch.full((3,), 8.0, dtype=torch.float64))
    alone = torch.tensor([[1.0, 0.0, 0.0]])
    assert float(effective_inputs(alone)) == pytest.approx(1.0)
