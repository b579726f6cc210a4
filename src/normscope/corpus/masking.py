"""Masking: 12 % of the tokens that are not special become [MASK] (EMNLP 2021, section 3).

Each sequence is drawn separately, seeded by its id, or all in corpus order from one generator, as in the papers' code.
`special` is true for special tokens ([CLS], [SEP], padding), like a tokenizer's special_tokens_mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from normscope.errors import NormscopeError

SHARE = 0.12


def mask(ids: Sequence[int], special: Sequence[bool | int], mask_id: int, seed: int, id: str) -> list[int]:
    """The token ids after masking. Depends on the seed and the entry's id, not on batch, order or worker."""
    if len(ids) != len(special):
        raise NormscopeError(
            f"`special` must be as long as `ids`: there are {len(ids)} token ids, but {len(special)} marks."
        )
    return mask_at(ids, masked_positions(special, seed, id), mask_id)


def mask_at(ids: Sequence[int], positions: Iterable[int], mask_id: int) -> list[int]:
    """The token ids with the mask token at the given positions."""
    masked = set(positions)
    return [mask_id if position in masked else token for position, token in enumerate(ids)]


def masked_positions(special: Sequence[bool | int], seed: int, id: str) -> tuple[int, ...]:
    """max(1, int(0.12 L)) of the L positions that are not special, sorted; a random sample seeded by (seed, id)."""
    digest = hashlib.sha256(f"{seed}:{id}".encode("utf-8", "surrogatepass")).digest()
    return draw_masked_positions(special, Random(int.from_bytes(digest, "big")))


def papers_masking(sequences: Iterable[Sequence[bool | int]], seed: int = 0) -> Iterator[tuple[int, ...]]:
    """The masked positions of each sequence as in the papers, which sample all sequences from one generator.

    The positions depend on all previous sequences.
    """
    generator = Random(seed)
    for special in sequences:
        yield draw_masked_positions(special, generator)


def draw_masked_positions(special: Sequence[bool | int], generator: Random) -> tuple[int, ...]:
    """max(1, int(0.12 L)) of the L positions that are not special, sorted; the generator advances."""
    candidates = [position for position, is_special in enumerate(special) if not is_special]
    if not candidates:
        raise NormscopeError("Every token is special: nothing can be masked.")
    return tuple(sorted(generator.sample(candidates, max(1, int(len(candidates) * SHARE)))))
