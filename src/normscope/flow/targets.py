"""The target of a flow: the logit of a class or token, or the difference of two logits."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError, did_you_mean
from normscope.flow.maps import FrozenModel, FrozenPool
from normscope.flow.result import Scores
from normscope.models.loaded import LoadedModel


@dataclass(frozen=True)
class LogitTarget:
    """A logit or the difference of two, as a direction in the logits."""

    row: int
    indices: tuple[int, ...]  # one, or two for their difference
    description: str

    def direction(self, logits: Tensor) -> Tensor:
        """(rows, classes): 1 at the target, -1 at the logit to subtract, 0 elsewhere."""
        made = torch.zeros_like(logits)
        for sign, index in zip((1, -1), self.indices, strict=False):
            made[self.row, index] += sign
        return made

    def value(self, logits: Tensor) -> float:
        """The target as the model computed it."""
        return float((self.direction(logits).double() * logits.double()).sum())


def build_target_scores(target: LogitTarget, logits: Tensor, found: Tensor, remainder: float = nan) -> Scores:
    """The scores of a target; without a remainder, they do not decompose it and their completeness is nan."""
    value, total = target.value(logits), found.double()
    size = max(abs(value), float(total.abs().sum()), 1e-30)
    error = abs(float(total.sum()) + remainder - value) / size
    return Scores(target.description, value, found, remainder, error, contrast=len(target.indices) == 2)


def target_row_of_map(target: LogitTarget, model: FrozenModel, map: Tensor) -> Tensor:
    """(columns,): the row of a map (rows, columns) at the target's token; the mean of the rows that a head pools."""
    real = model.stacks[-1].real
    pool = next((one for one in model.head if isinstance(one, FrozenPool)), None)
    if pool is not None:
        weights = pool.weights.sum(0)[real]
        return (weights / weights.sum()).to(map.device) @ map
    if not bool(real[target.row]):
        raise NormscopeError(
            f"The token at position {target.row} is masked and has no row in the map. Choose another position."
        )
    return map[int(real[: target.row].sum())]


def resolve_target(
    loaded: LoadedModel, model: FrozenModel, tokens: tuple[str, ...], target: Any, position: int | None
) -> LogitTarget:
    """The logit for a target as the user gave it: an index, a label or token, "top", or a tuple of two of these."""
    if model.logits is None:
        others = [name for name in model.outputs if name.endswith("logits")]
        has = f"outputs {' and '.join(others)} instead of logits" if others else "has no head"
        raise NormscopeError(
            f"{type(loaded.model).__name__} {has}, so there is no logit to explain. Load the model with another head, "
            "such as AutoModelForCausalLM or AutoModelForSequenceClassification, or leave the target out."
        )
    row = _target_logit_row(loaded, model.logits, tokens, position)
    wanted = target if isinstance(target, tuple) else (target,)
    if len(wanted) not in (1, 2):
        raise NormscopeError(
            f"A target is one class or token, or a tuple of two for their difference, not {len(wanted)}."
        )
    indices = tuple(_target_logit_index(loaded, model.logits, row, one) for one in wanted)
    if len(indices) == 2 and indices[0] == indices[1]:
        raise NormscopeError("The two targets are the same, so their difference is zero.")
    named = " minus ".join(_target_logit_name(loaded, model.logits, index) for index in indices)
    place = f" at position {row}" if len(model.logits) > 1 else ""
    notes = "".join(f" ({note})" for note in model.notes)
    return LogitTarget(row, indices, f"logit of {named}{notes}{place}")


def _target_logit_row(loaded: LoadedModel, logits: Tensor, tokens: tuple[str, ...], position: Any) -> int:
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
    if mask in tokens:
        return tokens.index(mask)
    raise NormscopeError("This model has logits at every token: pass position=, or mask a token in the text.")


def _target_logit_index(loaded: LoadedModel, logits: Tensor, row: int, target: Any) -> int:
    size = logits.shape[1]
    if isinstance(target, str):
        if target == "top":
            return int(logits[row].argmax())
        return _target_index_of_name(loaded, size, target)
    if isinstance(target, bool) or not isinstance(target, int):
        raise NormscopeError(f"A target is an index, a label or a token, not {type(target).__name__} {target!r}.")
    if not -size <= target < size:
        raise NormscopeError(f"There is no logit {target}: valid are 0 to {size - 1}.")
    return target % size


def _target_index_of_name(loaded: LoadedModel, size: int, target: str) -> int:
    if not _target_has_vocabulary_logits(loaded, size):
        labels = {name.lower(): index for index, name in target_class_names(loaded).items()}
        if target.lower() not in labels and target.isdecimal() and int(target) < size:
            return int(target)
        if target.lower() not in labels:
            raise NormscopeError(
                f"There is no class {target!r}.{did_you_mean(target, labels)} Known: {', '.join(labels)}."
            )
        return labels[target.lower()]
    if loaded.tokenizer is None:
        raise NormscopeError("This model has no tokenizer: pass the target as a token id.")
    vocabulary = loaded.tokenizer.get_vocab()
    # A language model predicts words in running text: prefer the form that marks the start of a word.
    for form in (f"\u2581{target.strip()}", f"\u0120{target.strip()}", target, target.strip()):
        if form in vocabulary:
            return int(vocabulary[form])
    pieces = loaded.tokenizer.tokenize(target)
    if not pieces or loaded.tokenizer.unk_token in pieces:
        raise NormscopeError(f"{target!r} is not in the vocabulary.")
    raise NormscopeError(f"{target!r} is split into {pieces}; pass one of these tokens.")


def _target_has_vocabulary_logits(loaded: LoadedModel, size: int) -> bool:
    return size >= int(getattr(loaded.model.config, "vocab_size", 2**62))


def target_class_names(loaded: LoadedModel) -> dict[int, str]:
    """The names of a classifier's classes by index, from the config."""
    found: Any = loaded.model.config.id2label or {}
    return {int(index): str(name) for index, name in found.items()}


def _target_logit_name(loaded: LoadedModel, logits: Tensor, index: int) -> str:
    if _target_has_vocabulary_logits(loaded, logits.shape[1]):
        token = loaded.tokenizer.convert_ids_to_tokens(index) if loaded.tokenizer is not None else index
        return repr(token)
    return repr(target_class_names(loaded).get(index, index))
