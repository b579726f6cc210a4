"""Claims from estimates: the verdict, the evidence for it, and whether it depends on a reading."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from normscope.measures.uncertainty import ALPHA, Estimate, decide_at_least
from normscope.papers.common import paper_layers_text
from normscope.reports.report import VERDICTS, Claim


def decided_claim(
    text: str,
    margins: Estimate | Sequence[Estimate],
    ours: str,
    published: str = "",
    *,
    at_least: int | None = None,
    evidence: str | None = None,
    layers: Sequence[int] | None = None,
    under: Mapping[str, bool | None] | None = None,
    own: bool = False,
    alpha: float = ALPHA,
) -> Claim:
    """A claim decided by its margins, which should be positive.

    Args:
        text: The claim.
        margins: One margin, or several of which `at_least` should be positive; default: all.
        ours: Our numbers.
        published: The published ones.
        at_least: How many of the margins the claim asks for.
        evidence: Default: the interval or p-value of a single margin, or the layers that decide.
        layers: The numbers of the layers that the margins belong to, named in the evidence; default: 1, 2, ...
        under: Other readings, as "axis=input", and the verdict under each.
        own: A question of our own, not a claim of the paper.
        alpha: The level of the decision.
    """
    several = [margins] if isinstance(margins, Estimate) else list(margins)
    if not several:
        return Claim(text, None, ours, published, evidence or "", own=own)
    count = len(several) if at_least is None else at_least
    holds = decide_at_least(count, several, alpha)
    if evidence is None:
        one = several[0]
        evidence = describe_estimate(one) if len(several) == 1 else describe_layers(several, layers, alpha)
    others = tuple(
        f"with {name}: {VERDICTS[verdict]}" for name, verdict in (under or {}).items() if verdict is not holds
    )
    return Claim(text, holds, ours, published, evidence, others, own)


def describe_estimate(one: Estimate, spec: str = ".3g", unit: str = "", name: str = "") -> str:
    """ "difference 5.2, 95 % interval 3.1 to 8.2 (bootstrap over 872 sequences)"; a p-value if there is no interval."""
    if math.isnan(one.value):
        return one.method
    if math.isnan(one.low):
        p = one.two_sided
        return f"p = {p:.2g} ({one.method})" if p < 1 or "over" in one.method else one.method
    value = f"{name} {one.value:{spec}}{unit}, " if name else ""
    return f"{value}95 % interval {one.low:{spec}} to {one.high:{spec}}{unit} ({one.method})"


def describe_layers(
    margins: Sequence[Estimate],
    layers: Sequence[int] | None = None,
    alpha: float = ALPHA,
    words: tuple[str, str] = ("significant in", "reversed in"),
    methods: bool = True,
) -> str:
    """ "significant in layers 1-3, 5; reversed in layer 6; open in layer 4 (bootstrap over 872 sequences)" """
    split = zip((*words, "open in"), split_layers(margins, layers, alpha), strict=True)
    found = "; ".join(f"{where} {paper_layers_text(some)}" for where, some in split if some)
    names = list(dict.fromkeys(margin.method for margin in margins))
    return f"{found} ({'; '.join(names[:2])})" if methods else found


def split_layers(
    margins: Sequence[Estimate], layers: Sequence[int] | None = None, alpha: float = ALPHA
) -> tuple[list[int], list[int], list[int]]:
    """The layers whose margin is significantly positive, significantly negative, and undecided, each by itself."""
    numbers = range(1, len(margins) + 1) if layers is None else layers
    verdicts = [(layer, margin.decide(alpha)) for layer, margin in zip(numbers, margins, strict=True)]
    found = [[layer for layer, verdict in verdicts if verdict is wanted] for wanted in (True, False, None)]
    return found[0], found[1], found[2]


def majority(count: int) -> int:
    """The smallest number that is more than half."""
    return count // 2 + 1
