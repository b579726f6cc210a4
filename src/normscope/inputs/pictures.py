"""Texts with pictures: a processor's encoding of them, and the tokens that stand for each picture."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.inputs.item import IGNORED_KEYS, Item, PatchGrid, PictureTokens, Sources, Tokens
from normscope.inputs.marked_text import REST
from normscope.inputs.media import as_media_image
from normscope.inputs.picture_grids import PictureEncoding, adjacent_runs, picture_layouts
from normscope.models.loaded import TEXT_KEYS, LoadedModel, picture_token_id

PIXELS = "pixel_values"
WRITTEN_TYPES = {"paligemma": 1}  # by model type: tokens of type 0 are a prefix, whose tokens all see one another
VIDEO = re.compile(r".*\.(mp4|mov|avi|mkv|webm|mpe?g|m4v)", re.IGNORECASE)
# What processors return for others than the model.
FURTHER_KEYS = frozenset(("text_replacement_offsets", "num_patches", "num_crops", "batch_num_images", "rows", "cols"))


@dataclass(frozen=True)
class PicturePrompt:
    """A text with a placeholder for each of its pictures; the special tokens of a conversation are in its text."""

    text: Any
    images: Any
    special: bool = True  # whether the tokenizer adds special tokens


@dataclass(frozen=True)
class PictureText:
    """A text with pictures as its model reads it."""

    tokens: Mapping[str, Any]  # input_ids and what belongs to each token
    media: Mapping[str, Tensor]
    sizes: tuple[tuple[int, int], ...] | None  # (height, width) of the pictures; None if unknown
    replaced: tuple[tuple[int, int, int], ...] = ()  # placeholders: begin and end in the given text, length they got
    encoding: Any = None  # the tokenizer's, of the same tokens, with words and characters; None if it has none


def holds_pictures(given: Any) -> bool:
    """Whether an input is a text with pictures, or an encoding of one."""
    if isinstance(given, PicturePrompt):
        return True
    return isinstance(given, Mapping) and ("images" in given or "videos" in given or PIXELS in given)


def refuse_pictures(given: Mapping[str, Any] | PicturePrompt) -> NoReturn:
    """Raise the error for pictures that a model of text was given."""
    keys = ("images",) if isinstance(given, PicturePrompt) else given
    what = next(key for key in ("images", "videos", PIXELS) if key in keys)
    raise NormscopeError(
        f"This model reads text, but the input has {what}, which are for vision models. Pass the text alone."
    )


def read_picture_text(loaded: LoadedModel, given: Mapping[str, Any] | PicturePrompt) -> PictureText:
    """A dict with text and images, or a processor's encoding of them, checked against the model."""
    if picture_token_id(loaded.base) is None or PIXELS not in loaded.limits.keys:
        refuse_pictures(given)
    if isinstance(given, PicturePrompt):
        return _process(loaded, given)
    if any(key.startswith("videos") or "_videos" in key or key == "video_grid_thw" for key in map(str, given)):
        raise NormscopeError("Videos are not read. Pass some of their frames as images, with a placeholder for each.")
    if PIXELS in given:
        return _split_encoding(loaded, given)
    unknown = set(given) - {"text", "images"}
    if unknown:
        raise NormscopeError(f"Unknown keys beside text and images: {', '.join(sorted(map(str, unknown)))}.")
    return _process(loaded, PicturePrompt(given.get("text"), given.get("images")))


def add_pictures(loaded: LoadedModel, item: Item, read: PictureText) -> Item:
    """The item of a text with its pictures, and names for their tokens that say where they lie."""
    (side, tokens), *_ = item.sides.items()
    marked = item.tensors["input_ids"].eq(picture_token_id(loaded.base) or 0)
    runs = adjacent_runs(marked)
    if not runs:
        raise NormscopeError("The text has no place for its pictures: no token of the encoding stands for one.")
    before = tuple(tokens.names[begin - 1] if begin else "" for begin, _ in runs)
    known = PictureEncoding(
        loaded.base.config, read.media, tuple(end - begin for begin, end in runs), before, read.sizes
    )
    pictures = _locate_pictures(known, marked.nonzero().flatten(), runs)
    names = list(tokens.names)
    for one in pictures:
        for number, n in enumerate(one.positions, 1):
            names[n] = f"{one.name} line end" if one.grids else f"{one.name} {number}"
        for grid in one.grids:
            prefix = f"{one.name} {grid.name}".strip()
            for row, line in enumerate(grid.positions.tolist()):
                for column, n in enumerate(line):
                    names[n] = f"{prefix} {row + 1},{column + 1}"
    words = tokens.word_ids if read.encoding is None else tuple(read.encoding.word_ids())
    if words is not None:
        words = tuple(None if seen else word for word, seen in zip(words, marked.tolist(), strict=True))
    named = replace(tokens, names=tuple(names), word_ids=words, spans=_given_spans(read, tokens, marked))
    written = WRITTEN_TYPES.get(loaded.base.config.model_type, 0)
    return replace(item, sides={**item.sides, side: named}, media=read.media, pictures=pictures, written_type=written)


