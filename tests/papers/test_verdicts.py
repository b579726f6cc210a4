"""Claims from estimates: verdicts, the layers named, and readings that change them."""

from __future__ import annotations

from math import nan

from normscope.measures.uncertainty import Estimate, undecided
from normscope.papers.verdicts import decided_claim, describe_estimate, majority, split_layers

BOOTSTRAP = "bootstrap over 40 sequences"
YES = Estimate(2.0, 1.0, 3.0, 1e-4, 1.0, BOOTSTRAP)
NO = Estimate(-2.0, -3.0, -1.0, 1.0, 1e-4, BOOTSTRAP)
OPEN = Estimate(0.1, -1.0, 1.2, 0.4, 0.6, BOOTSTRAP)


def test_one_margin() -> None:
    found = decided_claim("A is larger than B", YES, "5 against 3", "7 against 2")
    assert (found.holds, found.verdict, found.published) == (True, "holds", "7 against 2")
    assert found.evidence == "95 % interval 1 to 3 (bootstrap over 40 sequences)"
    assert decided_claim("", NO, "").verdict == "does not hold"
    assert decided_claim("", OPEN, "").verdict == "cannot be said"


def test_layers_that_are_reversed_are_named() -> None:
    margins = [YES, YES, YES, OPEN, YES, NO]
    found = decided_claim("In most layers", margins, "in 4 of 6", at_least=majority(6))
    assert found.holds is True
    assert found.evidence == f"significant in layers 1-3, 5; reversed in layer 6; open in layer 4 ({BOOTSTRAP})"
    assert decided_claim("In every layer", margins, "").holds is False
    assert decided_claim("In some layer", margins, "", at_least=1).holds is True
    assert decided_claim("In most layers", [YES, OPEN, OPEN, OPEN], "", at_least=majority(4)).holds is None
    assert split_layers(margins, [2, 4, 6, 8, 10, 12]) == ([2, 4, 6, 10], [12], [8])


def test_readings_that_change_the_verdict_are_named() -> None:
    found = decided_claim("A", YES, "", under={"axis=input": None, "level=type": True, "sd=sample": False})
    assert found.readings == ("with axis=input: cannot be said", "with sd=sample: does not hold")


def test_tests_without_an_interval() -> None:
    assert describe_estimate(Estimate(0.8, nan, nan, 0.02, 0.99, "permutation over 6 layers")) == (
        "p = 0.04 (permutation over 6 layers)"
    )
    assert describe_estimate(undecided(nan, "too few layers")) == "too few layers"
    assert decided_claim("A", [], "no data").verdict == "cannot be said"
