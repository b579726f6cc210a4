"""What a flow leads to: a logit of a class or token, or the difference of two."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError, did_you_mean
from normscope.flow.freeze import FrozenModel
from normscope.flow.frozen import FrozenPool
from normscope.flow.result import Scores
from normscope.models.loaded import LoadedModel


@dataclass(frozen=True)
class Aim:
    """A direction in the logits."""

    row: int
    indices: tuple[int, ...]  # one, or two whose difference it is
    words: str

    def direction(self, logits: Tensor) -> Tensor:
        made = torch.zeros_like(logits)
        for sign, index in zip((1, -1), self.indices, strict=False):
            made[self.row, index] += sign
        return made

    def value(self, logits: Tensor) -> float:
        return float((self.direction(logits).double() * logits.double()).sum())


def scored(aim: Aim, logits: Tensor, found: Tensor, remainder: float = nan) -> Scores:
    """The scores that a method found for a target; without a remainder they are no decomposition of it."""
    value, total = aim.value(logits), found.double()
    size = max(abs(value), float(total.abs().sum()), 1e-30)
    error = abs(float(total.sum()) + remainder - value) / size
    return Scores(aim.words, value, found, remainder, error, contrast=len(aim.indices) == 2)


def row_of(aim: Aim, model: FrozenModel, map: Tensor) -> Tensor:
    """(columns,): the row of a map (rows, columns) at the token that the target is read from, or their mean where a
    head pools several."""
    real = model.stacks[-1].real
    pool = next((one for one in model.head if isinstance(one, FrozenPool)), None)
    if pool is not None:
        weights = pool.weights.sum(0)[real]
        return (weights / weights.sum()).to(map.device) @ map
    if not bool(real[aim.row]):
        raise NormscopeError(f"The token at position {aim.row} is masked: it has no row in a map.")
    return map[int(real[: aim.row].sum())]


def aim(loaded: LoadedModel, model: FrozenModel, names: tuple[str, ...], target: Any, position: int | None) -> Aim:
    """The target as given, checked: an index, a label or token, "top", or two of these to be told apart."""
    if model.logits is None:
        others = [name for name in model.outputs if name.endswith("logits")]
        has = f"has no head for one logit, but {' and '.join(others)}" if others else "has no head"
        raise NormscopeError(
            f"{type(loaded.model).__name__} {has}, so there is no logit to explain. Load the model with another head, "
            "such as AutoModelForCausalLM or AutoModelForSequenceClassification, or leave the target out."
        )
    row = _row(loaded, model.logits, names, position)
    wanted = target if isinstance(target, tuple) else (target,)
    if len(wanted) not in (1, 2):
        raise NormscopeError(f"A target is one class or token, or two to be told apart, not {len(wanted)}.")
    indices = tuple(_index(loaded, model.logits, row, one) for one in wanted)
    if len(indices) == 2 and indices[0] == indices[1]:
        raise NormscopeError("The two targets are the same: their difference is nothing.")
    named = " minus ".join(_named(loaded, model.logits, index) for index in indices)
    place = f" at position {row}" if len(model.logits) > 1 else ""
    notes = "".join(f" ({note})" for note in model.notes)
    return Aim(row, indices, f"logit of {named}{notes}{place}")


def _row(loaded: LoadedModel, logits: Tensor, names: tuple[str, ...], position: Any) -> int:
    size = len(logits)
    if position is not None:
        if isinstance(position, bool) or not isinstance(position, int):
            raise NormscopeError(f"A position is an integer, not {type(position).__name__} {position!r}.")
        if not -size <= position < size:
            raise NormscopeError(
                f"There is no position {position} in the logits: valid are 0 to {size - 1} (or -{size} to -1)."
            )
        return position % size
    if size == 1 or loaded.stacks[-1].side == "decoder":
        return size - 1
    mask = getattr(loaded.tokenizer, "mask_token", None)
    if mask in names:
        return names.index(mask)
    raise NormscopeError("This model has logits at every token: say at which, position=, or mask one in the text.")


def _index(loaded: LoadedModel, logits: Tensor, row: int, target: Any) -> int:
    size = logits.shape[1]
    if isinstance(target, str):
        if target == "top":
            return int(logits[row].argmax())
        return _named_index(loaded, size, target)
    if isinstance(target, bool) or not isinstance(target, int):
        raise NormscopeError(f"A target is an index, a label or a token, not {type(target).__name__} {target!r}.")
    if not -size <= target < size:
        raise NormscopeError(f"There is no logit {target}: valid are 0 to {size - 1}.")
    return target % size


def _named_index(loaded: LoadedModel, size: int, target: str) -> int:
    if not _is_language_model(loaded, size):
        labels = {name.lower(): index for index, name in classes_of(loaded).items()}
        if target.lower() not in labels and target.isdecimal() and int(target) < size:
            return int(target)
        if target.lower() not in labels:
            raise NormscopeError(
                f"There is no class {target!r}.{did_you_mean(target, labels)} Known: {', '.join(labels)}."
            )
        return labels[target.lower()]
    if loaded.tokenizer is None:
        raise NormscopeError("This LoadedModel has no tokenizer: give the target as a token's id.")
    vocabulary = loaded.tokenizer.get_vocab()
    # A word in running text is what a language model predicts: with the mark of a word's start where there is one.
    for form in (f"\u2581{target.strip()}", f"\u0120{target.strip()}", target, target.strip()):
        if form in vocabulary:
            return int(vocabulary[form])
    pieces = loaded.tokenizer.tokenize(target)
    if not pieces or loaded.tokenizer.unk_token in pieces:
        raise NormscopeError(f"{target!r} is not in the vocabulary.")
    raise NormscopeError(f"{target!r} is no single token here, but {pieces}: choose one of them.")


def _is_language_model(loaded: LoadedModel, size: int) -> bool:
    return size >= int(getattr(loaded.model.config, "vocab_size", 2**62))


def classes_of(loaded: LoadedModel) -> dict[int, str]:
    """The classes by index, as the config names them."""
    found: Any = loaded.model.config.id2label or {}
    return {int(index): str(name) for index, name in found.items()}


def _named(loaded: LoadedModel, logits: Tensor, index: int) -> str:
    if _is_language_model(loaded, logits.shape[1]):
        token = loaded.tokenizer.convert_ids_to_tokens(index) if loaded.tokenizer is not None else index
        return repr(token)
    return repr(classes_of(loaded).get(index, index))
