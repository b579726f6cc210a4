"""Statistics of hand-made results with known answers, and the report's tables of them."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
import pytest

from normscope.papers.faithfulness import results, sections
from normscope.papers.faithfulness.measures import SHARES
from normscope.papers.faithfulness.results import MethodResult, Results
from normscope.reports.report import Table

PAIRS = [("mask", "without"), ("mask", "only")]


def result(method: str, without: Any, only: Any, scores: Any = None, choices: Any = None) -> MethodResult:
    """Two entries, the first with two contexts; probabilities 0.8, 0.8 and 0.5 with all tokens."""
    count = 3
    after = [np.broadcast_to(np.asarray(one, dtype=np.float64), (count, len(SHARES))) for one in (without, only)]
    picked = np.zeros((count, len(SHARES))) if choices is None else np.asarray(choices)
    return MethodResult(
        method,
        (("a", 3), ("a", 5), ("b", 2)),
        np.array([0.8, 0.8, 0.5]),
        np.array([0, 0, 1]),
        np.array([0, 2, 1]),
        dict(zip(PAIRS, after, strict=True)),
        dict.fromkeys(PAIRS, picked),
        tuple(map(tuple, scores or [(3, 2, 1)] * count)),
    )


def whole(*methods: MethodResult) -> Results:
    return Results({one.method: one for one in methods}, {"alti+": "not for it"}, {}, 3, 2, 3.0, 0.7, True)


def test_aopc() -> None:
    one = result("x", [0.2] * 13, [0.5] * 13)
    np.testing.assert_allclose(results.comprehensiveness(one, "mask"), [0.6, 0.6, 0.3])
    np.testing.assert_allclose(results.sufficiency(one, "mask"), [0.3, 0.3, 0.0])
    assert results.mean_over_entries(one, results.comprehensiveness(one, "mask")).mean == pytest.approx(
        0.45
    )  # by entry
    line = 0.8 - 0.8 * np.array(SHARES)
    two = result("x", line, line)
    np.testing.assert_allclose(results.comprehensiveness(two, "mask")[0], 0.8 * 0.5)  # shares 0.1 ... 0.9
    np.testing.assert_allclose(
        results.comprehensiveness(two, "mask", results.ERASER)[0], 0.8 * (0.01 + 0.05 + 0.1 + 0.2 + 0.5) / 5
    )


def test_areas() -> None:
    line = 1 - np.array(SHARES)
    one = result("x", line, 2 * line)
    np.testing.assert_allclose(results.probability_curve_area(one, "mask", "without"), [0.5] * 3)
    np.testing.assert_allclose(results.probability_curve_area(one, "mask", "only"), [1.0] * 3)


def test_choices_that_stay() -> None:
    choices = np.zeros((3, 13), dtype=int)
    choices[2, results.share_indices([0.1, 0.2, 0.3])] = 1
    one = result("x", [0] * 13, [0] * 13, choices=choices)
    kept = results.choices_kept(one, "mask", one.choice)
    np.testing.assert_array_equal(kept[:2], np.ones((2, 9)))
    np.testing.assert_array_equal(kept[2], [1, 1, 1, 0, 0, 0, 0, 0, 0])
    assert results.mean_over_entries(one, kept.mean(1)).mean == pytest.approx((1 + 1 / 3) / 2)
    right = results.choices_kept(one, "mask", one.given)
    assert right[1].sum() == 0


def test_leads_are_paired() -> None:
    one, other = result("x", [0.1] * 13, [0] * 13), result("random", [0.3] * 13, [0] * 13)
    lead = results.comprehensiveness_lead(one, other, "mask")
    assert (lead.mean, lead.low, lead.high) == pytest.approx((0.2, 0.2, 0.2))
    fewer = MethodResult(
        "y",
        one.contexts[2:],
        one.probability[2:],
        one.choice[2:],
        one.given[2:],
        {pair: values[2:] for pair, values in one.after.items()},
        {pair: values[2:] for pair, values in one.choices.items()},
        one.scores[2:],
    )
    assert results.comprehensiveness_lead(fewer, other, "mask").mean == pytest.approx(0.2)
    assert results.comprehensiveness_lead(one, fewer, "mask").mean == pytest.approx(0)


def test_agreement() -> None:
    one = result("x", [0] * 13, [0] * 13, [(3, 2, 1), (1, 2, 3), (1, 1, 1)])
    other = result("y", [0] * 13, [0] * 13, [(30, 20, 10), (3, 2, 1), (1, 2, 3)])
    np.testing.assert_allclose(results.score_correlations(one, other), [1, -1, nan])
    np.testing.assert_allclose(results.score_correlations(one, other, kendall=True), [1, -1, nan])
    assert results.mean_over_entries(one, results.score_correlations(one, other)).mean == pytest.approx(0)


def test_tables() -> None:
    good = result("exact", [0.1] * 13, [0.7] * 13)
    chance = result("random", [0.4] * 13, [0.4] * 13, [(1, 2, 3)] * 3)
    gradient = result("gradient_x_input", [0.3] * 13, [0.5] * 13, [(3, 1, 2)] * 3)
    found = whole(chance, good, gradient)
    section = sections.aopc_section(found, ["mask"])
    (table,) = (part for part in section.parts if isinstance(part, Table))
    assert [row[0] for row in table.rows] == ["exact", "gradient_x_input", "random"]
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["comp."] == pytest.approx((0.7 + 0.4) / 2)
    assert cells["suff."] == pytest.approx((0.1 - 0.2) / 2)
    assert cells["above random"] == pytest.approx(0.3)
    assert cells["contexts"] == 3
    assert table.rows[-1][table.columns.index("above random")] is None
    assert section.numbers["comprehensiveness.mask.exact"] == cells["comp."]
    kept, right = (part for part in sections.choice_accuracy_section(found, ["mask"]).parts if isinstance(part, Table))
    assert kept.rows[0][1:11] == pytest.approx([0.5] * 10)  # always choice 0: right for entry a, wrong for b
    assert right.rows[0][1:11] == pytest.approx([0.25] * 10)
    (areas,) = (part for part in sections.probability_curves_section(found, ["mask"]).parts if isinstance(part, Table))
    assert areas.rows[0][1] == pytest.approx(0.1)
    agreement = sections.score_agreement_section(found)
    assert agreement is not None
    (table,) = agreement.parts
    assert isinstance(table, Table)
    by_method = {row[0]: row[1:] for row in table.rows}
    assert by_method["gradient_x_input"] == (None,) * 4
    assert by_method["exact"][0] == pytest.approx(0.5)
    assert by_method["exact"][3] == pytest.approx(1 / 3)
    assert sections.score_agreement_section(whole(good, chance)) is None