def _given_spans(read: PictureText, tokens: Tokens, marked: Tensor) -> tuple[tuple[int, int] | None, ...] | None:
    """The characters of each token in the text as it was given, with a placeholder for each picture; None for tokens of
    pictures, and those that the processor added."""
    if read.encoding is None:
        return tokens.spans
    offsets = zip(read.encoding.offsets, read.encoding.sequence_ids, marked.tolist(), strict=True)
    found: list[tuple[int, int] | None] = []
    for (begin, end), sequence, seen in offsets:
        moved, inside = 0, False
        for start, stop, length in read.replaced:
            at = start + moved
            inside |= at <= begin < at + length
            if begin >= at + length:
                moved += length - (stop - start)
        found.append(None if sequence is None or seen or inside else (begin - moved, end - moved))
    return tuple(found)


def _locate_pictures(
    known: PictureEncoding, places: Tensor, runs: Sequence[tuple[int, int]]
) -> tuple[PictureTokens, ...]:
    """The tokens of every picture, with their grids. If these are not known, a run of tokens is a picture."""
    layouts = picture_layouts(known)
    if not layouts:
        single = len(runs) == 1
        return tuple(
            PictureTokens("image" if single else f"image {n}", tuple(range(*run)), ()) for n, run in enumerate(runs, 1)
        )
    found, at = [], 0
    for number, layout in enumerate(layouts, 1):
        own = places[at : at + layout.count]
        grids = tuple(PatchGrid(name, own[index]) for name, index in layout.grids)
        name = "image" if len(layouts) == 1 else f"image {number}"
        found.append(PictureTokens(name, tuple(own.tolist()), grids))
        at += layout.count
    return tuple(found)


def _split_encoding(loaded: LoadedModel, given: Mapping[str, Any]) -> PictureText:
    """An encoding as tokens and pictures."""
    given = {key: value for key, value in given.items() if value is not None}
    tokens, media = {}, {}
    for key, value in given.items():
        if key in TEXT_KEYS or (key in IGNORED_KEYS and key not in loaded.limits.keys):
            tokens[key] = value
        elif key in loaded.limits.keys:
            media[key] = _as_media_tensor(key, value)
        elif key not in FURTHER_KEYS:
            raise NormscopeError(
                f"{type(loaded.base).__name__} takes no {key}: the encoding was made by the processor of another "
                "model. Use AutoProcessor.from_pretrained(...) of the same checkpoint."
            )
    if "input_ids" not in tokens:
        raise NormscopeError("The encoding has pictures but no input_ids: pass text and images to the processor.")
    ids = torch.as_tensor(tokens["input_ids"])
    if ids.dim() == 2 and len(ids) != 1:
        raise NormscopeError(
            f"The encoding has {len(ids)} texts with pictures. Pass one text with its pictures at a time."
        )
    return PictureText(tokens, media, None)


