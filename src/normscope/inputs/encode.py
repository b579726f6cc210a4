"""What a model is given, as items: text, pairs, encodings, pictures, sounds; of an encoder-decoder with its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from normscope.errors import NormscopeError
from normscope.inputs import generation, media, text
from normscope.inputs.item import Item, Tokens, join
from normscope.models.loaded import LoadedModel
from normscope.models.soft_prompts import SoftPrompt


def encode(loaded: LoadedModel, given: Any, truncation: bool = False, generate: int | None = None) -> list[Item]:
    """One input as items, the target of an encoder-decoder and virtual tokens included."""
    prompt = loaded.prompt
    if prompt is not None and generate is not None:
        raise NormscopeError("A model with a soft prompt is not continued here: give the whole text.")
    return [_with_prompt(item, prompt) for item in _items(loaded, given, truncation, generate)]


def _items(loaded: LoadedModel, given: Any, truncation: bool, generate: int | None) -> list[Item]:
    if loaded.family.input == "image":
        if generate is not None:
            raise NormscopeError(f"{loaded.family.name} is a vision model: it generates no text.")
        return media.image_item(given, loaded.tokenizer, loaded.base)
    if loaded.two_sided:
        return _pairs(loaded, given, truncation, generate)
    _refuse_picture(given)
    items = text.encode_text(given, loaded.tokenizer, loaded.limits, truncation)
    if generate is not None:
        return [
            generation.continue_text(loaded.model, loaded.tokenizer, item, generate, loaded.limits) for item in items
        ]
    return items


def _pairs(loaded: LoadedModel, given: Any, truncation: bool, generate: int | None) -> list[Item]:
    """Source and target: a pair, a dict with decoder_input_ids, or a source that the model itself goes on from."""
    target: Any = None
    if isinstance(given, Mapping):
        target = {key.removeprefix("decoder_"): given[key] for key in text.DECODER if given.get(key) is not None}
        source: Any = {key: value for key, value in given.items() if key not in text.DECODER}
        target = target or None
    elif isinstance(given, tuple) and len(given) == 2:
        source, target = given
    else:
        source = given
    if target is not None and generate is not None:
        raise NormscopeError("Give either text_target or generate, the most tokens that the model may write itself.")
    if isinstance(source, Mapping) and any(key in source for key in text.DECODER):
        raise NormscopeError("The target text is given twice, as decoder_input_ids and as text_target.")
    if isinstance(target, Mapping) and target.get("input_ids") is None:
        raise NormscopeError("The encoding has a decoder_attention_mask, but no decoder_input_ids.")
    if loaded.family.input == "audio":
        if not isinstance(source, Mapping):
            raise NormscopeError(
                f"{loaded.family.name} listens: give a dict with input_features, made by its feature extractor, not "
                f"{type(source).__name__}."
            )
        sources = media.sound_items(source, loaded.base.config)
    else:
        _refuse_picture(source)
        sources = text.encode_text(source, loaded.tokenizer, loaded.limits, truncation)
    if target is None:
        loaded.refuse_prompt("A target of the model's own")
        return [
            join(one, generation.answer(loaded.model, loaded.tokenizer, one, generate, loaded.target_limits))
            for one in sources
        ]
    if isinstance(target, Mapping):
        targets = text.encode_text(target, loaded.tokenizer, loaded.target_limits, truncation)
    else:
        targets = [
            generation.force_target(loaded.model, loaded.tokenizer, target, loaded.target_limits, truncation)
            for _ in sources
        ]
    if len(targets) != len(sources):
        raise NormscopeError(f"There are {len(sources)} sources, but {len(targets)} targets.")
    return [join(one, other) for one, other in zip(sources, targets, strict=True)]


def _refuse_picture(given: Any) -> None:
    if hasattr(given, "convert") or (hasattr(given, "shape") and not isinstance(given, Mapping)):
        raise NormscopeError(f"This model reads text, not {type(given).__name__}: give it a text or an encoding.")
    if isinstance(given, Mapping) and "pixel_values" in given:
        raise NormscopeError("This model reads text: an encoding with pixel_values is for a vision model.")


def _with_prompt(item: Item, prompt: SoftPrompt | None) -> Item:
    """The item with the virtual tokens among its tokens, or noted as columns of their own."""
    if prompt is None:
        return item
    if prompt.kind == "keys":
        return replace(item, virtual=prompt.names)
    side, tokens = next(iter(item.sides.items()))  # of an encoder-decoder the encoder's
    real = torch.cat([torch.ones(prompt.count, dtype=torch.bool), tokens.real])
    words = None if tokens.word_ids is None else (None,) * prompt.count + tokens.word_ids
    return replace(item, sides={**item.sides, side: Tokens(prompt.names + tokens.names, real, words)})
