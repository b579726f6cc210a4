"""Random attacks on every family: the library is right, as an independent judge sees it, or refuses.

The seeds are those of `python -m tests.attacks`, which runs any number of them, or a single one by its seed. A table of
all outcomes is printed at the end of the tests' output.
"""

from collections.abc import Callable

import pytest

from tests.attacks.case import run
from tests.attacks.outcome import FAILED
from tests.attacks.tally import report

Record = Callable[[str, object], None]
CHUNK = 100


def attack(seeds: range, record_property: Record) -> None:
    outcomes = [run(seed) for seed in seeds]
    record_property("attacks", [outcome.packed() for outcome in outcomes])
    print(f"\ncases {seeds.start} to {seeds.stop - 1}\n{report(outcomes)}")
    failed = [str(outcome) for outcome in outcomes if outcome.kind == FAILED]
    assert not failed, "\n".join(failed)


def test_a_few_attacks(record_property: Record) -> None:
    attack(range(200), record_property)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(50))
def test_many_attacks(chunk: int, record_property: Record) -> None:
    attack(range(1_000_000 + chunk * CHUNK, 1_000_000 + (chunk + 1) * CHUNK), record_property)
