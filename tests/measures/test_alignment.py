"""Word alignments by hand: the shift between AWO and AWI, subwords to words, links, error rates."""

import random
from math import isnan

import pytest
import torch

from normscope import NormscopeError
from normscope.corpus import strict
from normscope.corpus.readers.alignments import NOTATIONS, parse_alignment_links
from normscope.corpus.readers.formats import read
from normscope.measures.alignment import (
    Hits,
    alignment_maps_of_words,
    argmax_alignment_links,
    count_gold_alignment_hits,
    count_link_hits,
    format_pharaoh,
    word_links,
)
from tests.helpers.files import real_file

# Three source tokens (two of one word, then the end), decoder inputs: start, y_1 (two subwords), y_2.
MAP = torch.tensor(
    [
        [0.1, 0.2, 0.7],  # reads start, writes the first subword of y_1
        [0.3, 0.3, 0.4],  # reads it, writes the second
        [0.5, 0.1, 0.4],  # reads the second, writes y_2
        [0.0, 0.9, 0.1],  # reads y_2, writes the end
    ]
)
SOURCE, TARGET = (0, 0, None), (None, 0, 0, 1)


def test_awo_reads_the_row_that_writes_the_word() -> None:
    expected = torch.tensor([[(0.3 + 0.6) / 2, (0.7 + 0.4) / 2], [0.6, 0.4]])
    torch.testing.assert_close(alignment_maps_of_words(MAP, SOURCE, TARGET, "AWO"), expected)


def test_awi_reads_the_row_that_reads_the_word() -> None:
    expected = torch.tensor([[0.6, 0.4], [0.9, 0.1]])  # the mean of rows 1 and 2; row 3
    torch.testing.assert_close(alignment_maps_of_words(MAP, SOURCE, TARGET, "AWI"), expected)


def test_awi_is_awo_of_rows_rotated_by_one() -> None:
    maps = torch.rand(2, 3, 6, 5)
    source, target = (0, 1, 1, 2, None), (None, 0, 1, 1, 2, 3)
    rotated = maps.roll(-1, dims=-2)
    torch.testing.assert_close(
        alignment_maps_of_words(maps, source, target, "AWI"), alignment_maps_of_words(rotated, source, target, "AWO")
    )


def test_every_special_token_of_the_source_is_a_column_after_the_words() -> None:
    maps = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    found = alignment_maps_of_words(maps, (None, 0, None), (None, 0), "AWI")
    assert found.tolist() == [[5.0, 4.0, 6.0]]


def test_two_special_decoder_inputs() -> None:
    """A tokenizer may put another special token after the start token."""
    maps = torch.tensor([[1.0], [2.0], [3.0]])
    assert alignment_maps_of_words(maps, (0,), (None, None, 0), "AWO").tolist() == [[2.0]]
    assert alignment_maps_of_words(maps, (0,), (None, None, 0), "AWI").tolist() == [[3.0]]


def test_links_to_the_end_token_are_dropped() -> None:
    assert argmax_alignment_links(torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.6, 0.3]]), 2).tolist() == [-1, 1]


WORDS = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.6, 0.3], [0.6, 0.3, 0.1]])  # two source words and the end token


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {(1, 1), (0, 2)}),
        ({"threshold": 0.3}, {(1, 0), (1, 1), (0, 2), (1, 2)}),
        ({"threshold": 1.0}, set()),
        ({"symmetrise": "intersection"}, {(1, 1), (0, 2)}),
        ({"symmetrise": "union"}, {(1, 1), (0, 2)}),
    ],
)
def test_links_of_a_map(options: dict[str, object], expected: set[tuple[int, int]]) -> None:
    assert word_links(WORDS, 2, **options) == expected  # type: ignore[arg-type]
    assert word_links(7 * WORDS, 2, **options) == expected  # type: ignore[arg-type]


def test_links_in_both_directions() -> None:
    """The second source word is best in no row; its best row is the second."""
    words = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2]])
    assert word_links(words, 2) == {(0, 0), (0, 1), (0, 2)}
    assert word_links(words, 2, symmetrise="intersection") == {(0, 0)}
    assert word_links(words, 2, symmetrise="union") == {(0, 0), (0, 1), (0, 2), (1, 1)}
    assert word_links(words, 2, 0.7, "union") == {(0, 0), (0, 2)}


def test_pharaoh_is_read_again() -> None:
    links = frozenset({(10, 2), (2, 10), (0, 0)})
    assert format_pharaoh(links) == "0-0 2-10 10-2"
    assert parse_alignment_links(format_pharaoh(links), NOTATIONS["pharaoh"]) == (links, links)
    assert format_pharaoh(frozenset()) == ""


def test_aer_of_linked_words_by_hand() -> None:
    """Six target words, of which 0, 1 and 2 have a gold link. Links of the others are errors only over all words."""
    sure = frozenset({(0, 0), (1, 1)})
    possible = sure | {(2, 2)}
    found = count_gold_alignment_hits(torch.tensor([0, 3, 2, 3, 3, -1]), 4, sure, possible)
    counts = {name: int(value) for name, value in found.items()}
    assert counts == {"links": 5, "linked": 3, "in_sure": 1, "in_possible": 2}
    assert Hits(counts["links"], 2, 1, 2).aer == pytest.approx(1 - 3 / 7)
    assert Hits(counts["linked"], 2, 1, 2).aer == pytest.approx(1 - 3 / 5)


