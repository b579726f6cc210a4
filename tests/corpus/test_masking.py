"""Which tokens become [MASK]."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope import NormscopeError
from normscope.corpus import mask, masked_positions, papers_masking

MASK = -1
SPECIAL = st.lists(st.booleans(), min_size=1, max_size=200).filter(lambda special: not all(special))


@given(special=SPECIAL, seed=st.integers(), id=st.text())
def test_as_many_as_the_papers_and_never_special(special: list[bool], seed: int, id: str) -> None:
    ids = list(range(len(special)))
    masked = mask(ids, special, MASK, seed, id)
    changed = [position for position, (old, new) in enumerate(zip(ids, masked, strict=True)) if old != new]
    assert all(masked[position] == MASK and not special[position] for position in changed)
    assert len(changed) == max(1, int(0.12 * special.count(False)))
    assert tuple(changed) == masked_positions(special, seed, id)
    assert ids == list(range(len(special)))


@given(entries=st.dictionaries(st.text(), SPECIAL, max_size=8), seed=st.integers(0, 9), data=st.data())
def test_masking_is_independent_of_order_and_other_entries(
    entries: dict[str, list[bool]], seed: int, data: st.DataObject
) -> None:
    alone = {id: masked_positions(special, seed, id) for id, special in entries.items()}
    random.seed(1)  # neither does the generator that everyone shares
    shuffled = data.draw(st.permutations(list(entries)))
    assert {id: masked_positions(entries[id], seed, id) for id in shuffled} == alone


def test_seed_and_id_matter() -> None:
    special = [True, *[False] * 100, True]
    drawn = {masked_positions(special, seed, id) for seed in range(5) for id in ("a", "b", "1:a", "")}
    assert len(drawn) == 20


def test_the_same_in_every_process() -> None:
    code = "from normscope.corpus import masked_positions; print(masked_positions([False] * 50, 0, 'wiki:8'))"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": hashseed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for hashseed in ("1", "2")
    }
    assert runs == {str(masked_positions([False] * 50, 0, "wiki:8"))} == {"(6, 10, 15, 20, 22, 25)"}


@given(sequences=st.lists(SPECIAL, max_size=6), seed=st.integers(0, 9))
def test_the_papers_draw(sequences: list[list[bool]], seed: int) -> None:
    random.seed(seed)  # as their code does, with the generator that everyone shares
    expected = []
    for special in sequences:
        candidates = [position for position, is_special in enumerate(special) if not is_special]
        expected.append(tuple(sorted(random.sample(candidates, max(1, int(len(candidates) * 0.12))))))
    assert list(papers_masking(sequences, seed)) == expected


def test_nothing_to_mask() -> None:
    with pytest.raises(NormscopeError, match="Every token is special"):
        masked_positions([True, True], 0, "a")
    with pytest.raises(NormscopeError, match="3 token ids, but 2"):
        mask([1, 2, 3], [False, False], MASK, 0, "a")