def _as_media_tensor(key: str, value: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NormscopeError(f"{key} must be an array of numbers, not {type(value).__name__}.") from error
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise NormscopeError(f"{key} contains NaN or infinite values.")
    return tensor


def _process(loaded: LoadedModel, given: PicturePrompt) -> PictureText:
    """A text and its pictures, encoded by the model's processor."""
    text, processor = given.text, loaded.processor
    if not isinstance(text, str) or not text.strip():
        raise NormscopeError('Pass pictures with a text: {"text": "...", "images": [...]}.')
    if processor is None or not hasattr(processor, "image_processor"):
        raise NormscopeError(
            "This Analyzer has no processor, so pictures cannot be encoded. Create it with "
            "AutoProcessor.from_pretrained(...) in place of the tokenizer, or pass the encoding of a processor."
        )
    images = as_pictures(given.images)
    _check_placeholders(processor, text, len(images))
    options: dict[str, Any] = {} if given.special else {"add_special_tokens": False}
    try:
        encoding = dict(
            processor(text=[text], images=images, return_tensors="pt", return_text_replacement_offsets=True, **options)
        )
    except Exception as error:  # processors may raise anything
        raise NormscopeError(f"The processor rejected the text with its pictures: {error}") from error
    moves = encoding.pop("text_replacement_offsets", None)
    read = _split_encoding(loaded, encoding)
    sizes = tuple(_picture_size(one) for one in images)
    replaced = [] if not moves else [(*one["span"], one["replacement"]) for one in moves[0]]
    found = replace(read, sizes=sizes, replaced=tuple((begin, end, len(new)) for begin, end, new in replaced))
    whole, last = "", 0
    for begin, end, new in replaced:
        whole += text[last:begin] + new
        last = end
    return replace(found, encoding=_same_encoding(loaded, whole + text[last:], options, read.tokens["input_ids"]))


def _same_encoding(loaded: LoadedModel, text: str, options: Mapping[str, Any], ids: Any) -> Any:
    """The tokenizer's own encoding of the text that the processor made, with words and characters; None if it has other
    tokens, or the tokenizer is slow."""
    found = loaded.tokenizer(text, **options)
    encodings = getattr(found, "encodings", None)
    if not encodings or list(found["input_ids"]) != torch.as_tensor(ids).flatten().tolist():
        return None
    return _Words(found, encodings[0])


class _Words:
    """The words and characters of an encoding."""

    def __init__(self, whole: Any, first: Any) -> None:
        self.word_ids, self.offsets, self.sequence_ids = whole.word_ids, first.offsets, first.sequence_ids


def _check_placeholders(processor: Any, text: str, images: int) -> None:
    token = getattr(processor, "image_token", None)
    if token is None:
        return
    count = text.count(token)
    if count != images and (count or type(processor).__name__ != "PaliGemmaProcessor"):  # which puts them first itself
        raise NormscopeError(
            f"The text has {count} places for pictures ({token}), but {images} pictures were given. Write {token} once "
            "where each picture goes, or pass a conversation as chat=[...] with contents of the type image."
        )


def as_pictures(given: Any) -> list[Any]:
    """Pictures as RGB images: one or several paths, PIL images or arrays."""
    many = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not many or given is None:
        raise NormscopeError("images is empty. Pass at least one picture, or the text alone.")
    for one in many:
        if isinstance(one, str | os.PathLike) and VIDEO.fullmatch(str(one)):
            raise NormscopeError(f"{one} is a video. Pass some of its frames as images, with a placeholder for each.")
    return [as_media_image(one) for one in many]


def _picture_size(image: Any) -> tuple[int, int]:
    """(height, width) of a PIL image or an array (height, width, channels)."""
    if hasattr(image, "convert"):
        width, height = image.size
        return height, width
    height, width = image.shape[:2]
    return int(height), int(width)


def chat_pictures(chat: Any) -> list[Any]:
    """The pictures in the messages of a conversation, in order."""
    found: list[Any] = []
    for turn in chat if isinstance(chat, Sequence) else ():
        content = turn.get("content") if isinstance(turn, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "video":
                raise NormscopeError("Videos are not read. Pass some of their frames as parts of the type image.")
            if kind in ("image", "image_url"):
                given = next((part[key] for key in ("image", "path", "url") if part.get(key) is not None), None)
                if given is None:
                    raise NormscopeError('A part of the type image needs its picture: {"type": "image", "image": ...}.')
                found.append(given)
    return found


def picture_sources(item: Item, sources: Sources | None, side: str) -> Sources:
    """The sources of an item with each picture as one more; a token of a picture belongs to it alone. Without sources,
    pictures are the only ones."""
    names = () if sources is None else sources.names
    start = torch.full((len(item.sides[side].names),), -1) if sources is None else sources.index[side].clone()
    for number, one in enumerate(item.pictures):
        if one.name in names or one.name == REST:
            raise NormscopeError(f"{one.name!r} is the name of a picture. Choose another name for that source.")
        start[list(one.positions)] = len(names) + number
    others = {} if sources is None else dict(sources.index)
    return Sources((*names, *(one.name for one in item.pictures)), {**others, side: start})
