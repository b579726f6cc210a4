"""One input of a model: its tensors and its tokens; and batches of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normscope.models.loaded import LoadedModel

FEATURES = {"image": "pixel_values", "audio": "input_features"}


@dataclass(frozen=True)
class Tokens:
    """The tokens of one side of the model."""

    names: tuple[str, ...]
    real: Tensor  # (n,): False where masked inside the text
    word_ids: tuple[int | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Item:
    """One input without padding: sequences are (n,), images and sounds as the model takes them."""

    tensors: Mapping[str, Tensor]
    sides: Mapping[str, Tokens]
    grid: tuple[int, int] | None = None  # rows and columns of an image's patches
    virtual: tuple[str, ...] = ()  # keys and values that are no tokens: columns without rows
    warnings: tuple[str, ...] = ()  # what a result of this input must tell

    def __len__(self) -> int:
        return max(len(side) for side in self.sides.values())

    @property
    def kind(self) -> tuple[Any, ...]:
        """What two items must have in common to be in one batch. Positions without a mask tell a model where one text
        of several ends, and padding needs a mask: such items are of one length."""
        alone = "position_ids" in self.tensors and "attention_mask" not in self.tensors
        return tuple(
            (key, tensor.shape if tensor.dim() > 1 or alone else None) for key, tensor in sorted(self.tensors.items())
        )


def collate(items: Sequence[Item], pad: int, device: torch.device) -> dict[str, Tensor]:
    """One batch, padded on the right (positions stay what they are without padding). A mask that nobody gave is made
    only where something is padded: without one a model may make its own."""
    batch = {}
    items = (
        [_masked(item) for item in items] if len({len(i.tensors.get("input_ids", ())) for i in items}) > 1 else items
    )
    for key, first in items[0].tensors.items():  # all items of a batch are of one kind
        given = [item.tensors[key] for item in items]
        if first.dim() == 1:
            longest = max(len(tensor) for tensor in given)
            fill = pad if key.endswith("input_ids") else 0
            given = [torch.nn.functional.pad(tensor, (0, longest - len(tensor)), value=fill) for tensor in given]
        batch[key] = torch.stack(given).to(device)
    return batch


def _masked(item: Item) -> Item:
    ids = item.tensors.get("input_ids")
    if ids is None or "attention_mask" in item.tensors:
        return item
    return replace(item, tensors={**item.tensors, "attention_mask": torch.ones_like(ids)})


def real_tokens(items: Sequence[Item], side: str, device: torch.device) -> Tensor:
    """(items, longest): the tokens of one side that are neither padding nor masked."""
    longest = max(len(item.sides[side]) for item in items)
    masks = [item.sides[side].real for item in items]
    return torch.stack([torch.nn.functional.pad(mask, (0, longest - len(mask))) for mask in masks]).to(device)


def forward_inputs(loaded: LoadedModel, items: Sequence[Item]) -> dict[str, Any]:
    """The arguments of the model's forward pass over a batch."""
    batch: dict[str, Any] = dict(collate(items, loaded.limits.pad, loaded.base.device))
    for key in FEATURES.values():
        if key in batch:
            batch[key] = batch[key].to(loaded.base.dtype)
    if "use_cache" in loaded.limits.keys:  # a cache would keep keys and values for nothing
        batch["use_cache"] = False
    if getattr(loaded.model.config, "return_dict", True) is False:  # tuples have no names
        batch["return_dict"] = True
    return batch


def join(source: Item, target: Item) -> Item:
    """The input of an encoder-decoder from what each side reads."""
    mask = target.tensors.get("attention_mask", torch.ones_like(target.tensors["input_ids"]))
    tensors = dict(source.tensors) | {
        "decoder_input_ids": target.tensors["input_ids"],
        "decoder_attention_mask": mask,
    }
    (tokens,) = target.sides.values()
    return Item(tensors, {**source.sides, "decoder": tokens}, source.grid, warnings=source.warnings + target.warnings)


def names_of(ids: Sequence[int], tokenizer: Any) -> tuple[str, ...]:
    """The tokens of ids; an id that the tokenizer does not know stands for itself."""
    try:
        found = [None] * len(ids) if tokenizer is None else tokenizer.convert_ids_to_tokens(list(ids))
    except (IndexError, KeyError):  # a table that is smaller than the model's
        found = [None] if len(ids) == 1 else [names_of([id], tokenizer)[0] for id in ids]
    return tuple(str(id) if token is None else str(token) for id, token in zip(ids, found, strict=True))
