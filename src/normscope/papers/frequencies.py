"""Token frequencies, from a file or counted in the corpus itself.

A file has the authors' format (three columns of integers, `rank count id`, separated by spaces) or two columns
`token count`, separated by tabs (.tsv) or commas (.csv), with or without a header.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from normscope.corpus.entries import Entry
from normscope.corpus.readers.text_lines import text_lines
from normscope.errors import NormscopeError
from normscope.measures.correlation import spearman_of_lists
from normscope.measures.frequency import FrequencyRanks, frequency_ranks
from normscope.papers.study import Setting

# A file fits the vocabulary if it covers enough of the corpus tokens, and if enough of them are among the most frequent
# types of the file that make up half of its counts: typically 0.5, in a foreign language 0.2, with ids shifted by a
# hundred 0.05, with shuffled ids 0.01.
COVERED = 0.5
COMMON = 0.1
ENOUGH = 50  # corpus tokens needed for this test


@dataclass(frozen=True)
class Frequencies:
    """Counts by token id, and their source."""

    counts: Mapping[int, int]
    source: str

    @cached_property
    def ranks(self) -> FrequencyRanks[int]:
        """Competition ranks: 1 is the most frequent, ties share the best rank, unseen tokens come after the last."""
        return frequency_ranks(self.counts)


@dataclass(frozen=True)
class CountFit:
    """Agreement of the counts of a file with those of a corpus, without special tokens."""

    tokens: int  # in the corpus
    covered: float  # share of the corpus tokens whose id is in the file
    common: float  # share of the corpus tokens among the types that make up half of the file's counts
    types: int  # in both
    correlation: float  # Spearman's, of the counts of these types

    @property
    def good(self) -> bool:
        """Whether the counts belong to the model's vocabulary, as far as the corpus can show."""
        return self.tokens < ENOUGH or (self.covered >= COVERED and self.common >= COMMON)


def count_token_frequencies(ids: Iterable[int]) -> Frequencies:
    """Frequencies of token ids, in order of first occurrence."""
    return Frequencies(Counter(ids), "the corpus itself")


def read_frequencies(path: str | Path, tokenizer: Any, vocabulary: int) -> Frequencies:
    """Read a file of frequencies; ids outside the vocabulary and duplicate ids are errors."""
    file = Path(path)
    delimiter = {".csv": ",", ".tsv": "\t"}.get(file.suffix.lower())
    rows = _frequencies_by_id(file) if delimiter is None else _frequencies_by_token(file, delimiter, tokenizer)
    found: dict[int, int] = {}
    for number, id, count in rows:
        if not 0 <= id < vocabulary:
            raise NormscopeError(
                f"{file}:{number}: Token id {id} is outside the model's vocabulary (0 to {vocabulary - 1}): the "
                "frequencies are for another vocabulary."
            )
        if id in found:
            raise NormscopeError(f"{file}:{number}: Duplicate token id {id}.")
        found[id] = count
    if not any(found.values()):
        raise NormscopeError(f"{file} contains no frequencies.")
    return Frequencies(found, str(file))


def token_ids_for_frequencies(entries: Iterable[Entry], tokenizer: Any) -> Iterator[int]:
    """Token ids of entries (of the source in parallel text), including special tokens."""
    for entry in entries:
        given = entry.given
        if entry.pieces:
            yield from tokenizer.convert_tokens_to_ids(list(given))
        elif isinstance(given, tuple):
            yield from tokenizer(*given, verbose=False)["input_ids"]
        else:
            yield from tokenizer(given, is_split_into_words=isinstance(given, list), verbose=False)["input_ids"]


def load_or_count_frequencies(setting: Setting, ids: Iterable[int]) -> tuple[Frequencies, CountFit | None]:
    """Frequencies from the given file with their fit to the corpus; without a file, counted in the corpus."""
    own, lens = count_token_frequencies(ids), setting.lens
    if setting.frequencies is None:
        return own, None
    special = () if lens.tokenizer is None else lens.tokenizer.all_special_ids
    found = read_frequencies(setting.frequencies, lens.tokenizer, lens.loaded.limits.vocabulary)
    return found, refuse_unfit_frequencies(found, own, special)


