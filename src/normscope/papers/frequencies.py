"""Token frequencies, from a file or counted in the corpus itself.

Files: the authors' (three columns of whole numbers, `rank count id`, separated by spaces), or two columns
`token count`, separated by tabs (.tsv) or commas (.csv), with or without a header.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from normscope.corpus.items import Entry
from normscope.corpus.text_lines import text_lines
from normscope.errors import NormscopeError
from normscope.measures.frequency import Ranks, ranks, spearman
from normscope.papers.study import Setting

COVERED = 0.5  # at least this share of a corpus's tokens must be in a file of its vocabulary,
COMMON = 0.1  # and this share among its most frequent types, which make half of its counts: about 0.5 are, 0.2 in a
# foreign language, 0.05 if the ids are off by a hundred, 0.01 if they are shuffled
ENOUGH = 50  # tokens of a corpus that suffice for this test


@dataclass(frozen=True)
class Frequencies:
    """Counts by token id, and where they are from."""

    counts: Mapping[int, int]
    source: str

    @cached_property
    def ranks(self) -> Ranks[int]:
        """Competition ranks: 1 for the most frequent, ties at the best, unseen tokens one below the last."""
        return ranks(self.counts)


@dataclass(frozen=True)
class CountFit:
    """How well the counts of a file agree with those of a corpus, special tokens aside."""

    tokens: int  # in the corpus
    covered: float  # share of these whose id is in the file
    common: float  # share of these that are among the file's most frequent types, those that hold half of its counts
    types: int  # that occur in both
    correlation: float  # Spearman's, of their counts

    @property
    def good(self) -> bool:
        """Whether the counts are of the vocabulary that is used."""
        return self.tokens < ENOUGH or (self.covered >= COVERED and self.common >= COMMON)


def count_tokens(ids: Iterable[int]) -> Frequencies:
    """The frequencies of token ids, in the order of their first occurrence."""
    found: dict[int, int] = {}
    for id in ids:
        found[id] = found.get(id, 0) + 1
    return Frequencies(found, "the corpus itself")


def read_frequencies(path: str | Path, tokenizer: Any, vocabulary: int) -> Frequencies:
    """The frequencies in a file; ids outside the vocabulary, or given twice, are refused."""
    file = Path(path)
    suffix = file.suffix.lower()
    delimiter = {".csv": ",", ".tsv": "\t"}.get(suffix)
    rows = _counts_by_id(file) if delimiter is None else _counts_by_token(file, delimiter, tokenizer)
    found: dict[int, int] = {}
    for number, id, count in rows:
        if not 0 <= id < vocabulary:
            raise NormscopeError(
                f"{file}:{number}: The token id {id} is outside the model's vocabulary (0 to {vocabulary - 1}): these "
                "are frequencies of another vocabulary."
            )
        if id in found:
            raise NormscopeError(f"{file}:{number}: The token id {id} is there a second time.")
        found[id] = count
    if not any(found.values()):
        raise NormscopeError(f"{file} has no frequencies.")
    return Frequencies(found, str(file))


def entry_token_ids(entries: Iterable[Entry], tokenizer: Any) -> Iterator[int]:
    """The token ids of entries (the source side of parallel text), special ones included."""
    for entry in entries:
        given = entry.given
        if entry.pieces:
            yield from tokenizer.convert_tokens_to_ids(list(given))
        elif isinstance(given, tuple):
            yield from tokenizer(*given, verbose=False)["input_ids"]
        else:
            yield from tokenizer(given, is_split_into_words=isinstance(given, list), verbose=False)["input_ids"]


def load_or_count_frequencies(setting: Setting, ids: Iterable[int]) -> tuple[Frequencies, CountFit | None]:
    """The frequencies of the file that was given, with their fit to the corpus; without a file, those of the corpus."""
    own, lens = count_tokens(ids), setting.lens
    if setting.frequencies is None:
        return own, None
    special = () if lens.tokenizer is None else lens.tokenizer.all_special_ids
    found = read_frequencies(setting.frequencies, lens.tokenizer, lens.loaded.limits.vocabulary)
    return found, refuse_other_vocabulary(found, own, special)


def missing_word_counts(setting: Setting) -> str | None:
    """Why words cannot be counted. A file of another vocabulary is refused here, before anything is run."""
    if setting.lens.family.input != "text":
        return "It counts words, but this model reads no text."
    if setting.frequencies is not None and setting.entries and setting.lens.tokenizer is not None:
        load_or_count_frequencies(setting, entry_token_ids(setting.entries, setting.lens.tokenizer))
    return None


def fit_of_counts(file: Frequencies, own: Frequencies, special: Iterable[int] = ()) -> CountFit:
    """How well a file's counts agree with the corpus's own."""
    left_out = set(special)
    here = {id: count for id, count in own.counts.items() if id not in left_out}
    there = {id: count for id, count in file.counts.items() if id not in left_out and count > 0}
    total = sum(here.values())
    if not total:
        return CountFit(0, 0.0, 0.0, 0, float("nan"))
    frequent = _most_frequent_half(there)
    both = sorted(here.keys() & there.keys())
    return CountFit(
        tokens=total,
        covered=sum(here[id] for id in both) / total,
        common=sum(count for id, count in here.items() if id in frequent) / total,
        types=len(both),
        correlation=spearman([here[id] for id in both], [there[id] for id in both]),
    )


def refuse_other_vocabulary(file: Frequencies, own: Frequencies, special: Iterable[int] = ()) -> CountFit:
    """The fit; that of a file of another vocabulary is refused, with the numbers that show it."""
    found = fit_of_counts(file, own, special)
    if not found.good:
        raise NormscopeError(
            f"{file.source} is of another vocabulary, or of quite another language: it holds {found.covered:.0%} of "
            f"the corpus's {found.tokens} tokens, and its most frequent types, which make half of its counts, make "
            f"{found.common:.1%} of the corpus (expected: about 50 %, at least {COMMON:.0%}); Spearman's correlation "
            f"of the counts of {found.types} types in both is {found.correlation:.2f}. Leave it out to count "
            "the corpus itself."
        )
    return found


def _most_frequent_half(counts: Mapping[int, int]) -> set[int]:
    """The most frequent types that together hold half of the counts."""
    wanted = sum(counts.values()) / 2
    chosen: set[int] = set()
    reached = 0
    for id, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
        if reached >= wanted:
            break
        chosen.add(id)
        reached += count
    return chosen


def _frequency_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of the lines that are not blank; damaged ones are refused."""
    for line in text_lines(path):
        if line.damage:
            raise NormscopeError(f"{path}:{line.number}: {line.damage}")
        if not line.blank:
            yield line.number, line.text


