"""Sources: parts of the input, such as documents and a question, as groups of tokens.

A token belongs to the source that holds its first character that is not a space, so a token across a boundary belongs
to the source where it starts. Special tokens, the template's own tokens and the text between sources are the rest.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.inputs.item import ANSWER, Item, Sources, Tokens
from normscope.inputs.marked_text import MarkedText, Span, mark_chat, mark_text, refuse_template, unique_names
from normscope.inputs.pictures import picture_sources
from normscope.models.loaded import LoadedModel


def mark_input(
    loaded: LoadedModel, text: Any, words: Any, chat: Any, sources: Any, template: Any
) -> tuple[Any, Any, MarkedText | None]:
    """The text and the chat as the model will read them, one of them None, and the sources in them; None if every token
    is one. Sources that are texts need no other input."""
    if sources is None:
        raise NormscopeError("template= joins the texts of sources=[...]: pass them too.")
    if loaded.family.input != "text":
        raise NormscopeError(f"Sources are parts of a text, which {loaded.family.name} does not read. Leave them out.")
    if isinstance(sources, str) and sources in ("token", "image"):
        refuse_template(template, f"sources={sources!r}")
        return text, chat, None if sources == "token" else MarkedText("", {}, named=False)
    if isinstance(text, Mapping) and isinstance(text.get("text"), str) and chat is None and words is None:
        whole, _, marked = mark_input(loaded, text["text"], None, None, sources, template)
        return {**text, "text": whole}, None, marked
    pair = loaded.two_sided and isinstance(text, tuple) and len(text) == 2
    source = text[0] if pair else text
    if words is not None or (source is not None and not isinstance(source, str)):
        what = "words=[...]" if words is not None else "a pair" if isinstance(source, tuple) else type(source).__name__
        raise NormscopeError(
            f'Sources are parts of one text, not of {what}. Pass the text itself; sources="token" works for any input.'
        )
    if chat is not None and text is not None:
        return text, chat, None  # two inputs, which the caller refuses
    if chat is not None:
        return None, chat, mark_chat(loaded.tokenizer, chat, sources, template)
    marked = mark_text(source, sources, template)
    return (marked.text, text[1]) if pair else marked.text, None, marked


def add_sources(loaded: LoadedModel, item: Item, marked: MarkedText | None) -> Item:
    """The item with its sources."""
    if marked is None:
        return replace(item, sources=token_sources(item))
    side, found = loaded.stacks[0].side, None
    if marked.spans:
        found = locate_sources(item, marked, side, loaded.tokenizer)
    elif not item.pictures:
        raise NormscopeError("sources='image' are the pictures of the input, which has none.")
    return replace(item, sources=picture_sources(item, found, side) if item.pictures else found)


def sum_by_source(scores: Tensor, columns: Tensor, sources: int) -> Tensor:
    """Signed scores (..., columns) added up to (..., sources + 1), the last entry over the rest: the total stays the
    same. `columns` holds the source of each column, as from `Sources.columns`."""
    if scores.shape[-1] != len(columns):
        raise NormscopeError(f"There are {scores.shape[-1]} scores for {len(columns)} columns.")
    index = torch.where(columns < 0, sources, columns).to(scores.device)
    return scores.new_zeros(*scores.shape[:-1], sources + 1).index_add_(-1, index, scores)


def token_sources(item: Item) -> Sources:
    """Every token as a source, in the order of the columns of a map."""
    sides = sorted(item.sides)  # the decoder before the encoder
    real = [(side, n) for side in sides for n in item.sides[side].real.nonzero().flatten().tolist()]
    names = unique_names(item.sides[side].names[n] for side, n in real)
    index = {side: torch.full((len(item.sides[side].names),), -1) for side in sides}
    for number, (side, n) in enumerate(real):
        index[side][n] = number
    return Sources(tuple(names), index)


def locate_sources(item: Item, marked: MarkedText, side: str, tokenizer: Any) -> Sources:
    """The sources of a text that is on one side of the item. What the model or a target text adds is the answer."""
    tokens = item.sides[side]
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    owner = torch.full((len(marked.text) + 1,), -1)
    for number, (start, stop) in enumerate(marked.spans.values()):
        owner[start:stop] = number
    places = [None if span is None else _first_character(marked.text, span) for span in _spans(tokens, special, marked)]
    index = torch.tensor([-1 if at is None else int(owner[at]) for at in places])
    index[~tokens.real] = -1
    counts = torch.bincount(index[index >= 0], minlength=len(marked.spans))
    names = [name for name, count in zip(marked.spans, counts.tolist(), strict=True) if count]
    if marked.named and len(names) < len(marked.spans):
        lost = next(name for name in marked.spans if name not in names)
        raise NormscopeError(
            f"No token is left of the source {lost!r}: it was truncated, or is inside a token that starts before it. "
            "Shorten the other sources, or widen its span."
        )
    if not names:
        raise NormscopeError("The text has no such sources: it is empty, or only special tokens are left of it.")
    kept = (counts > 0).long().cumsum(0) - 1  # without the words, sentences or lines that were truncated
    index = torch.where(index < 0, -1, kept[index])
    return _add_answer(tuple(names), {side: index}, item, side, tokens, special)


def _spans(tokens: Tokens, special: set[str], marked: MarkedText) -> Sequence[Span | None]:
    if tokens.spans is not None:
        return tokens.spans
    given = len(tokens.names) - tokens.generated
    return [*_align_tokens(tokens.names[:given], special, marked.text), *[None] * tokens.generated]


def _add_answer(
    names: tuple[str, ...], index: dict[str, Tensor], item: Item, side: str, tokens: Tokens, special: set[str]
) -> Sources:
    """The sources with the answer as the last one, if there is one."""
    answer = len(names)
    for other in set(item.sides) - {side}:
        index[other] = torch.tensor([-1 if name in special else answer for name in item.sides[other].names])
    written = range(len(tokens.names) - tokens.generated, len(tokens.names))
    index[side][[n for n in written if tokens.names[n] not in special]] = answer
    answered = any(bool((one == answer).any()) for one in index.values())
    return Sources((*names, ANSWER) if answered else names, index)


def _first_character(text: str, span: Span) -> int:
    """The first character of a token that is not a space, or its first one if all are."""
    inside = text[slice(*span)]
    blank = len(inside) - len(inside.lstrip())
    return span[0] + (blank if blank < len(inside) else 0)


def _align_tokens(names: Sequence[str], special: set[str], text: str) -> list[Span | None]:
    """The span of each token, for tokenizers without offsets: the tokens spell the text, without spaces and up to NFKC
    normalisation and case. Raises if they do not."""
    spelled = [(char, n) for n, given in enumerate(text) for char in _spelling(given)]
    found: list[Span | None] = []
    at = 0
    for name in names:
        if name in special:
            found.append(None)
            continue
        spelling = _spelling(name.replace("\u2581", " ").removeprefix("##").removesuffix("</w>"))
        taken = spelled[at : at + len(spelling)]
        if "".join(char for char, _ in taken) != spelling:
            raise NormscopeError(
                f"This tokenizer does not say where its tokens are in the text, and the token {name!r} cannot be found "
                'there. Use a fast tokenizer, or sources="token".'
            )
        at += len(spelling)
        next_one = spelled[at][1] if at < len(spelled) else len(text)
        found.append((taken[0][1], taken[-1][1] + 1) if taken else (next_one, next_one))
    return found


def _spelling(text: str) -> str:
    return "".join(char for char in unicodedata.normalize("NFKC", text).casefold() if not char.isspace())