def missing_frequencies(setting: Setting) -> str | None:
    """Why words cannot be counted, or None. A file for another vocabulary is refused here, before anything runs."""
    if setting.lens.family.input != "text":
        return "Word frequencies need text, but this model does not read text."
    if setting.frequencies is not None and setting.entries and setting.lens.tokenizer is not None:
        load_or_count_frequencies(setting, token_ids_for_frequencies(setting.entries, setting.lens.tokenizer))
    return None


def fit_of_counts(file: Frequencies, own: Frequencies, special: Iterable[int] = ()) -> CountFit:
    """Compare the counts of a file with those of the corpus."""
    left_out = set(special)
    here = {id: count for id, count in own.counts.items() if id not in left_out}
    there = {id: count for id, count in file.counts.items() if id not in left_out and count > 0}
    total = sum(here.values())
    if not total:
        return CountFit(0, 0.0, 0.0, 0, float("nan"))
    frequent = _types_of_half_the_counts(there)
    both = sorted(here.keys() & there.keys())
    return CountFit(
        tokens=total,
        covered=sum(here[id] for id in both) / total,
        common=sum(count for id, count in here.items() if id in frequent) / total,
        types=len(both),
        correlation=spearman_of_lists([here[id] for id in both], [there[id] for id in both]),
    )


def refuse_unfit_frequencies(file: Frequencies, own: Frequencies, special: Iterable[int] = ()) -> CountFit:
    """The fit of a file to the corpus; a file for another vocabulary is an error that states the fit."""
    found = fit_of_counts(file, own, special)
    if not found.good:
        raise NormscopeError(
            f"{file.source} is for another vocabulary or a very different language: it covers {found.covered:.0%} of "
            f"the corpus's {found.tokens} tokens, and its most frequent types, which make up half of its counts, are "
            f"{found.common:.1%} of the corpus (expected: about 50 %, at least {COMMON:.0%}); for the {found.types} "
            f"types in both, Spearman's correlation of the counts is {found.correlation:.2f}. Omit the file to count "
            "words in the corpus itself."
        )
    return found


def _types_of_half_the_counts(counts: Mapping[int, int]) -> set[int]:
    """The most frequent types, which together make up half of the counts."""
    half = sum(counts.values()) / 2
    by_count = sorted(counts, key=lambda id: (-counts[id], id))
    before = accumulate((counts[id] for id in by_count), initial=0)  # counts of all more frequent types
    return {id for id, reached in zip(by_count, before, strict=False) if reached < half}


def _lines_of_frequencies(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of the non-blank lines; damaged lines are errors."""
    for line in text_lines(path):
        if line.damage:
            raise NormscopeError(f"{path}:{line.number}: {line.damage}")
        if not line.blank:
            yield line.number, line.text


def _frequencies_by_id(path: Path) -> Iterator[tuple[int, int, int]]:
    """Line number, id and count from a file in the authors' format."""
    for number, text in _lines_of_frequencies(path):
        cells = text.split()
        if len(cells) != 3 or not all(map(_is_whole_number, cells)):
            raise NormscopeError(
                f"{path}:{number}: Expected three integers (rank, count, token id), not {text[:40]!r}. "
                "Files of tokens and counts need the suffix .tsv or .csv."
            )
        yield number, int(cells[2]), int(cells[1])


def _frequencies_by_token(path: Path, delimiter: str, tokenizer: Any) -> Iterator[tuple[int, int, int]]:
    """Line number, id and count from a file of tokens and counts."""
    if tokenizer is None:
        raise NormscopeError(
            f"{path}: Frequencies by token need a tokenizer; without one, use frequencies by token id."
        )
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    unknown: list[str] = []
    known = 0
    for number, row in _rows_of_frequencies(path, delimiter):
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
            f"{', ...' if len(unknown) > 5 else ''}): the frequencies are for another vocabulary."
        )


def _rows_of_frequencies(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The non-blank rows. In tab-separated files, quotation marks are ordinary tokens."""
    for number, text in _lines_of_frequencies(path):
        if delimiter == "\t":
            yield number, text.split("\t")
            continue
        try:
            yield number, next(csv.reader([text], strict=True))
        except csv.Error as error:
            raise NormscopeError(f"{path}:{number}: The row cannot be read: {error}.") from error


def _is_whole_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