def _counts_by_id(path: Path) -> Iterator[tuple[int, int, int]]:
    """Line, id and count of the authors' rows."""
    for number, text in _frequency_lines(path):
        cells = text.split()
        if len(cells) != 3 or not all(map(_is_whole_number, cells)):
            raise NormscopeError(
                f"{path}:{number}: Expected three whole numbers (rank, count, token id), not {text[:40]!r}. "
                "A file of tokens and counts is named .tsv or .csv."
            )
        yield number, int(cells[2]), int(cells[1])


def _counts_by_token(path: Path, delimiter: str, tokenizer: Any) -> Iterator[tuple[int, int, int]]:
    """Line, id and count of rows with a token and its count."""
    if tokenizer is None:
        raise NormscopeError(f"{path}: Frequencies by token need a tokenizer; without one, give them by token id.")
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    unknown: list[str] = []
    known = 0
    for number, row in _token_count_rows(path, delimiter):
        if len(row) != 2 or not _is_whole_number(row[1]):
            if number == 1 and len(row) == 2:
                continue  # the header
            raise NormscopeError(f"{path}:{number}: Expected a token and its count, not {delimiter.join(row)[:40]!r}.")
        if row[0] not in vocabulary:
            unknown.append(row[0])
            continue
        known += 1
        yield number, vocabulary[row[0]], int(row[1])
    if unknown:
        some = ", ".join(repr(token) for token in unknown[:5])
        raise NormscopeError(
            f"{path}: {len(unknown)} of {known + len(unknown)} tokens are not in the model's vocabulary ({some}"
            f"{', ...' if len(unknown) > 5 else ''}): these are frequencies of another vocabulary."
        )


def _token_count_rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank. With tabs, quotation marks are tokens like any other."""
    for number, text in _frequency_lines(path):
        if delimiter == "\t":
            yield number, text.split("\t")
            continue
        try:
            yield number, next(csv.reader([text], strict=True))
        except csv.Error as error:
            raise NormscopeError(f"{path}:{number}: The row cannot be read: {error}.") from error


def _is_whole_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
