"""One input of a model: its tensors and its tokens; and batches of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.models.loaded import Limits

# Keys of an encoding that say nothing new.
IGNORED = {"special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length", "labels", "word_ids"}


@dataclass(frozen=True)
class Tokens:
    """The tokens of one side of the model."""

    names: tuple[str, ...]
    real: Tensor  # (n,): False where masked inside the text
    word_ids: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Item:
    """One input without padding: sequences are (n,), images and sounds as the model takes them."""

    tensors: Mapping[str, Tensor]
    sides: Mapping[str, Tokens]
    grid: tuple[int, int] | None = None  # rows and columns of an image's patches
    virtual: tuple[str, ...] = ()  # keys and values that are no tokens: columns without rows
    warnings: tuple[str, ...] = ()  # what a result of this input must tell

    def __len__(self) -> int:
        return max(len(side.names) for side in self.sides.values())

    @property
    def kind(self) -> tuple[Any, ...]:
        """What two items must have in common to be in one batch. Positions without a mask tell a model where one text
        of several ends, and padding needs a mask: such items are of one length."""
        alone = "position_ids" in self.tensors and "attention_mask" not in self.tensors
        return tuple(
            (key, tensor.shape if tensor.dim() > 1 or alone else None) for key, tensor in sorted(self.tensors.items())
        )


def join_source_and_target(source: Item, target: Item) -> Item:
    """The input of an encoder-decoder from what each side reads."""
    mask = target.tensors.get("attention_mask", torch.ones_like(target.tensors["input_ids"]))
    tensors = dict(source.tensors) | {
        "decoder_input_ids": target.tensors["input_ids"],
        "decoder_attention_mask": mask,
    }
    (tokens,) = target.sides.values()
    return Item(tensors, {**source.sides, "decoder": tokens}, source.grid, warnings=source.warnings + target.warnings)


def check_length(length: int, limits: Limits, what: str, ways_out: str) -> tuple[str, ...]:
    """Refuse what is longer than the model's table of positions; where they are computed, the warning to give."""
    if limits.positions is None or length <= limits.positions:
        return ()
    if not limits.computed:
        raise NormscopeError(
            f"{what} has {length} tokens, but the model has positions for {limits.positions}. {ways_out}"
        )
    return (
        f"{what} has {length} tokens, more than the {limits.positions} that the model was made for. Its positions are "
        "computed, so it is analysed as it is, but the model may not work well at this length.",
    )


def token_names(ids: Sequence[int], tokenizer: Any) -> tuple[str, ...]:
    """The tokens of ids; an id that the tokenizer does not know stands for itself."""
    try:
        found = [None] * len(ids) if tokenizer is None else tokenizer.convert_ids_to_tokens(list(ids))
    except (IndexError, KeyError):  # a table that is smaller than the model's
        found = [None] if len(ids) == 1 else [token_names([id], tokenizer)[0] for id in ids]
    return tuple(str(id) if token is None else str(token) for id, token in zip(ids, found, strict=True))
