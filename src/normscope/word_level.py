"""Maps between words: contributions of a word's tokens are added as vectors (`Analysis.words`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normscope.arguments import check_integers
from normscope.decompose.gram import mixing_ratio
from normscope.errors import NormscopeError
from normscope.labels import Label
from normscope.measures.tokens import BEGINS, CONTINUES, number_words
from normscope.result_base import NO_MODEL, HeadMaps, Measured

if TYPE_CHECKING:
    from normscope.analysis import Analysis
    from normscope.decompose.layer import Vectors

BLOCK = 2**13  # vectors in memory at a time


@dataclass(frozen=True)
class Words:
    """The words of an analysis, and the word of each column and row."""

    labels: tuple[Label, ...]  # one per word
    columns: Tensor  # (columns,): index into labels
    rows: Tensor  # (rows,): index into labels
    row_words: tuple[int, ...]  # indices of the words that have rows, in order

    @property
    def counts(self) -> Tensor:
        """(row_words,): number of rows of each word."""
        return torch.bincount(self.rows, minlength=len(self.labels))[list(self.row_words)]

    def mean(self, by_row: Tensor) -> Tensor:
        """(rows, ...) -> (row_words, ...): the mean over the rows of each word."""
        sums = by_row.new_zeros(len(self.labels), *by_row.shape[1:]).index_add_(0, self.rows, by_row)
        counts = self.counts.to(by_row.dtype)
        return sums[list(self.row_words)] / counts.reshape(-1, *[1] * (by_row.dim() - 1))


@dataclass
class _WordRows:
    """Results of the rows at one scope and layer."""

    cells: list[Tensor] = field(default_factory=list)  # (rows, words)
    mixing: list[Tensor] = field(default_factory=list)  # (rows,)
    remainder: list[Tensor] = field(default_factory=list)
    missed: list[Tensor] = field(default_factory=list)

    def add(self, vectors: Vectors, columns: Tensor, own: Tensor) -> None:
        """Add a block of rows. `columns` is the word of each column, `own` the word of each row of the block."""
        given = vectors.contributions.cpu()
        summed = given.new_zeros(len(given), int(columns.max()) + 1, given.shape[-1]).index_add_(1, columns, given)
        cells = torch.linalg.vector_norm(summed, dim=-1)
        bias, actual = vectors.bias.cpu(), vectors.actual.cpu()
        missing = torch.linalg.vector_norm(summed.sum(1) + bias - actual, dim=-1)
        length = torch.maximum(torch.linalg.vector_norm(actual, dim=-1), cells.amax(-1))
        places = torch.arange(len(summed))
        kept = cells[places, own]
        summed[places, own] = 0
        self.cells.append(cells)
        self.mixing.append(mixing_ratio(torch.linalg.vector_norm(summed.sum(1), dim=-1), kept))
        self.remainder.append(torch.linalg.vector_norm(bias, dim=-1))
        self.missed.append(missing / length.clamp_min(torch.finfo(length.dtype).tiny))


def word_level_analysis(
    analysis: Analysis,
    scopes: Iterable[str] | str | None,
    layers: Iterable[int] | int | None,
    word_ids: Sequence[int | None] | None,
) -> Analysis:
    """The analysis between words instead of tokens, for some scopes and layers. See `Analysis.words`."""
    asked = analysis.scopes if scopes is None else (scopes,) if isinstance(scopes, str) else tuple(scopes)
    wanted = {analysis.resolve(scope) for scope in asked}
    names = tuple(scope for scope in analysis.scopes if scope in wanted)
    chosen = sorted(analysis.layers if layers is None else set(check_integers("layer", layers)))
    places = [analysis.layer_position(layer) for layer in chosen]
    by_word = _word_level_groups(analysis, word_ids)
    vectored = [scope for scope in names if scope.endswith("-N")]
    measured = _word_level_norms(analysis, vectored, chosen, by_word) if vectored else {}
    measured |= {
        scope: _word_level_weights(analysis.measured[scope], places, by_word)
        for scope in names
        if scope not in vectored
    }
    return replace(
        analysis,
        measured={scope: measured[scope] for scope in names},
        rows=tuple(by_word.labels[n] for n in by_word.row_words),
        columns=by_word.labels,
        layers=tuple(chosen),
        heads=HeadMaps({}, analysis.aliases),
        value_norms=None,
        head_indices=(),
        word_ids=None,
        info={**analysis.info, "level": "words"},
        _recompute=None,
    )


def _word_level_norms(
    analysis: Analysis, scopes: Sequence[str], layers: Sequence[int], by_word: Words
) -> dict[str, Measured]:
    """The scopes that have vectors, computed in one forward pass."""
    if analysis._recompute is None:
        raise NormscopeError(NO_MODEL)
    found = {(scope, layer): _WordRows() for scope in scopes for layer in layers}
    rows, size = len(analysis.rows), max(1, BLOCK // len(analysis.columns))
    blocks = [range(start, min(start + size, rows)) for start in range(0, rows, size)]

    def receive(scope: str, layer: int, number: int, vectors: Vectors) -> None:
        found[scope, layer].add(vectors, by_word.columns, by_word.rows[list(blocks[number])])

    analysis._recompute(scopes, layers, blocks, receive)
    made = {}
    for scope in scopes:
        of = [found[scope, layer] for layer in layers]
        mixing = torch.stack([by_word.mean(torch.cat(one.mixing)) for one in of])
        made[scope] = Measured(
            torch.stack([by_word.mean(torch.cat(one.cells)) for one in of]),
            None if analysis.measured[scope].mixing is None else mixing,
            torch.stack([by_word.mean(torch.cat(one.remainder)) for one in of]),
            torch.stack([torch.cat(one.missed).amax() for one in of]).double(),
        )
    return made


def _word_level_weights(measured: Measured, layers: Sequence[int], by_word: Words) -> Measured:
    """Attention weights, summed over the tokens of a word and averaged over its rows."""
    maps = measured.map[list(layers)].transpose(0, 1)  # (rows, layers, columns)
    summed = maps.new_zeros(*maps.shape[:2], len(by_word.labels)).index_add_(2, by_word.columns, maps)
    own = summed[torch.arange(len(summed)), :, by_word.rows]  # (rows, layers)
    mixing = mixing_ratio(summed.sum(-1) - own, own)
    return Measured(
        by_word.mean(summed).transpose(0, 1).contiguous(),
        None if measured.mixing is None else by_word.mean(mixing).T.contiguous(),
        by_word.mean(measured.remainder[list(layers)].T).T.contiguous(),
        measured.completeness[list(layers)],
    )


def _word_level_groups(analysis: Analysis, word_ids: Sequence[int | None] | None) -> Words:
    """Group adjacent tokens of one side with the same word id; a token without a word id forms a group alone."""
    ids = _word_level_column_ids(analysis, word_ids)
    columns: list[int] = []
    labels: list[Label] = []
    counts: dict[str, int] = {}
    pairs = enumerate(zip(analysis.columns, ids, strict=True))
    keys = [(label.side, n if word is None else -1, word) for n, (label, word) in pairs]
    for (side, _, _), group in groupby(range(len(keys)), key=lambda n: keys[n]):
        members = list(group)
        columns += [len(labels)] * len(members)
        counts[side] = counts.get(side, -1) + 1
        tokens = [analysis.columns[n].token for n in members]
        labels.append(Label(tokens[0] if ids[members[0]] is None else _word_level_text(tokens), side, counts[side]))
    place = {(label.side, label.position): word for label, word in zip(analysis.columns, columns, strict=True)}
    rows = [place[label.side, label.position] for label in analysis.rows]
    return Words(tuple(labels), torch.tensor(columns), torch.tensor(rows), tuple(dict.fromkeys(rows)))


def _word_level_column_ids(analysis: Analysis, given: Sequence[int | None] | None) -> Sequence[int | None]:
    count = len(analysis.columns)
    if given is not None:
        listed = list(given)
        if len(listed) != count:
            raise NormscopeError(f"word_ids has {len(listed)} entries for {count} columns: give one for each column.")
        return listed
    ids = analysis.word_ids
    if ids is None:
        raise NormscopeError(
            "This analysis has no word ids: slow tokenizers and custom encodings have none. Analyse the text with a "
            "fast tokenizer, or pass the word of each column: words(word_ids=[None, 0, 0, 1, ...])."
        )
    tokens = [label.token for label in analysis.columns]
    if len(set(ids) - {None}) == 1 and sum(token.startswith(BEGINS) for token in tokens) > 1:
        # Some tokenizers do not split at spaces and treat the whole text as one word.
        return number_words(tokens, [id is None for id in ids], ids)
    return ids


def _word_level_text(tokens: Sequence[str]) -> str:
    """A word's text, without subword markers."""
    text = "".join(token.removeprefix(CONTINUES) if n else token for n, token in enumerate(tokens))
    return text[1:] if text.startswith(BEGINS) and len(text) > 1 else text
