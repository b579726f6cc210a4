"""Prediction contexts: a class from a text, the next token from earlier ones, a masked token from the others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError
from normscope.flow.target_names import target_class_names
from normscope.inputs.item import Item, Tokens
from normscope.papers.faithfulness.settings import Settings

Task = Literal["class", "next", "masked"]
FEWEST = 3  # fewest removable tokens that can be ranked


@dataclass(frozen=True)
class Context:
    """One prediction. `given` is the correct answer, if known."""

    item: Item
    position: int | None  # where a language model's logits are read; None for a classifier
    removable: tuple[int, ...]  # tokens that may be removed: all but special tokens and the masked one
    given: int | None


def prediction_task(lens: Analyzer) -> Task:
    """What a model predicts; models that predict neither classes nor tokens are an error."""
    kind = type(lens.model).__name__
    if lens.two_sided or lens.family.input != "text":
        raise NormscopeError(f"Faithfulness needs an encoder or decoder that reads text, not {kind}.")
    if lens.tokenizer is None:
        raise NormscopeError("Faithfulness removes tokens from texts: pass the model with its tokenizer.")
    if kind.endswith("ForSequenceClassification"):
        if int(getattr(lens.model.config, "num_labels", 2)) < 2:
            raise NormscopeError(f"{kind} has a single output (regression), so there is no probability to measure.")
        return "class"
    if lens.model is lens.loaded.base or lens.model.get_output_embeddings() is None:
        raise NormscopeError(
            f"{kind} has no head that predicts a class or a token. Load the model with a head, for example with "
            "AutoModelForSequenceClassification or AutoModelForCausalLM."
        )
    if lens.loaded.stacks[0].side == "decoder":
        return "next"
    if lens.tokenizer.mask_token_id is None:
        raise NormscopeError(f"{kind} predicts masked tokens, but its tokenizer has no mask token.")
    return "masked"


def prediction_contexts(lens: Analyzer, item: Item, label: str | None, id: str, settings: Settings) -> list[Context]:
    """The predictions to explain in one text."""
    task = prediction_task(lens)
    (tokens,) = item.sides.values()
    ids = item.tensors["input_ids"].tolist()
    special = _marker_ids(lens.tokenizer)
    removable = [n for n in tokens.real.nonzero().flatten().tolist() if ids[n] not in special]
    if task == "class":
        found = [Context(item, None, tuple(removable), _class_of_label(lens, label))]
    else:
        made, possible = (_next_context, removable[FEWEST - 1 :]) if task == "next" else (_masked_context, removable)
        if task == "next" and settings.target == "given":
            possible = [n for n in possible if n + 1 < len(ids)]
        found = [made(lens, item, removable, n) for n in _choose_positions(possible, id, settings)]
    found = [one for one in found if len(one.removable) >= FEWEST]
    if not found:
        raise NormscopeError(f"The text is too short: it needs {FEWEST} removable tokens and one to predict.")
    if settings.target == "given" and any(one.given is None for one in found):
        raise NormscopeError("The target is the given label, but this entry has no label that the model knows.")
    return found


def _next_context(lens: Analyzer, item: Item, removable: Sequence[int], at: int) -> Context:
    """The context for the token after position `at`: all tokens up to `at`."""
    ids = item.tensors["input_ids"]
    (side,) = item.sides
    tokens = item.sides[side]
    words = None if tokens.word_ids is None else tokens.word_ids[: at + 1]
    kept = Tokens(tokens.names[: at + 1], tokens.real[: at + 1], words)
    tensors = {key: value[: at + 1] for key, value in item.tensors.items()}
    given = int(ids[at + 1]) if at + 1 < len(ids) else None
    return Context(
        replace(item, tensors=tensors, sides={side: kept}), at, tuple(n for n in removable if n <= at), given
    )


def _masked_context(lens: Analyzer, item: Item, removable: Sequence[int], at: int) -> Context:
    """The context for the token at position `at`: all other tokens, with `at` masked."""
    (side,) = item.sides
    tokens = item.sides[side]
    ids = item.tensors["input_ids"].clone()
    given = int(ids[at])
    ids[at] = lens.tokenizer.mask_token_id
    names = (*tokens.names[:at], str(lens.tokenizer.mask_token), *tokens.names[at + 1 :])
    changed = replace(
        item, tensors={**item.tensors, "input_ids": ids}, sides={side: Tokens(names, tokens.real, tokens.word_ids)}
    )
    return Context(changed, at, tuple(n for n in removable if n != at), given)


def _choose_positions(possible: Sequence[int], id: str, settings: Settings) -> list[int]:
    """The last position, or random positions that depend on the seed and the entry's id."""
    if not settings.positions:
        return list(possible[-1:])
    generator = named_generator(settings.seed, id, "positions")
    count = min(settings.positions, len(possible))
    return sorted(generator.choice(np.array(possible, dtype=np.int64), count, replace=False).tolist())


def named_generator(seed: int, *what: Any) -> np.random.Generator:
    """A random generator determined by a seed and names alone, independent of earlier draws."""
    text = ":".join(map(str, (seed, *what)))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def _marker_ids(tokenizer: Any) -> set[int]:
    """Ids of tokens that are not part of the text; the unknown token is part of it."""
    names = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
    found = {getattr(tokenizer, name, None) for name in names}
    return {int(id) for id in found if id is not None and id != tokenizer.unk_token_id}


def _class_of_label(lens: Analyzer, label: str | None) -> int | None:
    """The class index of a label given by name or number; None if unknown."""
    if label is None:
        return None
    classes = target_class_names(lens.loaded)
    named = {name.lower(): index for index, name in classes.items()}
    if label.strip().lower() in named:
        return named[label.strip().lower()]
    return int(label) if label.strip().isdecimal() and int(label) in classes else None


def keep_item_tokens(item: Item, kept: Sequence[int]) -> Item:
    """The item with the model inputs restricted to some tokens; token names are not changed."""
    index = torch.tensor(list(kept), dtype=torch.long)
    return replace(item, tensors={key: value[index] for key, value in item.tensors.items()})
