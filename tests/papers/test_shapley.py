"""The Shapley study: its numbers against analyze() with both gates and scipy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from normscope import NormscopeError
from normscope.papers.shapley import PAPER
from normscope.papers.shapley.measures import PERMUTATIONS
from normscope.papers.study import reproduce
from tests.helpers.toys import speaker, toy_lens, translator

SHORT, LONG = "the cat sat on a mat", "the cat sat on the mat the cat sat on the mat the cat"


@pytest.mark.parametrize("make", [toy_lens, speaker])
@pytest.mark.parametrize(
    ("text", "gate"), [(SHORT, "shapley-exact"), (LONG, f"shapley-sampled:{PERMUTATIONS}")], ids=["exact", "sampled"]
)
def test_both_gates(make: Any, text: str, gate: str, tmp_path: Path) -> None:
    lens = make()
    path = tmp_path / "data.txt"
    path.write_text(text + "\n")
    numbers = reproduce(PAPER, lens, path, tmp_path / "out")[0].numbers
    scopes = ["attention-block", "ff", "layer"]
    ig, values = lens.analyze(text, scopes=scopes), lens.analyze(text, scopes=scopes, gate=gate)
    rows = len(ig.rows)
    cells = (
        np.ones((rows, rows), dtype=bool) if lens.loaded.stacks[0].side == "encoder" else np.tril(np.ones((rows, rows)))
    )
    for alias in ("ff", "layer"):
        scope = ig.resolve(alias)
        for layer in range(lens.depth):
            a, b, before = (
                one[alias][layer].double().numpy()[cells.astype(bool)]
                for one, alias in ((ig, scope), (values, scope), (ig, "attention-block"))
            )
            key = f"{scope}.L{layer + 1}"
            assert numbers[f"spearman.{key}"] == pytest.approx(spearmanr(a, b).statistic, abs=1e-4)
            assert numbers[f"difference.{key}"] == pytest.approx(np.abs(a - b).mean() / b.mean(), rel=1e-3)
            assert numbers[f"norms.{key}"] == pytest.approx(a.sum() / b.sum(), rel=1e-4)
            assert numbers[f"before_shapley.{key}"] == pytest.approx(spearmanr(before, b).statistic, abs=1e-4)
            assert numbers[f"before_ig.{key}"] == pytest.approx(spearmanr(before, a).statistic, abs=1e-4)
            largest = []
            for m in (ig[scope][layer], values[scope][layer]):
                m = np.where(cells.astype(bool) & ~np.eye(rows, dtype=bool), m.numpy(), -1)
                largest.append([int(row.argmax()) for row in m if (row >= 0).any()])
            same = np.mean([x == y for x, y in zip(*largest, strict=True)])
            assert numbers[f"same_top.{key}"] == pytest.approx(same)
            if gate == "shapley-exact":
                assert numbers[f"repeat.{key}"] == pytest.approx(1.0)


def test_claims_are_decided_over_entries(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    texts = ("the cat sat on a mat", "a big red bird", "the dog ran", "it was a red mat", "the bird saw it")
    path.write_text("\n".join(texts) + "\n")
    report, _ = reproduce(PAPER, toy_lens(), path, tmp_path / "out")
    assert len(report.claims) == 4
    assert all(claim.own for claim in report.claims)
    assert all("bootstrap over 5 entries" in claim.evidence for claim in report.claims)
    layers = range(1, toy_lens().depth + 1)
    lowest = min(report.numbers[f"spearman.ATTNRESLNFFRESLN-N.L{n}"] for n in layers)
    assert report.claims[0].holds in (None, lowest > 0.95)
    nearer = [
        report.numbers[f"before_shapley.ATTNRESLNFFRESLN-N.L{n}"] > report.numbers[f"before_shapley.ATTNRESLNFF-N.L{n}"]
        for n in layers
    ]
    assert report.claims[3].holds in (None, sum(nearer) > len(nearer) / 2)
    path.write_text(texts[0] + "\n")
    alone, _ = reproduce(PAPER, toy_lens(), path, tmp_path / "alone")
    assert all(claim.holds is None for claim in alone.claims)


def test_two_sides_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text(SHORT + "\n")
    with pytest.raises(NormscopeError, match="does not cover encoder-decoders"):
        reproduce(PAPER, translator(), path, tmp_path / "out")
