"""Published numbers beside ours: passed, failed, and not counted."""

from __future__ import annotations

import math

import pytest

from normscope.papers import published
from normscope.papers.verify import RULES, tolerance_rule, verify_numbers
from normscope.reports.report import Check, count_failures

PAPERS = ("emnlp2020", "emnlp2021", "ff")


def one(key: str, theirs: float, ours: float) -> Check:
    (check,) = verify_numbers({key: ours}, {key: theirs})
    return check


@pytest.mark.parametrize(
    ("key", "theirs", "ours", "passed"),
    [
        ("dispersion.mean", 5.15, 5.155, True),  # half a unit of the last digit
        ("dispersion.mean", 5.15, 5.158, False),
        ("data.tokens", 121_134, 121_134, True),
        ("data.tokens", 121_134, 121_135, False),
        ("share.weight.first.L1", 0.05, 0.065, True),  # at the very edge
        ("share.weight.first.L1", 0.05, 0.066, False),
        ("mixing.ATTNRESLN-N.mean", 18.75, 18.85, True),
        ("mixing.ATTNRESLN-N.mean", 18.75, 19.0, False),
        ("mixing.ATTNRESLN-N.L8.mask", 30, 31.9, True),
        ("mixing.ATTNRESLN-N.L8.other", 19, 20, False),
        ("expansion.code.L3", 0.632, 0.6325, True),
        ("expansion.code.L3", 0.632, 0.633, False),
        ("expansion.code.mean", 0.88, 0.877, True),
        ("similarity.ATTNRESLNFF-N", 0.79, 0.80, True),
        ("removed.L10", 0.88, 0.90, True),
        ("wordsplit.L3.p", 0.05, 0.049, True),
        ("wordsplit.L3.p", 0.05, 0.05, False),
        ("dispersion.mean", 5.15, math.nan, False),
        # shown, but never counted
        ("similarity.ATTNRES-N", 0.41, 0.97, None),
        ("similarity.ATTN-N", 0.48, 0.48, None),
        ("mixing.ATTN-N.max", 99.96, 90.0, None),
        ("alignment.AWO.norm.best", 41.4, 12.0, None),
    ],
)
def test_tolerances(key: str, theirs: float, ours: float, passed: bool | None) -> None:
    check = one(key, theirs, ours)
    assert check.passed is passed
    assert check.why
    assert check.verdict == {True: "PASS", False: "FAIL", None: "-"}[passed]


def test_only_numbers_of_both_are_compared_in_the_published_order() -> None:
    checks = verify_numbers({"b": 1.0, "a": 2.0, "ours": 3.0}, {"a": 2.0, "b": 5.0, "theirs": 1.0})
    assert [check.key for check in checks] == ["a", "b"]
    assert count_failures(checks) == 1


def test_published_numbers_pass_against_themselves() -> None:
    for paper in PAPERS:
        for model in published.published_models(paper):
            for corpus in published.published_corpora(paper, model):
                figures = published.published_numbers(paper, model, corpus)
                below = {key: value - 0.01 if tolerance_rule(key).below else value for key, value in figures.items()}
                assert count_failures(verify_numbers(below, figures)) == 0


def test_every_published_number_has_its_own_rule() -> None:
    for paper in PAPERS:
        for key in published.published_main_numbers(paper):
            assert tolerance_rule(key) is not RULES[-1], key
