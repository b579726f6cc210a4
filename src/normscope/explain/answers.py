"""The answer that is explained: generated, given, or a span of the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from normscope.engine.request import Estimate
from normscope.errors import NormscopeError
from normscope.flow.continuations import AGAINST
from normscope.flow.cost import flow_cost
from normscope.flow.run import refuse_virtual_columns
from normscope.flow.spans import Passage, spell_tokens, written_ids
from normscope.flow.target_names import target_pieces
from normscope.inputs.encode import encode_one
from normscope.inputs.generation import append_written_tokens, check_generated_count
from normscope.inputs.item import Item, check_length
from normscope.models.loaded import LoadedModel


@dataclass(frozen=True)
class Question:
    """The input before the answer, as the user gives it."""

    prompt: Any = None
    words: Sequence[str] | None = None
    chat: Sequence[Mapping[str, str]] | None = None
    sources: Any = None
    template: str | None = None
    truncation: bool = False

    def encode(self, loaded: LoadedModel, text_target: Any = None, generate: int | None = None) -> Item:
        """The input as an item, with a target text for an encoder-decoder, or with generated tokens."""
        item = encode_one(
            loaded,
            self.prompt,
            self.words,
            self.chat,
            text_target,
            generate,
            self.truncation,
            self.sources,
            self.template,
        )
        refuse_virtual_columns(item)
        return item


@dataclass(frozen=True)
class AnsweredItem:
    """An input with its answer, and the span of the answer."""

    item: Item
    span: slice | Passage


def find_answers(
    loaded: LoadedModel, question: Question, generate: int | None, answer: Any, target: Any, against: Any
) -> list[AnsweredItem]:
    """The answer and, if `against` is a text, the answer that it is contrasted with."""
    if sum(given is not None for given in (generate, answer, target)) != 1:
        raise NormscopeError(
            "Pass exactly one of generate= (a number of tokens), answer= (a text) and target= (a slice or a Passage of "
            "the text) to say what to explain."
        )
    other = isinstance(against, str) and against not in AGAINST
    if target is not None:
        if not isinstance(target, slice | Passage):
            raise NormscopeError(
                f"target must be a slice of positions or a Passage, not {type(target).__name__}. To explain one logit, "
                "use flow()."
            )
        if other:
            raise NormscopeError("Another answer as against= needs generate= or answer=.")
        return [AnsweredItem(question.encode(loaded), target)]
    written = answer is None
    found = _generated_answer(loaded, question, generate) if written else _given_answer(loaded, question, answer)
    if not other:
        return [found]
    contrasted = _given_answer(loaded, question, against)
    if torch.equal(written_ids(loaded, found.item), written_ids(loaded, contrasted.item)):
        raise NormscopeError("The two answers are the same, so their difference is zero.")
    return [found, contrasted]


def explanation_cost(loaded: LoadedModel, question: Question, generate: Any, answer: Any) -> Estimate:
    """The estimated cost of explaining every token of the answer; the model does not run."""
    if (generate is None) == (answer is None):
        raise NormscopeError("Pass either generate= (a number of tokens) or answer= (a text).")
    if generate is None:
        item = _given_answer(loaded, question, answer).item
        last = item.sides[loaded.stacks[-1].side]
        return flow_cost(loaded, item, len(last.names) - 1 if loaded.two_sided else last.generated)
    count = check_generated_count(generate)
    if loaded.stacks[-1].side != "decoder":
        raise NormscopeError("This model is an encoder and does not generate text.")
    # The decoder of a translation has read its start token only; any target stands for it.
    item = question.encode(loaded, text_target={"input_ids": [[0]]} if loaded.two_sided else None)
    return flow_cost(loaded, item, count, count)


def _generated_answer(loaded: LoadedModel, question: Question, generate: Any) -> AnsweredItem:
    if loaded.two_sided and isinstance(generate, int) and not isinstance(generate, bool):
        generate += 1  # the decoder does not read the last token that it generates
    item = question.encode(loaded, generate=generate)
    size = len(item.sides[loaded.stacks[-1].side].names)
    if loaded.two_sided and size < 2:
        raise NormscopeError("The model generates nothing for this input: there is no answer to explain.")
    return AnsweredItem(item, slice(1, size) if loaded.two_sided else Passage())


def _given_answer(loaded: LoadedModel, question: Question, answer: Any) -> AnsweredItem:
    if not isinstance(answer, str) or not answer.strip():
        raise NormscopeError("An answer is a non-empty text.")
    if loaded.two_sided:
        item = question.encode(loaded, text_target=answer)
        return AnsweredItem(item, slice(1, len(item.sides["decoder"].names)))
    item = question.encode(loaded)
    if loaded.stacks[-1].side != "decoder" or loaded.tokenizer is None:
        raise NormscopeError(
            "An answer as text needs a model that writes, and its tokenizer. Pass the whole text, and target= for the "
            "part to explain."
        )
    text, _ = spell_tokens(loaded.tokenizer, written_ids(loaded, item).tolist())
    pieces = target_pieces(loaded, answer, after_space=not text or text[-1].isspace())
    ids = torch.tensor(loaded.tokenizer.convert_tokens_to_ids(pieces))
    check_length(len(item) + len(ids), loaded.limits, "The prompt with its answer", "Shorten it.")
    return AnsweredItem(append_written_tokens(item, ids, loaded.tokenizer), Passage())
