"""Entity tags, IOB1 and IOB2, as spans of words.

In IOB2 every entity begins with B-. In IOB1 it begins with I-, and with B- only right after another of its label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from normscope.corpus.items import Entity
from normscope.errors import NormscopeError

Scheme = Literal["iob1", "iob2"]
SCHEMES = ("iob1", "iob2")


class TagError(NormscopeError):
    """A tag that cannot stand where it stands."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position


def entities(tags: Sequence[str], scheme: Scheme | None) -> tuple[Entity, ...]:
    """The entities of a sentence. Without a scheme an I- after anything else begins an entity, and so does every B-."""
    found: list[Entity] = []
    before = None
    for position, tag in enumerate(tags):
        prefix, label = _split(position, tag)
        if label is None:
            before = None
            continue
        if scheme == "iob2" and prefix == "I" and before != label:
            raise TagError(position, f"{tag} continues no {label}: in IOB2 an entity begins with B-{label}.")
        if scheme == "iob1" and prefix == "B" and before != label:
            raise TagError(position, f"{tag} follows no {label}: in IOB1 such an entity begins with I-{label}.")
        if prefix == "I" and before == label:
            found[-1] = found[-1]._replace(end_word=position + 1)
        else:
            found.append(Entity(position, position + 1, label))
        before = label
    return tuple(found)


def told_apart(sentences: Iterable[Sequence[str]]) -> Scheme | None:
    """The scheme that more entities speak for; None where none does."""
    balance = 0  # above zero: IOB1
    for tags in sentences:
        before = None
        for position, tag in enumerate(tags):
            try:
                prefix, label = _split(position, tag)
            except TagError:
                prefix, label = "O", None
            if label is not None and label != before:
                balance += 1 if prefix == "I" else -1
            before = label
    return None if balance == 0 else "iob1" if balance > 0 else "iob2"


def _split(position: int, tag: str) -> tuple[str, str | None]:
    if tag == "O":
        return "O", None
    prefix, dash, label = tag.partition("-")
    if prefix not in ("B", "I") or not dash or not label:
        raise TagError(position, f"The tag {tag!r} is neither O nor B-label nor I-label.")
    return prefix, label
