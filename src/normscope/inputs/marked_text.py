"""Texts with named spans of characters: a user's spans, sources joined by a template, the messages of a chat, or every
word, sentence or line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import Formatter
from typing import Any

from normscope.errors import NormscopeError, did_you_mean
from normscope.inputs.generation import chat_prompt
from normscope.inputs.item import ANSWER

REST = "(rest)"  # tokens of no source: special tokens, the template's own, text between the sources
QUESTION = "question"  # the name of the text that is passed besides a list or dict of sources

GRAINS = {
    "word": re.compile(r"\S+"),
    # Up to the punctuation at its end, with closing quotes, before a space (\u3002 needs none), or to the end
    # of the line.
    "sentence": re.compile(
        "(?=\\S)[^\n]*?(?:[.!?\u2026]+[\"'\u201d\u2019\u00bb)\\]]*(?=\\s|\\Z)"
        "|[\u3002\uff01\uff1f]+[\u201d\u2019\u00bb\uff09\u300d\u300f]*|(?=\n|\\Z))"
    ),
    "line": re.compile(r"\S[^\n]*"),
}
GRAIN_NAMES = ("token", "word", "sentence", "line", "message", "image")

Span = tuple[int, int]


@dataclass(frozen=True)
class MarkedText:
    """A text and named spans of it, in characters: text[start:stop]."""

    text: str
    spans: Mapping[str, Span]
    named: bool  # by the user, so that each must have a token


def mark_text(text: str | None, sources: Any, template: str | None) -> MarkedText:
    """The text with its sources, built from the template if the sources are texts themselves."""
    if isinstance(sources, str):
        refuse_template(template, f"sources={sources!r}")
        return _mark_grain(_check_given_text(text), sources)
    if is_texts(sources):
        filled, spans = _fill_template(_named_texts(sources), text, template)
        return MarkedText(filled, spans, named=True)
    refuse_template(template, "spans")
    whole = _check_given_text(text)
    return MarkedText(whole, _check_spans(sources, whole), named=True)


def mark_chat(tokenizer: Any, chat: Any, sources: Any, template: str | None) -> MarkedText:
    """The prompt of a conversation with its sources. Sources that are texts are joined with the last message of the
    user as the question; a grain applies inside each message, spans to the whole prompt."""
    if is_texts(sources):
        chat, last, inner = _fill_last_message(chat, sources, template)
        prompt, spans = _message_spans(tokenizer, chat)
        start = spans[last][0] - _stripped(chat[last]["content"], prompt[slice(*spans[last])])
        placed = {
            name: (max(a + start, spans[last][0]), min(b + start, spans[last][1])) for name, (a, b) in inner.items()
        }
        return MarkedText(prompt, placed, named=True)
    refuse_template(template, "spans" if isinstance(sources, Mapping) else f"sources={sources!r}")
    if not isinstance(sources, str):
        prompt = chat_prompt(tokenizer, chat)
        return MarkedText(prompt, _check_spans(sources, prompt), named=True)
    prompt, spans = _message_spans(tokenizer, chat)
    if sources == "message":
        roles = [str(turn.get("role")) for turn in chat]
        return MarkedText(prompt, dict(zip(_numbered(roles), spans, strict=True)), named=True)
    grain = _find_grain(sources)
    inside = [(start + m.start(), start + m.end()) for start, stop in spans for m in grain.finditer(prompt[start:stop])]
    return MarkedText(prompt, _name_spans(prompt, inside), named=False)


def is_texts(sources: Any) -> bool:
    """Whether the sources are texts for a template, not spans or a grain."""
    values = sources.values() if isinstance(sources, Mapping) else sources
    return not isinstance(sources, str) and isinstance(values, Iterable) and any(isinstance(one, str) for one in values)


def unique_names(texts: Iterable[str]) -> list[str]:
    """The texts as names: white space collapsed, and " (2)", " (3)" added to those that repeat."""
    seen: dict[str, int] = {}
    found = []
    for text in (" ".join(text.split()) or text for text in texts):
        seen[text] = seen.get(text, 0) + 1
        name = text if seen[text] == 1 else f"{text} ({seen[text]})"
        while name in found:  # a text that looks like such a name
            seen[text] += 1
            name = f"{text} ({seen[text]})"
        found.append(name)
    return found


def _mark_grain(text: str, name: str) -> MarkedText:
    if name == "message":
        raise NormscopeError('sources="message" needs chat=[...]: a text has no messages.')
    spans = [found.span() for found in _find_grain(name).finditer(text)]
    return MarkedText(text, _name_spans(text, spans), named=False)


def _find_grain(name: str) -> re.Pattern[str]:
    if name not in GRAINS:
        raise NormscopeError(
            f"Unknown sources {name!r}.{did_you_mean(name, GRAIN_NAMES)} Pass {', '.join(map(repr, GRAIN_NAMES))}, a "
            'dict of spans such as {"question": (0, 40)}, or a list or dict of texts.'
        )
    return GRAINS[name]


def _name_spans(text: str, spans: Sequence[Span]) -> dict[str, Span]:
    return dict(zip(unique_names(text[start:stop] for start, stop in spans), spans, strict=True))


def _numbered(names: Sequence[str]) -> list[str]:
    """Names that occur more than once, numbered from 1."""
    return [name if names.count(name) == 1 else f"{name} {names[: n + 1].count(name)}" for n, name in enumerate(names)]


def _check_given_text(text: Any) -> str:
    if text is None:
        raise NormscopeError("Spans are of a text. Pass it too, or sources that are texts: sources=[...].")
    return str(text)


def refuse_template(template: Any, what: str) -> None:
    if template is not None:
        raise NormscopeError(f"template= joins sources that are texts; there is nothing to join with {what}.")


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not name.strip():
        raise NormscopeError(f"The name of a source must be a non-empty string, not {name!r}.")
    if name in (REST, ANSWER):
        raise NormscopeError(f"{name} is the name of tokens of no source. Choose another name.")
    return name


def _check_spans(sources: Any, text: str) -> dict[str, Span]:
    """Spans given as a dict name -> (start, stop)."""
    if not isinstance(sources, Mapping):
        raise NormscopeError(
            'sources must be a dict of spans such as {"question": (0, 40)}, a list or dict of texts, or one of '
            f"{', '.join(map(repr, GRAIN_NAMES))}, not {type(sources).__name__}."
        )
    if not sources:
        raise NormscopeError("sources is empty. Pass at least one source, or leave it out.")
    found: dict[str, Span] = {}
    for name, span in sources.items():
        _check_name(name)
        ends = list(span) if isinstance(span, Sequence) else []
        if len(ends) != 2 or any(isinstance(end, bool) or not isinstance(end, int) for end in ends):
            raise NormscopeError(f"The span of {name!r} must be two integers (start, stop), not {span!r}.")
        start, stop = ends
        if not 0 <= start <= stop <= len(text):
            raise NormscopeError(
                f"The span {start} to {stop} of {name!r} is outside the text, which has {len(text)} characters."
            )
        if not text[start:stop].strip():
            raise NormscopeError(f"The span {start} to {stop} of {name!r} is empty: it holds no character but spaces.")
        found[name] = (start, stop)
    for (one, (start, stop)), (other, (next_start, next_stop)) in pairwise(sorted(found.items(), key=lambda at: at[1])):
        if next_start < stop:
            raise NormscopeError(
                f"The sources {one!r} ({start} to {stop}) and {other!r} ({next_start} to {next_stop}) overlap. A "
                "character belongs to one source only."
            )
    return found


def _named_texts(sources: Any) -> dict[str, str]:
    """Sources that are texts, by name: "source 1", "source 2" for those of a list."""
    named = dict(sources) if isinstance(sources, Mapping) else {f"source {n}": t for n, t in enumerate(sources, 1)}
    for name, text in named.items():
        _check_name(name)
        if not isinstance(text, str):
            raise NormscopeError(f"Either all sources are texts or all are spans: {name!r} is {type(text).__name__}.")
        if not text.strip():
            raise NormscopeError(f"The source {name!r} is empty.")
    return named


def _fill_template(sources: dict[str, str], question: Any, template: Any) -> tuple[str, dict[str, Span]]:
    """The text of a template and where the sources are in it.

    `{sources}` stands for all sources with an empty line between them, `{0}`, `{1}` or `{name}` for one of them, and
    `{question}` for the text that is passed besides them. `{{` and `}}` are braces.
    """
    texts = dict(sources)
    if question is not None:
        if not isinstance(question, str) or not question.strip():
            raise NormscopeError("The text besides the sources must be a non-empty string; it may be left out.")
        if QUESTION in texts:
            raise NormscopeError(
                f"Two sources are named {QUESTION!r}: one of sources=, and the text besides them. Rename the one, or "
                "leave the text out."
            )
        texts[QUESTION] = question
    if template is None:
        template = "{sources}" if question is None else "{sources}\n\n{question}"
    filled, spans = "", dict.fromkeys(texts, (-1, -1))
    for piece, is_source in _template_pieces(template, list(sources), list(texts)):
        if is_source and spans[piece] != (-1, -1):
            raise NormscopeError(f"The template has the source {piece!r} twice.")
        if is_source:
            spans[piece] = (len(filled), len(filled) + len(texts[piece]))
        filled += texts[piece] if is_source else piece
    missing = [name for name, span in spans.items() if span == (-1, -1)]
    if missing:
        raise NormscopeError(
            f"The template leaves out {', '.join(map(repr, missing))}. Use {{sources}}, or a field for each: "
            f"{', '.join('{' + str(n) + '}' for n in range(len(sources)))}"
            f"{' and {question}' if question is not None else ''}."
        )
    return filled, spans


def _template_pieces(template: Any, sources: list[str], names: list[str]) -> list[tuple[str, bool]]:
    """The template as literal text (False) and names of sources (True)."""
    if not isinstance(template, str):
        raise NormscopeError(f"A template is a text with fields such as {{sources}}, not {type(template).__name__}.")
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise NormscopeError(f"The template is not valid: {error}. Write {{{{ and }}}} for braces.") from error
    pieces: list[tuple[str, bool]] = []
    for literal, field, form, conversion in parsed:
        pieces.append((literal, False))
        if field is None:
            continue
        if field == "sources" and not form and not conversion:
            for n, name in enumerate(sources):
                pieces += [("\n\n" if n else "", False), (name, True)]
        elif field in names and not form and not conversion:
            pieces.append((field, True))
        elif field.isdecimal() and int(field) < len(sources) and not form and not conversion:
            pieces.append((sources[int(field)], True))
        else:
            what = field + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise NormscopeError(
                f"The template has the unknown field {{{what}}}. Known: {{sources}}, {{0}} to {{{len(sources) - 1}}}, "
                f"{', '.join('{' + name + '}' for name in names)}. Write {{{{ and }}}} for braces."
            )
    return pieces


def _fill_last_message(chat: Any, sources: Any, template: Any) -> tuple[list[Any], int, dict[str, Span]]:
    """The chat with the sources in its last user message, the index of that message, and the sources' spans in it."""
    turns = list(chat) if isinstance(chat, Sequence) and not isinstance(chat, str) else []
    asked = [n for n, turn in enumerate(turns) if isinstance(turn, Mapping) and turn.get("role") == "user"]
    if not asked:
        raise NormscopeError('Sources join the last message of the user, but chat has none: {"role": "user", ...}.')
    last = asked[-1]
    filled, spans = _fill_template(_named_texts(sources), turns[last].get("content"), template)
    return [turn if n != last else {**turn, "content": filled} for n, turn in enumerate(turns)], last, spans


