"""`Item`: one input of a model, with its tensors and tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.models.loaded import Limits

# Keys of an encoding that the model does not need.
IGNORED_KEYS = {"special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length", "labels", "word_ids"}


ANSWER = "(answer)"  # the source of generated tokens, and of the target text of an encoder-decoder


@dataclass(frozen=True)
class Tokens:
    """The tokens of one side of the model."""

    names: tuple[str, ...]
    real: Tensor  # (n,): False for masked tokens
    word_ids: tuple[int | None, ...] | None = None
    spans: tuple[tuple[int, int] | None, ...] | None = None  # characters of the text; None for special tokens
    generated: int = 0  # the number of tokens at the end that the model generated


@dataclass(frozen=True)
class Sources:
    """The sources of an input, and the source of each of its tokens."""

    names: tuple[str, ...]
    index: Mapping[str, Tensor]  # side -> (n,): the source of each token, as an index into names; -1: the rest

    def columns(self, places: Iterable[tuple[str, int]]) -> Tensor:
        """The source of each column, as an index into `names` (-1: the rest), given as (side, position) pairs. Columns
        without a token, such as virtual ones, are in the rest."""
        found = [int(self.index[side][position]) if side in self.index else -1 for side, position in places]
        return torch.tensor(found, dtype=torch.long)

    def with_answer(self, side: str, written: Sequence[bool]) -> Sources:
        """The sources with tokens added at the end of a side; those that are `written` are the answer, the others, such
        as an end token, the rest."""
        names = self.names if ANSWER in self.names else (*self.names, ANSWER)
        answer = names.index(ANSWER)
        added = torch.tensor([answer if one else -1 for one in written], dtype=torch.long)
        return Sources(names, {**self.index, side: torch.cat([self.index[side], added])})


@dataclass(frozen=True, eq=False)
class PatchGrid:
    """Tokens that lie on a grid over a picture."""

    name: str  # "", or "overview" of the whole picture beside a grid of its details
    positions: Tensor  # (down, across): the position of each token on its side


@dataclass(frozen=True, eq=False)
class PictureTokens:
    """The tokens of one picture of the input."""

    name: str  # "image", or "image 1" of several
    positions: tuple[int, ...]  # on the side that reads them, tokens such as line ends included
    grids: tuple[PatchGrid, ...]  # the finest first; none if the place of its tokens is not known


@dataclass(frozen=True)
class Item:
    """One input without padding: sequences have shape (n,), images and audio features that of the model's input."""

    tensors: Mapping[str, Tensor]
    sides: Mapping[str, Tokens]
    grid: tuple[int, int] | None = None  # rows and columns of image patches
    virtual: tuple[str, ...] = ()  # names of virtual keys and values: columns without rows
    warnings: tuple[str, ...] = ()  # warnings that go into the result
    sources: Sources | None = None  # groups of tokens, if asked for
    media: Mapping[str, Tensor] = field(default_factory=dict)  # pictures beside a text, with the axis of the batch
    pictures: tuple[PictureTokens, ...] = ()  # the tokens that stand for them
    written_type: int = 0  # beside pictures, the token type of what the model writes

    def __len__(self) -> int:
        return max(len(side.names) for side in self.sides.values())

    @property
    def kind(self) -> tuple[Any, ...]:
        """Only items of equal kind fit into one batch. Position ids without a mask separate packed texts, and padding
        would need a mask, so such items must have equal lengths. Waveforms are not padded either, and a text with
        pictures is alone."""
        fixed_length = "position_ids" in self.tensors and "attention_mask" not in self.tensors
        shapes = (
            (key, tensor.shape if tensor.dim() > 1 or fixed_length or tensor.is_floating_point() else None)
            for key, tensor in sorted(self.tensors.items())
        )
        return *shapes, self.sources is not None, id(self) if self.media else None


def describe_pictures(item: Item) -> dict[str, Any]:
    """The pictures beside a text for the info of a result: names, and the positions of their tokens, on grids (name,
    rows of positions) too."""
    described = [
        {
            "name": one.name,
            "positions": list(one.positions),
            "grids": [[grid.name, grid.positions.tolist()] for grid in one.grids],
        }
        for one in item.pictures
    ]
    return {"pictures": described}


def join_source_and_target(source: Item, target: Item) -> Item:
    """Combine the encoder and decoder inputs of an encoder-decoder."""
    mask = target.tensors.get("attention_mask", torch.ones_like(target.tensors["input_ids"]))
    tensors = dict(source.tensors) | {
        "decoder_input_ids": target.tensors["input_ids"],
        "decoder_attention_mask": mask,
    }
    (tokens,) = target.sides.values()
    return Item(tensors, {**source.sides, "decoder": tokens}, source.grid, warnings=source.warnings + target.warnings)


def check_length(length: int, limits: Limits, what: str, advice: str) -> tuple[str, ...]:
    """Raise an error if an input exceeds the position table; if positions are computed, return a warning instead."""
    if limits.positions is None or length <= limits.positions:
        return ()
    if not limits.computed:
        raise NormscopeError(
            f"{what} has {length} tokens, but the model has positions for {limits.positions}. {advice}"
        )
    return (
        f"{what} has {length} tokens, more than the {limits.positions} that the model was made for. Its positions are "
        "computed, so the input can be analysed, but the model may not work well at this length.",
    )


def token_names(ids: Sequence[int], tokenizer: Any) -> tuple[str, ...]:
    """The tokens of ids; an id that the tokenizer does not know becomes its number."""
    try:
        found = [None] * len(ids) if tokenizer is None else tokenizer.convert_ids_to_tokens(list(ids))
    except (IndexError, KeyError):  # a vocabulary smaller than the model's
        found = [None] if len(ids) == 1 else [token_names([id], tokenizer)[0] for id in ids]
    return tuple(str(id) if token is None else str(token) for id, token in zip(ids, found, strict=True))
