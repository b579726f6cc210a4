"""Entities from IOB1 and IOB2 tags.

In IOB2 every entity begins with B-. In IOB1 it begins with I-, or with B- directly after an entity with the same label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from normscope.corpus.entries import Entity
from normscope.errors import NormscopeError

Scheme = Literal["iob1", "iob2"]
SCHEMES = ("iob1", "iob2")


class TagError(NormscopeError):
    """A tag that is invalid in its position."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position


def entities_from_iob_tags(tags: Sequence[str], scheme: Scheme | None) -> tuple[Entity, ...]:
    """The entities of a sentence. Without a scheme, entities begin at every B- and at an I- after another label."""
    found: list[Entity] = []
    before = None
    for position, tag in enumerate(tags):
        prefix, label = _parse_iob_tag(position, tag)
        if label is None:
            before = None
            continue
        if scheme == "iob2" and prefix == "I" and before != label:
            raise TagError(position, f"{tag} does not follow another {label}: in IOB2 an entity begins with B-{label}.")
        if scheme == "iob1" and prefix == "B" and before != label:
            raise TagError(
                position, f"{tag} does not follow another {label}: in IOB1 the entity begins with I-{label}."
            )
        if prefix == "I" and before == label:
            found[-1] = found[-1]._replace(end_word=position + 1)
        else:
            found.append(Entity(position, position + 1, label))
        before = label
    return tuple(found)


def guess_iob_scheme(sentences: Iterable[Sequence[str]]) -> Scheme | None:
    """The scheme that fits more of the entities; None if undecided."""
    balance = 0  # above zero: IOB1
    for tags in sentences:
        before = None
        for position, tag in enumerate(tags):
            try:
                prefix, label = _parse_iob_tag(position, tag)
            except TagError:
                prefix, label = "O", None
            if label is not None and label != before:
                balance += 1 if prefix == "I" else -1
            before = label
    return None if balance == 0 else "iob1" if balance > 0 else "iob2"


def _parse_iob_tag(position: int, tag: str) -> tuple[str, str | None]:
    if tag == "O":
        return "O", None
    prefix, dash, label = tag.partition("-")
    if prefix not in ("B", "I") or not dash or not label:
        raise TagError(position, f"The tag {tag!r} must be O, B-label or I-label.")
    return prefix, label