def _stripped(content: str, drawn: str) -> int:
    """The number of characters of a message that the template stripped before the drawn content."""
    return len(content) - len(content.lstrip()) if drawn != content else 0


def _message_spans(tokenizer: Any, chat: Any) -> tuple[str, list[Span]]:
    """The prompt of a conversation and where the content of each message is in it.

    The template is applied to markers too: what stands between them is its own text, which must give the same prompt
    with the messages back in their places.
    """
    prompt = chat_prompt(tokenizer, chat)
    contents = [turn.get("content") for turn in chat]
    if not all(isinstance(content, str) and content.strip() for content in contents):
        raise NormscopeError("Sources of a chat need messages that are non-empty texts.")
    markers = [f"\ue000{n}\ue001" for n in range(len(chat))]
    drawn = chat_prompt(tokenizer, [{**turn, "content": mark} for turn, mark in zip(chat, markers, strict=True)])
    if re.findall("\ue000\\d+\ue001", drawn) == markers:
        between = re.split("\ue000\\d+\ue001", drawn)
        changes: tuple[Callable[[str], str], ...] = (str, str.strip)
        for change in changes:
            spans, text = [], between[0]
            for content, after in zip(map(change, contents), between[1:], strict=True):
                spans.append((len(text), len(text) + len(content)))
                text += content + after
            if text == prompt:
                return prompt, spans
    raise NormscopeError(
        "This tokenizer's chat template changes or reorders the messages, so they cannot be found in its prompt. Pass "
        "the prompt as text, with spans: tokenizer.apply_chat_template(chat, tokenize=False)."
    )
