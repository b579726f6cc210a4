"""The table of outcomes: attack by attack, and refusals and failures by reason."""

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.attacks.outcome import FAILED, REFUSED, RIGHT, WARNED, Outcome

KINDS = (RIGHT, REFUSED, WARNED, FAILED)


def table(outcomes: Sequence[Outcome]) -> str:
    rows: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for name in outcome.attacks or ["(none)"]:
            rows.setdefault(name, Counter())[outcome.kind] += 1
    total = Counter(outcome.kind for outcome in outcomes)
    width = max(len(name) for name in [*rows, "attack"]) + 2
    lines = ["attack".ljust(width) + "".join(kind.rjust(9) for kind in KINDS)]
    for name, counts in [*sorted(rows.items()), ("all cases", total)]:
        lines.append(name.ljust(width) + "".join(str(counts[kind] or "-").rjust(9) for kind in KINDS))
    return "\n".join(lines)


def reasons(outcomes: Iterable[Outcome], kind: str) -> str:
    """How often each reason, with the seed of one case."""
    counts: Counter[str] = Counter()
    example: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.kind == kind:
            counts[outcome.group] += 1
            example.setdefault(outcome.group, outcome.seed)
    return "\n".join(f"{count:6}  {group}  (case {example[group]})" for group, count in counts.most_common())


def report(outcomes: Sequence[Outcome]) -> str:
    parts = [table(outcomes)]
    for kind in (REFUSED, WARNED, FAILED):
        found = reasons(outcomes, kind)
        if found:
            parts.append(f"{kind}, by reason:\n{found}")
    return "\n\n".join(parts)
