"""Predictions of a model when tokens are removed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError
from normscope.inputs.encode import forward_inputs
from normscope.inputs.item import Item
from normscope.papers.faithfulness.contexts import Context, keep_item_tokens

BATCH = 64  # most inputs per forward pass
LOGITS = 2**25  # most logits per forward pass


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
    """The token that replaces others."""

    id: int
    token: str


def replacement_token(lens: Analyzer, wanted: str = "") -> Replacement:
    """The token that replaces others: `wanted`, or by default the mask token of an encoder. Causal models were not
    trained with one; for them it is the unknown token, the padding token, a space, or the end-of-text token."""
    tokenizer: Any = lens.tokenizer
    ending = _classifier_padding_id(lens)
    if wanted:
        vocabulary = tokenizer.get_vocab()
        if wanted not in vocabulary:
            raise NormscopeError(f"The replacement token {wanted!r} is not in the vocabulary.")
        if vocabulary[wanted] == ending:
            raise NormscopeError(
                f"{wanted!r} is the padding token, which marks the end of the text for this classifier."
            )
        return Replacement(int(vocabulary[wanted]), wanted)
    encoder = lens.loaded.stacks[0].side == "encoder"
    space = tokenizer(" ", add_special_tokens=False)["input_ids"]
    ends = tokenizer.eos_token_id
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id != ends else None  # GPT-2 uses one token for both
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id != ends else None
    mask, blank = tokenizer.mask_token_id if encoder else None, space[0] if len(space) == 1 else None
    for id in (mask, unknown, padding, blank, ends):
        if id not in (None, ending) and id < lens.loaded.limits.vocabulary:
            return Replacement(int(id), str(tokenizer.convert_ids_to_tokens(int(id))))
    raise NormscopeError(
        "The tokenizer has no neutral token to replace others with: choose one with --replacement or "
        "Settings(replacement=...)."
    )


def erased_logits(
    lens: Analyzer, context: Context, erased: Iterable[Erased], replacement: Replacement
) -> Iterator[Tensor]:
    """The logits (classes,) of the context after each erasure, in float64. Inputs of equal length are batched, so
    nothing is padded."""
    made = [_erase_tokens(context, one, replacement) for one in erased]
    groups: dict[int, list[int]] = {}
    for number, (item, _) in enumerate(made):
        groups.setdefault(len(item.tensors["input_ids"]), []).append(number)
    found: dict[int, Tensor] = {}
    for length, numbers in groups.items():
        size = _erasure_batch_size(lens, context, length)
        for start in range(0, len(numbers), size):
            some = numbers[start : start + size]
            found |= zip(some, _forward_logits(lens, [made[n] for n in some]), strict=True)
    return (found[number] for number in range(len(made)))


def erased_predictions(
    lens: Analyzer, context: Context, target: int, erased: Sequence[Erased], replacement: Replacement
) -> dict[Erased, Prediction]:
    """The target's probability and the model's choice after each erasure; equal erasures are computed once."""
    distinct = list(dict.fromkeys(erased))
    found = {}
    for one, logits in zip(distinct, erased_logits(lens, context, distinct, replacement), strict=True):
        found[one] = Prediction(float(logits.softmax(-1)[target]), int(logits.argmax()))
    return found


def _erase_tokens(context: Context, erased: Erased, replacement: Replacement) -> tuple[Item, int | None]:
    """The input after an erasure, and the position at which its logits are read."""
    item, at = context.item, context.position
    ids = item.tensors["input_ids"]
    gone = sorted(erased.tokens)
    if erased.erasure == "delete":
        kept = [n for n in range(len(ids)) if n not in erased.tokens]
        if kept:
            # The last remaining token predicts the next one; a masked token keeps its place among the others.
            if at is not None:
                at = len(kept) - 1 if at in erased.tokens else kept.index(at)
            return keep_item_tokens(item, kept), at
        gone = [0]  # an input cannot be empty: keep one neutral token
        item, at = keep_item_tokens(item, [0]), None if at is None else 0
        ids = item.tensors["input_ids"]
    changed = ids.clone()
    changed[gone] = replacement.id
    return replace(item, tensors={**item.tensors, "input_ids": changed}), at


def _forward_logits(lens: Analyzer, made: Sequence[tuple[Item, int | None]]) -> Iterator[Tensor]:
    lens.loaded.refuse_prompt("Faithfulness")
    batch = forward_inputs(lens.loaded, [item for item, _ in made])
    last = len(made[0][0].tensors["input_ids"]) - 1
    only_last = _can_keep_last_logits(lens) and all(at == last for _, at in made)
    if only_last:
        batch["logits_to_keep"] = 1
    with torch.no_grad():
        logits: Tensor = lens.model(**batch).logits
    for row, (_, at) in zip(logits, made, strict=True):
        yield (row if at is None else row[-1 if only_last else at]).double().cpu()


def _erasure_batch_size(lens: Analyzer, context: Context, length: int) -> int:
    """The number of inputs of this length per forward pass."""
    if context.position is None:
        causal = lens.loaded.stacks[0].side == "decoder"
        return 1 if causal and _classifier_padding_id(lens) is None else BATCH  # such classifiers accept no batches
    if _can_keep_last_logits(lens):
        return BATCH
    return max(1, min(BATCH, LOGITS // (length * lens.loaded.limits.vocabulary)))


def _classifier_padding_id(lens: Analyzer) -> int | None:
    """The padding token of a causal classifier, which reads the last token before padding; None for other models."""
    if lens.loaded.stacks[0].side == "encoder" or not type(lens.model).__name__.endswith("ForSequenceClassification"):
        return None
    found = lens.model.config.pad_token_id
    return None if found is None else int(found)


def _can_keep_last_logits(lens: Analyzer) -> bool:
    """Whether the model can compute the logits of the last token alone."""
    causal = lens.loaded.stacks[0].side == "decoder"
    return causal and "logits_to_keep" in inspect.signature(lens.model.forward).parameters
