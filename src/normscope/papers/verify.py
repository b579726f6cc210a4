"""Comparison of our numbers with the published ones: tolerances, and the reasons for them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from normscope.reports.report import Check


class Tolerance(NamedTuple):
    """The tolerance of a number, with the reason. `below`: it passes if it is less than the published number."""

    pattern: str  # matches the whole key
    tolerance: float
    why: str
    counts: bool = True
    below: bool = False


# The first match applies. The default is half a unit of the last printed digit, plus a fifth of that to allow for other
# library versions.
RULES = (
    Tolerance(r"data\..*|pairs\..*", 0, "a count: exact"),
    Tolerance(r"dispersion\..*|spearman\..*", 0.006, "two digits are printed"),
    Tolerance(r"share\.weight\..*", 0.015, "read off Fig. 3 to 0.01"),
    Tolerance(r"share\.norm\..*", 0.055, "read off Fig. 3 to 0.05"),
    Tolerance(r"alignment\..*\.(rho|r)", 0.2, "the mean of five trained models", counts=False),
    Tolerance(r"alignment\..*", 5, "the mean of five trained models", counts=False),
    Tolerance(r"frequency\..*", 0.006, "two digits are printed"),
    Tolerance(
        r"mixing\..*\.(max|min)",
        3,
        "an extreme of a million values, which a single masked token can change",
        counts=False,
    ),
    Tolerance(r"mixing\..*\.mean", 0.16, "one digit is printed, and means vary by 0.1 with the masked tokens"),
    Tolerance(r"mixing\..*\.L\d+\.mask", 2, "few tokens, which differ with the masked tokens"),
    Tolerance(r"mixing\..*\.L\d+\.(first|separator)", 1.1, "integers are printed; one or two tokens per sequence"),
    Tolerance(r"mixing\..*\.L\d+\..*", 0.7, "integers are printed, and means vary by 0.1 with the masked tokens"),
    Tolerance(r"depth\..*", 0.03, "a rank correlation of a dozen values: near ties swap with the masked tokens"),
    Tolerance(r"expansion\.code\.L\d+", 0.0006, "three digits are printed"),
    Tolerance(r"expansion\..*", 0.006, "two digits are printed"),
    Tolerance(
        r"similarity\.(ATTN|ATTNRES)-N",
        0.02,
        "not reachable with raw maps, since those of ATTN-N and ATTNRES-N differ only on the diagonal",
        counts=False,
    ),
    Tolerance(
        r"similarity\..*\.(L\d+|min|max)", 0.025, "two digits are printed; a single layer, with other masked tokens"
    ),
    Tolerance(r"(similarity|before|pair)\..*", 0.015, "two digits are printed, and means vary with the masked tokens"),
    Tolerance(r"removed\..*", 0.03, "two digits are printed; 7 or 8 of 768 dimensions are removed"),
    Tolerance(
        r"(wordsplit|entity)\..*\.p", 0, "published as significant at this level: ours must be below it", below=True
    ),
    Tolerance(r".*", 0.006, "two digits are printed"),
)


def verify_numbers(numbers: Mapping[str, float], figures: Mapping[str, float]) -> tuple[Check, ...]:
    """A check for each published number that we have, in the published order."""
    return tuple(_verify_number(key, value, float(numbers[key])) for key, value in figures.items() if key in numbers)


def tolerance_rule(key: str) -> Tolerance:
    """The rule that applies to a key."""
    return next(rule for rule in RULES if re.fullmatch(rule.pattern, key))


def _verify_number(key: str, published: float, ours: float) -> Check:
    rule = tolerance_rule(key)
    slack = 1e-9 * max(1.0, abs(published))  # decimal fractions are not exact in binary
    near = ours < published if rule.below else abs(ours - published) <= rule.tolerance + slack
    passed = (near and math.isfinite(ours)) if rule.counts else None
    return Check(key, published, ours, rule.tolerance, passed, rule.why)
