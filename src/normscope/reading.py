"""What a model is given, as items: text, pairs, encodings, pictures, sounds; of an encoder-decoder with its target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from normscope import features, generation, inputs
from normscope.errors import NormscopeError
from normscope.inputs import Item

if TYPE_CHECKING:
    from normscope.analyzer import Analyzer


def items(lens: Analyzer, given: Any, truncation: bool, generate: int | None) -> list[Item]:
    """One input as items, the target of an encoder-decoder included."""
    if lens.family.input == "image":
        if generate is not None:
            raise NormscopeError(f"{lens.family.name} is a vision model: it generates no text.")
        return features.image_item(given, lens.tokenizer, lens.base)
    if lens.two_sided:
        return _pairs(lens, given, truncation, generate)
    _refuse_picture(given)
    items = inputs.encode(given, lens.tokenizer, lens.limits, truncation)
    if generate is not None:
        return [generation.continued(lens.model, lens.tokenizer, item, generate, lens.limits) for item in items]
    return items


def _pairs(lens: Analyzer, given: Any, truncation: bool, generate: int | None) -> list[Item]:
    """Source and target: a pair, a dict with decoder_input_ids, or a source that the model itself goes on from."""
    target: Any = None
    if isinstance(given, Mapping):
        target = {key.removeprefix("decoder_"): given[key] for key in inputs.DECODER if given.get(key) is not None}
        source: Any = {key: value for key, value in given.items() if key not in inputs.DECODER}
        target = target or None
    elif isinstance(given, tuple) and len(given) == 2:
        source, target = given
    else:
        source = given
    if target is not None and generate is not None:
        raise NormscopeError("Give either text_target or generate, the most tokens that the model may write itself.")
    if isinstance(source, Mapping) and any(key in source for key in inputs.DECODER):
        raise NormscopeError("The target text is given twice, as decoder_input_ids and as text_target.")
    if isinstance(target, Mapping) and target.get("input_ids") is None:
        raise NormscopeError("The encoding has a decoder_attention_mask, but no decoder_input_ids.")
    if lens.family.input == "audio":
        if not isinstance(source, Mapping):
            raise NormscopeError(
                f"{lens.family.name} listens: give a dict with input_features, made by its feature extractor, not "
                f"{type(source).__name__}."
            )
        sources = features.sound_items(source, lens.base.config)
    else:
        _refuse_picture(source)
        sources = inputs.encode(source, lens.tokenizer, lens.limits, truncation)
    if target is None:
        lens.refuse_prompt("A target of the model's own")
        return [
            inputs.joined(one, generation.answered(lens.model, lens.tokenizer, one, generate, lens.target_limits))
            for one in sources
        ]
    if isinstance(target, Mapping):
        targets = inputs.encode(target, lens.tokenizer, lens.target_limits, truncation)
    else:
        targets = [
            generation.forced(lens.model, lens.tokenizer, target, lens.target_limits, truncation) for _ in sources
        ]
    if len(targets) != len(sources):
        raise NormscopeError(f"There are {len(sources)} sources, but {len(targets)} targets.")
    return [inputs.joined(one, other) for one, other in zip(sources, targets, strict=True)]


def _refuse_picture(given: Any) -> None:
    if hasattr(given, "convert") or (hasattr(given, "shape") and not isinstance(given, Mapping)):
        raise NormscopeError(f"This model reads text, not {type(given).__name__}: give it a text or an encoding.")
    if isinstance(given, Mapping) and "pixel_values" in given:
        raise NormscopeError("This model reads text: an encoding with pixel_values is for a vision model.")
