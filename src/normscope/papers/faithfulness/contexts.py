"""What is predicted from what: a class from a text, the next token from those before it, a masked one from the rest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError
from normscope.flow.targets import classes_of
from normscope.inputs.item import Item, Tokens
from normscope.papers.faithfulness.settings import Settings

Task = Literal["class", "next", "masked"]
FEWEST = 3  # tokens that can be taken away, below which there is nothing to rank


@dataclass(frozen=True)
class Context:
    """One prediction. `given` is the right answer, if it is known."""

    item: Item
    position: int | None  # where a language model's logits are read; None: there is one row of them
    removable: tuple[int, ...]  # tokens that may be taken away: all but special ones and the masked one itself
    given: int | None


def prediction_task(lens: Analyzer) -> Task:
    """What a model predicts; models that predict neither classes nor tokens are refused."""
    kind = type(lens.model).__name__
    if lens.two_sided or lens.family.input != "text":
        raise NormscopeError(f"Faithfulness is measured on models with one side that read text, not on {kind}.")
    if lens.tokenizer is None:
        raise NormscopeError("Faithfulness takes tokens out of texts: give the model with its tokenizer.")
    if kind.endswith("ForSequenceClassification"):
        if int(getattr(lens.model.config, "num_labels", 2)) < 2:
            raise NormscopeError(f"{kind} here has one output, a number: there is no probability that could fall.")
        return "class"
    if lens.model is lens.loaded.base or lens.model.get_output_embeddings() is None:
        raise NormscopeError(
            f"{kind} has no head that predicts a class or a token. Load the model with one, such as "
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
        raise NormscopeError(f"The text is too short: there must be {FEWEST} tokens to take away and one to predict.")
    if settings.target == "given" and any(one.given is None for one in found):
        raise NormscopeError("The target is the given label, but this entry has none that the model knows.")
    return found


def _next_context(lens: Analyzer, item: Item, removable: Sequence[int], at: int) -> Context:
    """The token after position `at`, from all up to it."""
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
    """The token at a position that is masked, from all others."""
    (side,) = item.sides
    tokens = item.sides[side]
    ids = item.tensors["input_ids"].clone()
    given = int(ids[at])
    ids[at] = lens.tokenizer.mask_token_id
    names = (*tokens.names[:at], str(lens.tokenizer.mask_token), *tokens.names[at + 1 :])
    changed = replace(
        item,
        tensors={**item.tensors, "input_ids": ids},
        sides={side: Tokens(names, tokens.real, tokens.word_ids)},
    )
    return Context(changed, at, tuple(n for n in removable if n != at), given)


def _choose_positions(possible: Sequence[int], id: str, settings: Settings) -> list[int]:
    """The last position, or some drawn at random from the seed and the entry's id."""
    if not settings.positions:
        return list(possible[-1:])
    generator = named_generator(settings.seed, id, "positions")
    count = min(settings.positions, len(possible))
    return sorted(generator.choice(np.array(possible, dtype=np.int64), count, replace=False).tolist())


def named_generator(seed: int, *what: Any) -> np.random.Generator:
    """Random numbers that depend on a seed and on names alone, not on earlier draws."""
    text = ":".join(map(str, (seed, *what)))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def _marker_ids(tokenizer: Any) -> set[int]:
    """Tokens that do not belong to the text of an input; an unknown word does."""
    names = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id")
    found = {getattr(tokenizer, name, None) for name in names}
    return {int(id) for id in found if id is not None and id != tokenizer.unk_token_id}


def _class_of_label(lens: Analyzer, label: str | None) -> int | None:
    """The class of a label, by name or number; None if there is none."""
    if label is None:
        return None
    classes = classes_of(lens.loaded)
    named = {name.lower(): index for index, name in classes.items()}
    if label.strip().lower() in named:
        return named[label.strip().lower()]
    return int(label) if label.strip().isdecimal() and int(label) in classes else None


def keep_tokens(item: Item, kept: Sequence[int]) -> Item:
    """The item with only some of its tokens, for the model; their names stay as they were."""
    index = torch.tensor(list(kept), dtype=torch.long)
    return replace(item, tensors={key: value[index] for key, value in item.tensors.items()})