def test_aer_by_hand() -> None:
    # Target words 0 to 3 are linked to sources 0, 2, 1 and none. Sure: (0,0) (1,1). Possible besides: (1,2) (3,3).
    sure = frozenset({(0, 0), (1, 1)})
    possible = sure | {(1, 2), (3, 3)}
    found = count_gold_alignment_hits(torch.tensor([0, 2, 1, -1]), 4, sure, possible)
    assert {name: int(value) for name, value in found.items()} == {
        "links": 3,
        "linked": 3,
        "in_sure": 1,
        "in_possible": 2,
    }
    rates = Hits(3, len(sure), 1, 2)
    assert rates.aer == pytest.approx(1 - (1 + 2) / (3 + 2))
    assert rates.precision == pytest.approx(2 / 3)
    assert rates.recall == pytest.approx(1 / 2)


def test_the_corpus_is_one_sum_of_sentences() -> None:
    """Not a mean of the sentences' rates: 1 - (2 + 9) / (4 + 12)."""
    assert Hits(1 + 3, 2 + 10, 1 + 1, 1 + 8).aer == pytest.approx(1 - 11 / 16)


def test_unlinked_target_words_can_be_left_out() -> None:
    gold = frozenset({(0, 0)})
    found = count_gold_alignment_hits(torch.tensor([0, 1, 1]), 2, gold, gold)
    assert (int(found["links"]), int(found["linked"]), int(found["in_sure"])) == (3, 1, 1)
    assert Hits(1, 1, 1, 1).aer == 0


def test_a_perfect_and_an_empty_alignment() -> None:
    assert Hits(5, 5, 5, 5).aer == 0
    assert Hits(0, 5, 0, 0).aer == 1
    assert isnan(Hits(0, 0, 0, 0).aer)
    assert isnan(Hits(0, 1, 0, 0).precision)
    assert isnan(Hits(1, 0, 0, 0).recall)


def test_counts_against_sets() -> None:
    generator = random.Random(0)
    cells = [(s, t) for s in range(6) for t in range(9)]
    possible = frozenset(generator.sample(cells, 15))
    sure = frozenset(generator.sample(sorted(possible), 7))
    best = torch.tensor([[[generator.randint(-1, 5) for _ in range(9)] for _ in range(3)] for _ in range(2)])
    found = count_gold_alignment_hits(best, 6, sure, possible)
    for layer in range(2):
        for head in range(3):
            drawn = {(int(s), t) for t, s in enumerate(best[layer, head]) if s >= 0}
            linked = {(s, t) for s, t in drawn if any(t == other for _, other in possible)}
            expected = len(drawn), len(linked), len(drawn & sure), len(drawn & possible)
            assert tuple(int(value[layer, head]) for value in found.values()) == expected
            every, among = count_link_hits(frozenset(drawn), sure, possible)
            assert (every.links, among.links, every.in_sure, every.in_possible) == expected
            assert (every.sure, among.sure, among.in_sure, among.in_possible) == (len(sure), len(sure), *expected[2:])


def test_the_gold_links_of_a_real_corpus() -> None:
    """One sure link for each target word that has any: all are right, so the error rate depends on recall alone."""
    path = real_file("rwth.alignment.talp")
    entries = list(strict(read(path, source=real_file("rwth.de"), target=real_file("rwth.en"))))
    assert len(entries) == 508
    totals = dict.fromkeys(("links", "linked", "in_sure", "in_possible"), 0)
    for entry in entries:
        first = {target: source for source, target in sorted(entry.sure, reverse=True)}
        best = torch.tensor([first.get(target, -1) for target in range(len(entry.target or ()))])
        for name, value in count_gold_alignment_hits(best, len(entry.words or ()), entry.sure, entry.possible).items():
            totals[name] += int(value)
    sure = sum(len(entry.sure) for entry in entries)
    drawn = sum(len({target for _, target in entry.sure}) for entry in entries)
    assert totals == {"links": drawn, "linked": drawn, "in_sure": drawn, "in_possible": drawn}
    rates = Hits(drawn, sure, drawn, drawn)
    assert rates.precision == 1
    assert rates.aer == pytest.approx(1 - 2 * drawn / (drawn + sure))
    assert sum(len(entry.possible) for entry in entries) > sure > drawn


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: alignment_maps_of_words(MAP, SOURCE, TARGET, "AWX"), "AWO or AWI"),
        (lambda: alignment_maps_of_words(MAP, (0, 0), TARGET, "AWO"), "4 rows and 3 columns"),
        (lambda: alignment_maps_of_words(MAP, SOURCE, (0, 1, 2, 3), "AWO"), "start token"),
        (lambda: alignment_maps_of_words(MAP, (0, 2, None), TARGET, "AWO"), "must have a token"),
        (lambda: count_gold_alignment_hits(torch.tensor([0]), 1, frozenset({(0, 0)}), frozenset()), "contain the sure"),
        (lambda: count_gold_alignment_hits(torch.tensor([0]), 1, frozenset(), frozenset({(0, 1)})), "target word 2"),
        (lambda: count_gold_alignment_hits(torch.tensor([0]), 1, frozenset(), frozenset({(3, 0)})), "word 4"),
    ],
)
def test_bad_input(call: object, said: str) -> None:
    with pytest.raises(NormscopeError, match=said):
        call()  # type: ignore[operator]
