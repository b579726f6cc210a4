"""Spans of the text as targets: the tokens at some positions as they stand, each read at the position before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel

NEAR = 4  # tokens before a token that decide how it is written: a space, or a character of several tokens


@dataclass(frozen=True)
class Passage:
    """A passage of the text as the target of a flow: the tokens that hold it.

    Args:
        text: A piece of the text that occurs once; by default, everything that was generated. In an encoder-decoder,
            a piece of the target text.
    """

    text: str | None = None


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of the side that writes, with their ids."""

    start: int
    ids: Tensor  # (count,)

    @property
    def positions(self) -> Tensor:
        """(count,)"""
        return torch.arange(self.start, self.start + len(self.ids))

    @property
    def rows(self) -> Tensor:
        """(count,): where they are predicted, one position before."""
        return self.positions - 1

    def __str__(self) -> str:
        last = self.start + len(self.ids) - 1
        return f"at position {self.start}" if last == self.start else f"at positions {self.start} to {last}"


def is_span(target: Any) -> bool:
    """Whether a target is a span of the text."""
    return isinstance(target, slice | Passage)


def find_token_span(loaded: LoadedModel, item: Item, logits: Tensor, target: slice | Passage) -> TokenSpan:
    """The tokens of a span, refused if there are none, or none that the model predicts."""
    side = loaded.stacks[-1].side
    tokens = item.sides[side]
    size = len(tokens.names)
    if side != "decoder" or len(logits) != size:
        reads = "reads the whole text at once" if side != "decoder" else "has one row of logits for the whole text"
        raise NormscopeError(
            f"A span is explained for a model that writes from left to right; {type(loaded.model).__name__} {reads}. "
            "Pass a class or token as the target."
        )
    ids = written_ids(loaded, item)
    begin, end = _slice_ends(target, size) if isinstance(target, slice) else _passage_ends(loaded, item, ids, target)
    if begin == 0:
        raise NormscopeError(
            "The token at position 0 has none before it, so the model does not predict it. Start the span at 1."
        )
    if not bool(tokens.real[begin - 1 : end].all()):
        raise NormscopeError("The span has masked tokens, or starts after one. Choose tokens that are not masked.")
    span = TokenSpan(begin, ids[begin:end])
    if bool((span.ids < 0).any()):
        raise NormscopeError("The span has tokens of pictures or of a soft prompt, which are never predicted.")
    return span


def written_ids(loaded: LoadedModel, item: Item) -> Tensor:
    """(n,): the token ids on the side that writes; -1 for virtual tokens and those of pictures."""
    ids = item.tensors["decoder_input_ids" if loaded.two_sided else "input_ids"].clone()
    ids[[n for one in item.pictures for n in one.positions]] = -1
    missing = len(item.sides[loaded.stacks[-1].side].names) - len(ids)
    return torch.cat([ids.new_full((missing,), -1), ids])


def _slice_ends(span: slice, size: int) -> tuple[int, int]:
    for end in (span.start, span.stop, span.step):
        if end is not None and (isinstance(end, bool) or not isinstance(end, int)):
            raise NormscopeError(f"A span is a slice of positions such as slice(3, 7), not {span}.")
    if span.step not in (None, 1):
        raise NormscopeError(f"A span has consecutive tokens: {span} has the step {span.step}.")
    begin, end = (0 if span.start is None else span.start), (size if span.stop is None else span.stop)
    begin, end = (one + size if one < 0 else one for one in (begin, end))
    if not (0 <= begin <= size and 0 <= end <= size):
        raise NormscopeError(f"The span {span.start} to {span.stop} is outside the text, which has {size} tokens.")
    if begin >= end:
        raise NormscopeError(f"The span {span.start} to {span.stop} is empty.")
    return begin, end


def _passage_ends(loaded: LoadedModel, item: Item, ids: Tensor, passage: Passage) -> tuple[int, int]:
    size = len(ids)
    if passage.text is None:
        count = item.sides[loaded.stacks[-1].side].generated
        if count == 0:
            raise NormscopeError("Nothing was generated: pass generate=, or say which passage of the text to explain.")
        return size - count, size
    wanted = str(passage.text).strip()
    if not wanted:
        raise NormscopeError("The passage is empty. Pass a piece of the text, or Passage() for what was generated.")
    if loaded.tokenizer is None:
        raise NormscopeError("This Analyzer has no tokenizer: pass the positions of the passage as a slice.")
    text, spans = spell_tokens(loaded.tokenizer, ids.tolist())
    places = [n for n in range(len(text)) if text.startswith(wanted, n)]
    if not places:
        raise NormscopeError(f"The text has no {wanted!r}. It is compared with the text of the tokens: {text[:200]!r}.")
    found = [_touched_tokens(spans, text, place, place + len(wanted)) for place in places]
    if len(places) > 1:
        where = ", ".join(
            f"{place} (tokens {begin} to {end - 1})" for place, (begin, end) in zip(places, found, strict=True)
        )
        raise NormscopeError(
            f"{wanted!r} occurs {len(places)} times, at the characters {where}. Pass a longer passage, or a slice of "
            "positions."
        )
    return found[0]


def _touched_tokens(spans: list[tuple[int, int]], text: str, begin: int, end: int) -> tuple[int, int]:
    """The first token with a character that is not a space in begin .. end, and the one after the last."""
    touched = [n for n, (a, b) in enumerate(spans) if text[max(a, begin) : min(b, end)].strip()]
    return touched[0], touched[-1] + 1


def spell_tokens(tokenizer: Any, ids: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text of the tokens without special ones, and the characters of each. Tokens that only together make a
    character share it."""
    hidden = {-1, *tokenizer.all_special_ids}  # -1: virtual tokens and those of pictures

    def decode(some: list[int]) -> str:
        shown = [id for id in some if id not in hidden]
        return str(tokenizer.decode(shown, clean_up_tokenization_spaces=False))

    text, spans = "", []
    waiting = 0  # tokens at the end whose characters are not complete
    for n in range(len(ids)):
        begin = n - waiting
        context = ids[max(0, begin - NEAR) : begin]
        before, with_it = decode(context), decode([*context, *ids[begin : n + 1]])
        added = with_it[len(before) :] if with_it.startswith(before) else decode(ids[begin : n + 1])
        if added.endswith("\ufffd") and waiting < NEAR and n + 1 < len(ids):
            waiting += 1
            continue
        spans += [(len(text), len(text) + len(added))] * (waiting + 1)
        text += added
        waiting = 0
    return text, spans
