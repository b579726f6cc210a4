"""Word frequencies from files of every kind, and files that do not belong to the model."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from normscope import NormscopeError, default_model
from normscope.corpus import Entry, strict
from normscope.corpus.readers.formats import read as read_corpus
from normscope.papers.frequencies import (
    Frequencies,
    count_token_frequencies,
    fit_of_counts,
    read_frequencies,
    refuse_unfit_frequencies,
    token_ids_for_frequencies,
)
from tests.helpers.files import real_file
from tests.helpers.toys import WORDS, toy_tokenizer


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_authors_file(tmp_path: Path) -> None:
    found = read_frequencies(written(tmp_path / "ranks.txt", "1 90 7\n2 40 3\n2\t40  5\n\n4 1 9\n"), None, 21)
    assert found.counts == {7: 90, 3: 40, 5: 40, 9: 1}
    assert found.ranks.by_token == {7: 1, 3: 2, 5: 2, 9: 4}
    assert found.ranks.of([9, 0]).tolist() == [4, 5]
    assert found.source.endswith("ranks.txt")


@pytest.mark.parametrize("header", ["", "token{}count\n"])
@pytest.mark.parametrize(("suffix", "mark"), [(".tsv", "\t"), (".csv", ",")])
def test_tokens_and_counts(tmp_path: Path, header: str, suffix: str, mark: str) -> None:
    text = header.format(mark) + f"{WORDS[6]}{mark}12\n{WORDS[2]}{mark}3\n"
    found = read_frequencies(written(tmp_path / f"counts{suffix}", text), toy_tokenizer(), 21)
    assert found.counts == {6: 12, 2: 3}


def test_marks_that_are_tokens(tmp_path: Path) -> None:
    """A comma and a quotation mark: unchanged in TSV, quoted in CSV."""
    tokenizer = AutoTokenizer.from_pretrained(default_model.find())
    vocabulary = tokenizer.get_vocab()
    expected = {vocabulary[","]: 5, vocabulary['"']: 4, vocabulary["the"]: 9}
    tabs = read_frequencies(written(tmp_path / "a.tsv", ',\t5\n"\t4\nthe\t9\n'), tokenizer, 30522)
    commas = read_frequencies(written(tmp_path / "a.csv", '",",5\n"""",4\nthe,9\n'), tokenizer, 30522)
    assert tabs.counts == commas.counts == expected


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "1 5 21\n", r"a\.txt:1: Token id 21 is outside the model's vocabulary \(0 to 20\)"),
        ("a.txt", "1 5 3\n2 4 3\n", r"a\.txt:2: Duplicate token id 3"),
        ("a.txt", "1 5\n", "rank, count, token id"),
        ("a.txt", "the 5 3\n", "rank, count, token id"),
        ("a.txt", "1 -5 3\n", "rank, count, token id"),
        ("a.txt", "1 0 3\n", "contains no frequencies"),
        ("a.txt", "", "empty"),
        (
            "a.tsv",
            "token\tcount\nwoof\t3\nmiau\t2\n",
            r"2 of 2 tokens are not in the model's vocabulary \('woof'",
        ),
        ("a.tsv", f"{WORDS[6]}\t3\n{WORDS[7]}\tmany\n", "a token and its count"),
        ("a.csv", f"{WORDS[6]},3,4\n", "a token and its count"),
        ("a.csv", '"the,3\n', "cannot be read"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(NormscopeError, match=said):
        read_frequencies(written(tmp_path / name, text), toy_tokenizer(), 21)


def test_tokens_need_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(NormscopeError, match="need a tokenizer"):
        read_frequencies(written(tmp_path / "a.tsv", "a\t1\n"), None, 21)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"\xff\t3\n")
    with pytest.raises(NormscopeError, match="not UTF-8"):
        read_frequencies(path, toy_tokenizer(), 21)


def test_counts_of_the_corpus_itself() -> None:
    tokenizer = toy_tokenizer()
    word = tokenizer.convert_ids_to_tokens(8)
    entries = [
        Entry(id="a", text=word),
        Entry(id="b", pair=(word, word)),
        Entry(id="c", words=(word, word)),
        Entry(id="d", words=("[CLS]", word, "[SEP]"), pieces=True),
    ]
    found = count_token_frequencies(token_ids_for_frequencies(entries, tokenizer))
    assert found.counts == {2: 4, 8: 6, 3: 5}
    assert "corpus" in found.source


def test_fit_by_hand() -> None:
    file = Frequencies({0: 500, 1: 60, 2: 30, 3: 10}, "f")  # without the special 0, token 1 holds half
    own = Frequencies({0: 99, 1: 6, 2: 2, 7: 2}, "own")
    found = fit_of_counts(file, own, special=[0])
    assert (found.tokens, found.covered, found.common, found.types) == (10, 0.8, 0.6, 2)
    assert found.correlation == pytest.approx(1)
    assert fit_of_counts(file, Frequencies({0: 3}, "own"), special=[0]).tokens == 0


def test_few_tokens_cannot_tell() -> None:
    foreign = Frequencies({5: 10}, "f")
    assert refuse_unfit_frequencies(foreign, Frequencies({1: 49}, "own")).covered == 0
    with pytest.raises(NormscopeError, match=r"another vocabulary.* 0% of the corpus's 50 tokens"):
        refuse_unfit_frequencies(foreign, Frequencies({1: 50}, "own"))


def test_the_authors_counts_of_bert() -> None:
    path = real_file("bert-uncased.rank_count_ids.txt")
    tokenizer = AutoTokenizer.from_pretrained(default_model.find())
    found = read_frequencies(path, tokenizer, 30522)
    ranks = {int(id): int(rank) for rank, _, id in (line.split() for line in path.read_text().splitlines())}
    assert found.ranks.by_token == ranks  # ours from the counts, theirs as written
    ids = tokenizer.convert_tokens_to_ids(["the", "and", "[SEP]", "[CLS]"])
    assert found.ranks.of(ids).tolist() == [1, 6, 28, 50]
    assert (len(found.counts), found.ranks.unseen) == (29_109, 29_087)


def test_a_file_of_another_vocabulary() -> None:
    """The right counts fit text of any kind; shuffled ones, and those of a vocabulary that begins elsewhere, do not."""
    path = real_file("bert-uncased.rank_count_ids.txt")
    tokenizer = AutoTokenizer.from_pretrained(default_model.find())
    right = read_frequencies(path, tokenizer, 30522)
    values = list(right.counts.values())
    random.Random(0).shuffle(values)
    shuffled = Frequencies(dict(zip(right.counts, values, strict=True)), "shuffled")
    shifted = Frequencies({id - 893: count for id, count in right.counts.items() if id >= 1996}, "shifted")
    for name, format in (("wikitext2.raw.test.txt", "paragraphs"), ("sst2.dev.tsv", "tsv"), ("rwth.de", "lines")):
        entries = strict(islice(read_corpus(real_file(name), format), 20))
        own = count_token_frequencies(token_ids_for_frequencies(entries, tokenizer))
        assert refuse_unfit_frequencies(right, own, tokenizer.all_special_ids).covered > 0.99
        for wrong in (shuffled, shifted):
            with pytest.raises(NormscopeError, match=f"{wrong.source} is for another vocabulary"):
                refuse_unfit_frequencies(wrong, own, tokenizer.all_special_ids)
