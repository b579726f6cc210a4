"""Which tokens become [MASK]: 12 % of those that are not special (EMNLP 2021, section 3).

`special` has a true value where a token is special ([CLS], [SEP], padding), as a tokenizer's special_tokens_mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from normscope.errors import NormscopeError

SHARE = 0.12


def mask(ids: Sequence[int], special: Sequence[bool | int], mask_id: int, seed: int, id: str) -> list[int]:
    """The ids with the masked ones replaced. Depends on the seed and the entry's id, not on batch, order or worker."""
    if len(ids) != len(special):
        raise NormscopeError(f"There are {len(ids)} token ids, but {len(special)} marks of special tokens.")
    masked = set(masked_positions(special, seed, id))
    return [mask_id if position in masked else token for position, token in enumerate(ids)]


def masked_positions(special: Sequence[bool | int], seed: int, id: str) -> tuple[int, ...]:
    """max(1, int(0.12 L)) of the L positions that are not special, in order, drawn by (seed, id)."""
    digest = hashlib.sha256(f"{seed}:{id}".encode("utf-8", "surrogatepass")).digest()
    return _drawn(special, Random(int.from_bytes(digest, "big")))


def papers_masking(sequences: Iterable[Sequence[bool | int]], seed: int = 0) -> Iterator[tuple[int, ...]]:
    """The papers' own draw: the masked positions of each sequence, given its special tokens, from one generator.

    Depends on the order of the sequences and on all those before.
    """
    generator = Random(seed)
    for special in sequences:
        yield _drawn(special, generator)


def _drawn(special: Sequence[bool | int], generator: Random) -> tuple[int, ...]:
    candidates = [position for position, is_special in enumerate(special) if not is_special]
    if not candidates:
        raise NormscopeError("Every token is special: there is none to mask.")
    return tuple(sorted(generator.sample(candidates, max(1, int(len(candidates) * SHARE)))))
