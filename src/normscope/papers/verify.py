"""Our numbers against the published ones: how close counts as the same, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from normscope.reports.report import Check


class ToleranceRule(NamedTuple):
    """How close a number must be, and why. `below`: it passes if it is less than the published one."""

    pattern: str  # of the whole key
    tolerance: float
    why: str
    counts: bool = True
    below: bool = False


# The first match counts. The default is half a unit of the last printed digit, plus a fifth of that for other versions
# of the libraries.
RULES = (
    ToleranceRule(r"data\..*|pairs\..*", 0, "a count of the data: exact"),
    ToleranceRule(r"dispersion\..*|spearman\..*", 0.006, "two digits are printed"),
    ToleranceRule(r"share\.weight\..*", 0.015, "read off Fig. 3 to 0.01"),
    ToleranceRule(r"share\.norm\..*", 0.055, "read off Fig. 3 to 0.05"),
    ToleranceRule(r"alignment\..*\.(rho|r)", 0.2, "the mean of five trained models", counts=False),
    ToleranceRule(r"alignment\..*", 5, "the mean of five trained models", counts=False),
    ToleranceRule(r"frequency\..*", 0.006, "two digits are printed"),
    ToleranceRule(
        r"mixing\..*\.(max|min)", 3, "an extreme of a million values, under another draw of masks", counts=False
    ),
    ToleranceRule(r"mixing\..*\.mean", 0.16, "one digit is printed, and means move by 0.1 with the draw of masks"),
    ToleranceRule(r"mixing\..*\.L\d+\.mask", 2, "few tokens, others under another draw of masks"),
    ToleranceRule(
        r"mixing\..*\.L\d+\.(first|separator)", 1.1, "whole numbers are printed; one or two tokens of a sequence"
    ),
    ToleranceRule(
        r"mixing\..*\.L\d+\..*", 0.7, "whole numbers are printed, and means move by 0.1 with the draw of masks"
    ),
    ToleranceRule(r"depth\..*", 0.03, "a rank correlation of a dozen values: near ties swap with the draw of masks"),
    ToleranceRule(r"expansion\.code\.L\d+", 0.0006, "three digits are printed"),
    ToleranceRule(r"expansion\..*", 0.006, "two digits are printed"),
    ToleranceRule(
        r"similarity\.(ATTN|ATTNRES)-N",
        0.02,
        "cannot be reached from the maps as they are defined: ATTN-N and ATTNRES-N differ in the diagonal only",
        counts=False,
    ),
    ToleranceRule(
        r"similarity\..*\.(L\d+|min|max)", 0.025, "two digits are printed; one layer, under another draw of masks"
    ),
    ToleranceRule(
        r"(similarity|before|pair)\..*", 0.015, "two digits are printed, and means move with the draw of masks"
    ),
    ToleranceRule(r"removed\..*", 0.03, "two digits are printed; 7 or 8 of 768 dimensions are removed"),
    ToleranceRule(
        r"(wordsplit|entity)\..*\.p", 0, "published as significant at this level: ours must lie below", below=True
    ),
    ToleranceRule(r".*", 0.006, "two digits are printed"),
)


def check_numbers(numbers: Mapping[str, float], figures: Mapping[str, float]) -> tuple[Check, ...]:
    """A check of each published number that we have, in the order of publication."""
    return tuple(_check_number(key, value, float(numbers[key])) for key, value in figures.items() if key in numbers)


def tolerance_rule(key: str) -> ToleranceRule:
    """The rule that a key falls under."""
    return next(rule for rule in RULES if re.fullmatch(rule.pattern, key))


def _check_number(key: str, published: float, ours: float) -> Check:
    rule = tolerance_rule(key)
    slack = 1e-9 * max(1.0, abs(published))  # decimal fractions are not exact in binary
    near = ours < published if rule.below else abs(ours - published) <= rule.tolerance + slack
    passed = (near and math.isfinite(ours)) if rule.counts else None
    return Check(key, published, ours, rule.tolerance, passed, rule.why)
