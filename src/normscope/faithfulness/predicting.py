"""What a model predicts when tokens are taken away."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError
from normscope.faithfulness.contexts import Context, cut
from normscope.inputs.item import Item

BATCH = 64  # inputs in a forward pass,
LOGITS = 2**25  # and logits of all of them


class Prediction(NamedTuple):
    """The probability of the target, and the model's own choice."""

    probability: float
    choice: int


class Erased(NamedTuple):
    """A context without some tokens."""

    erasure: str  # "mask" or "delete"
    tokens: frozenset[int]


@dataclass(frozen=True)
class Replacement:
    """The token that takes the place of others."""

    id: int
    token: str


def neutral(lens: Analyzer, wanted: str = "") -> Replacement:
    """The token that stands for nothing: the one that is wanted; else the mask token of an encoder; of a causal model,
    which was never shown one, the unknown token, or the padding token, or a space, or the token that ends a text."""
    tokenizer: Any = lens.tokenizer
    ending = _ends_by_padding(lens)
    if wanted:
        vocabulary = tokenizer.get_vocab()
        if wanted not in vocabulary:
            raise NormscopeError(f"The token {wanted!r} that is to take the place of others is not in the vocabulary.")
        if vocabulary[wanted] == ending:
            raise NormscopeError(f"{wanted!r} is the padding token, by which this model finds the end of a text.")
        return Replacement(int(vocabulary[wanted]), wanted)
    encoder = lens.stacks[0].side == "encoder"
    space = tokenizer(" ", add_special_tokens=False)["input_ids"]
    ends = tokenizer.eos_token_id
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id != ends else None  # GPT-2 has one token for both
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id != ends else None
    tried = [
        tokenizer.mask_token_id if encoder else None,
        unknown,
        padding,
        space[0] if len(space) == 1 else None,
        ends,
    ]
    found = next((id for id in tried if id not in (None, ending) and id < lens.limits.vocabulary), None)
    if found is None:
        raise NormscopeError(
            "The tokenizer has no token that stands for nothing: name one, --replacement or Settings(replacement=...)."
        )
    return Replacement(int(found), str(tokenizer.convert_ids_to_tokens(int(found))))


def logits_of(lens: Analyzer, context: Context, erased: Iterable[Erased], replacement: Replacement) -> Iterator[Tensor]:
    """The logits (classes,) of the context without some tokens, in float64, one after the other.

    Inputs of one length are run together, so that nothing is padded.
    """
    made = [_without(context, one, replacement) for one in erased]
    groups: dict[int, list[int]] = {}
    for number, (item, _) in enumerate(made):
        groups.setdefault(len(item.tensors["input_ids"]), []).append(number)
    found: dict[int, Tensor] = {}
    for length, numbers in groups.items():
        size = _size(lens, context, length)
        for start in range(0, len(numbers), size):
            some = numbers[start : start + size]
            found |= zip(some, _run(lens, [made[n] for n in some]), strict=True)
    return (found[number] for number in range(len(made)))


def predictions(
    lens: Analyzer, context: Context, target: int, erased: Sequence[Erased], replacement: Replacement
) -> dict[Erased, Prediction]:
    """What becomes of the target's probability; the same tokens are taken away once only."""
    distinct = list(dict.fromkeys(erased))
    found = {}
    for one, logits in zip(distinct, logits_of(lens, context, distinct, replacement), strict=True):
        found[one] = Prediction(float(logits.softmax(-1)[target]), int(logits.argmax()))
    return found


def _without(context: Context, erased: Erased, replacement: Replacement) -> tuple[Item, int | None]:
    """The input, and the position in it at which logits are read."""
    item, at = context.item, context.position
    ids = item.tensors["input_ids"]
    gone = sorted(erased.tokens)
    if erased.erasure == "delete":
        kept = [n for n in range(len(ids)) if n not in erased.tokens]
        if kept:
            # The next token is predicted by the last that is left, a masked one stays where it is among the others.
            return cut(item, kept), None if at is None else (len(kept) - 1 if at in erased.tokens else kept.index(at))
        gone = [0]  # no input can be empty: one token that stands for nothing
        item, at = cut(item, [0]), None if at is None else 0
        ids = item.tensors["input_ids"]
    changed = ids.clone()
    changed[gone] = replacement.id
    return replace(item, tensors={**item.tensors, "input_ids": changed}), at


def _run(lens: Analyzer, made: Sequence[tuple[Item, int | None]]) -> Iterator[Tensor]:
    lens.refuse_prompt("Faithfulness")
    batch = lens.batch([item for item, _ in made])
    last = len(made[0][0].tensors["input_ids"]) - 1
    only_last = _keeps(lens) and all(at == last for _, at in made)
    if only_last:
        batch["logits_to_keep"] = 1
    with torch.no_grad():
        logits: Tensor = lens.model(**batch).logits
    for row, (_, at) in zip(logits, made, strict=True):
        yield (row if at is None else row[-1 if only_last else at]).double().cpu()


def _size(lens: Analyzer, context: Context, length: int) -> int:
    """How many inputs of a length fit into one forward pass."""
    if context.position is None:
        causal = lens.stacks[0].side == "decoder"
        return 1 if causal and _ends_by_padding(lens) is None else BATCH  # it would refuse several inputs
    if _keeps(lens):
        return BATCH
    return max(1, min(BATCH, LOGITS // (length * lens.limits.vocabulary)))


def _ends_by_padding(lens: Analyzer) -> int | None:
    """The padding token of a causal model that classifies: it reads the last token that is another."""
    if lens.stacks[0].side == "encoder" or not type(lens.model).__name__.endswith("ForSequenceClassification"):
        return None
    found = lens.model.config.pad_token_id
    return None if found is None else int(found)


def _keeps(lens: Analyzer) -> bool:
    """Whether the head can be told to read the last token only."""
    return lens.stacks[0].side == "decoder" and "logits_to_keep" in inspect.signature(lens.model.forward).parameters
