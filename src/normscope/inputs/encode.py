"""Convert inputs (texts, pairs, words, encodings, images, audio features) to items, and items to batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.inputs import generation, media, pictures
from normscope.inputs.item import IGNORED_KEYS, Item, Tokens, check_length, join_source_and_target, token_names
from normscope.inputs.sources import add_sources, mark_input
from normscope.models.loaded import TEXT_KEYS, Limits, LoadedModel
from normscope.models.soft_prompts import SoftPrompt


def encode_one(
    loaded: LoadedModel,
    text: Any,
    words: Sequence[str] | None,
    chat: Sequence[Mapping[str, str]] | None,
    text_target: Any,
    generate: int | None,
    truncation: bool,
    sources: Any = None,
    template: str | None = None,
) -> Item:
    """The input, given as exactly one of `text`, `words` and `chat`, as an item, with its sources if there are any."""
    marked = None
    if sources is not None or template is not None:
        text, chat, marked = mark_input(loaded, text, words, chat, sources, template)
    if sum(given is not None for given in (text, words, chat)) != 1:
        raise NormscopeError("Pass exactly one input: a text, a pair (a, b), an encoding, words=[...] or chat=[...].")
    if words is not None:
        text = list(words) if hasattr(words, "__iter__") else []
        if isinstance(words, str) or not hasattr(words, "__iter__") or not all(isinstance(w, str) for w in text):
            raise NormscopeError("words must be a list of strings, such as ['Colin', 'plays'].")
    elif chat is not None:
        seen = pictures.chat_pictures(chat)
        prompt = marked.text if marked is not None else ""
        prompt = prompt or generation.chat_prompt(loaded.tokenizer, chat, loaded.processor)
        text = generation.encode_chat_prompt(loaded.tokenizer, prompt)
        text = pictures.PicturePrompt(prompt, seen, special=False) if seen else text
    elif isinstance(text, list):
        raise NormscopeError(
            "A list is ambiguous: use words=[...] for the words of a text, stream([...]) for several texts."
        )
    if text_target is not None and not loaded.two_sided:
        raise NormscopeError(f"text_target is for encoder-decoders only; {loaded.family.name} is not one.")
    if text_target is not None and isinstance(text, tuple) and len(text) == 2:
        raise NormscopeError("A pair is a source and its target text already: leave text_target (or the answer) out.")
    items = encode(loaded, text if text_target is None else (text, text_target), truncation, generate)
    if len(items) != 1:
        raise NormscopeError(f"The encoding has {len(items)} inputs, but analyze() takes one. Use stream(encoding).")
    return items[0] if sources is None else add_sources(loaded, items[0], marked)


def encode(loaded: LoadedModel, given: Any, truncation: bool = False, generate: int | None = None) -> list[Item]:
    """Convert one input to items, including the target of an encoder-decoder and virtual tokens."""
    prompt = loaded.prompt
    if prompt is not None and generate is not None:
        raise NormscopeError("generate is not supported for a model with a soft prompt. Pass the whole text instead.")
    return [_add_soft_prompt(item, prompt) for item in _encode_input(loaded, given, truncation, generate)]


def _encode_input(loaded: LoadedModel, given: Any, truncation: bool, generate: int | None) -> list[Item]:
    if loaded.family.input == "image":
        if generate is not None:
            raise NormscopeError(
                f"{loaded.family.name} is a vision model and does not generate text. Leave generate out."
            )
        return media.media_image_items(given, loaded)
    if loaded.two_sided:
        return _encode_pair(loaded, given, truncation, generate)
    if loaded.family.input == "audio":
        if generate is not None:
            raise NormscopeError(f"{loaded.family.name} has no decoder and does not generate text. Leave generate out.")
        return media.media_wave_items(given, loaded)
    if isinstance(given, str):
        items = encode_text(given, loaded.tokenizer, loaded.limits, truncation)
    elif pictures.holds_pictures(given):
        read = pictures.read_picture_text(loaded, given)
        (item,) = encode_text(read.tokens, loaded.tokenizer, loaded.limits)
        items = [pictures.add_pictures(loaded, item, read)]
    else:
        _refuse_image(given)
        items = encode_text(given, loaded.tokenizer, loaded.limits, truncation)
    if generate is not None:
        return [
            generation.generate_continuation(loaded.model, loaded.tokenizer, item, generate, loaded.limits)
            for item in items
        ]
    return items


def _encode_pair(loaded: LoadedModel, given: Any, truncation: bool, generate: int | None) -> list[Item]:
    """Encode a (source, target) pair, a dict with decoder_input_ids, or a source whose target is generated."""
    target: Any = None
    if isinstance(given, Mapping):
        target = {key.removeprefix("decoder_"): given[key] for key in DECODER_KEYS if given.get(key) is not None}
        source: Any = {key: value for key, value in given.items() if key not in DECODER_KEYS}
        target = target or None
    elif isinstance(given, tuple) and len(given) == 2:
        source, target = given
    else:
        source = given
    if target is not None and generate is not None:
        raise NormscopeError(
            "Pass either text_target or generate (the maximum number of tokens to generate), not both."
        )
    if isinstance(source, Mapping) and any(key in source for key in DECODER_KEYS):
        raise NormscopeError(
            "The target was passed twice, as decoder_input_ids and as text_target. Leave one of them out."
        )
    if isinstance(target, Mapping) and target.get("input_ids") is None:
        raise NormscopeError("The encoding has a decoder_attention_mask but no decoder_input_ids.")
    if loaded.family.input == "audio":
        sources = media.media_sound_items(source, loaded)
    else:
        _refuse_image(source)
        sources = encode_text(source, loaded.tokenizer, loaded.limits, truncation)
    if target is None:
        loaded.refuse_prompt("Generating the target")
        return [
            join_source_and_target(
                one, generation.generate_target(loaded.model, loaded.tokenizer, one, generate, loaded.target_limits)
            )
            for one in sources
        ]
    if isinstance(target, Mapping):
        targets = encode_text(target, loaded.tokenizer, loaded.target_limits, truncation)
    else:
        targets = [
            generation.force_generation_target(loaded.model, loaded.tokenizer, target, loaded.target_limits, truncation)
            for _ in sources
        ]
    if len(targets) != len(sources):
        raise NormscopeError(f"There are {len(sources)} sources but {len(targets)} targets.")
    return [join_source_and_target(one, other) for one, other in zip(sources, targets, strict=True)]


def _refuse_image(given: Any) -> None:
    if hasattr(given, "convert") or (hasattr(given, "shape") and not isinstance(given, Mapping)):
        raise NormscopeError(f"This model reads text, not {type(given).__name__}. Pass a text or an encoding.")
    if isinstance(given, Mapping) and pictures.holds_pictures(given):
        pictures.refuse_pictures(given)


def _add_soft_prompt(item: Item, prompt: SoftPrompt | None) -> Item:
    """The item with the virtual tokens added to its tokens, or listed as `virtual` if they are only keys and values."""
    if prompt is None:
        return item
    if prompt.kind == "keys":
        return replace(item, virtual=prompt.names)
    side, tokens = next(iter(item.sides.items()))  # the encoder in an encoder-decoder
    real = torch.cat([torch.ones(prompt.count, dtype=torch.bool), tokens.real])
    words = None if tokens.word_ids is None else (None,) * prompt.count + tokens.word_ids
    spans = None if tokens.spans is None else (None,) * prompt.count + tokens.spans
    return replace(item, sides={**item.sides, side: Tokens(prompt.names + tokens.names, real, words, spans)})


FEATURES = ("pixel_values", "input_features", "input_values")  # what images and sounds are called
DECODER_KEYS = ("decoder_input_ids", "decoder_attention_mask")

SourceInput = Mapping[str, tuple[int, int]] | Mapping[str, str] | Sequence[str] | str
Input = str | tuple[str, str] | Mapping[str, Any] | list[str]


def encode_text(given: Any, tokenizer: Any, limits: Limits, truncation: bool = False) -> list[Item]:
    """Convert one text input to items: one, or one for each row of an encoding. A list of strings is one sentence,
    split into words."""
    if isinstance(given, Mapping):
        return _read_encoding(given, tokenizer, limits, truncation)
    if tokenizer is None:
        raise NormscopeError(
            "This Analyzer has no tokenizer. Pass an encoding, which is a dict with input_ids (and attention_mask), or "
            "create the Analyzer with a tokenizer to analyse text."
        )
    if isinstance(given, str):
        return [_encode_string(tokenizer, limits, truncation, given)]
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, str) for part in given):
        return [_encode_string(tokenizer, limits, truncation, *given)]
    if isinstance(given, tuple) and given and all(isinstance(part, str) for part in given):
        size = "one text" if len(given) == 1 else f"{len(given)} texts"
        raise NormscopeError(
            f"A tuple of {size} is not a valid input. Pass a pair as (a, b), one sentence split into words as "
            "words=[...] (in stream(): as a list), and several inputs to stream([...])."
        )
    if isinstance(given, list) and given and all(isinstance(word, str) for word in given):
        return [_encode_words(tokenizer, limits, truncation, given)]
    raise NormscopeError(
        f"Cannot analyse {_describe_type(given)}. Pass a text, a pair of texts (a, b), words=[...], or an encoding (a "
        "dict of input_ids, attention_mask, ...)."
    )


def _encode_string(tokenizer: Any, limits: Limits, truncation: bool, *texts: str) -> Item:
    if not any(text.strip() for text in texts):
        raise NormscopeError("The text is empty. Pass at least one word.")
    return _tokenize(tokenizer, limits, truncation, *texts)


def _encode_words(tokenizer: Any, limits: Limits, truncation: bool, words: list[str]) -> Item:
    if not any(word.strip() for word in words):
        raise NormscopeError("The words are empty. Pass at least one word.")
    return _tokenize(tokenizer, limits, truncation, words, is_split_into_words=True)


def _tokenize(tokenizer: Any, limits: Limits, truncation: bool, *given: Any, **options: Any) -> Item:
    length: dict[str, Any] = {"truncation": False}
    if truncation and limits.positions is not None:
        length = {"truncation": True, "max_length": limits.positions}
    try:
        encoding = tokenizer(*given, **length, **options, return_attention_mask=True, verbose=False)
    except (ValueError, AssertionError, TypeError) as error:
        raise NormscopeError(f"The tokenizer rejected the input: {error}") from error
    ids = encoding["input_ids"]
    try:
        word_ids = tuple(encoding.word_ids())
    except (ValueError, AttributeError):  # slow tokenizers have no word ids
        word_ids = None
    tensors = {
        key: torch.tensor(encoding[key]) for key in TEXT_KEYS if key in encoding and key in limits.keys | {"input_ids"}
    }
    tensors.setdefault("attention_mask", torch.ones(len(ids), dtype=torch.long))
    spans = _token_spans(encoding) if len(given) == 1 and isinstance(given[0], str) else None
    return _make_text_item(tensors, tuple(tokenizer.convert_ids_to_tokens(ids)), word_ids, spans, limits)


def _token_spans(encoding: Any, row: int = 0) -> tuple[tuple[int, int] | None, ...] | None:
    """The characters of each token, None for those that the tokenizer added. Slow tokenizers do not know them."""
    encodings = getattr(encoding, "encodings", None)
    if not encodings:
        return None
    places = zip(encodings[row].offsets, encodings[row].sequence_ids, strict=True)
    return tuple(None if sequence is None else offset for offset, sequence in places)


def _make_text_item(
    tensors: Mapping[str, Tensor],
    names: tuple[str, ...],
    word_ids: tuple[int | None, ...] | None,
    spans: tuple[tuple[int, int] | None, ...] | None,
    limits: Limits,
) -> Item:
    warnings = _check_text_limits(tensors, limits)
    mask = tensors.get("attention_mask", torch.ones_like(tensors["input_ids"]))
    return Item(tensors, {limits.side: Tokens(names, mask.bool(), word_ids, spans)}, warnings=warnings)


def _read_encoding(given: Mapping[str, Any], tokenizer: Any, limits: Limits, truncation: bool) -> list[Item]:
    unknown = set(given) - set(TEXT_KEYS) - IGNORED_KEYS
    if unknown:
        raise NormscopeError(
            f"Unknown keys in the encoding: {', '.join(sorted(map(str, unknown)))}. Known: {', '.join(TEXT_KEYS)}."
        )
    if given.get("input_ids") is None:
        raise NormscopeError("The encoding has no input_ids. Pass the output of the model's tokenizer.")
    tensors = {key: _as_token_rows(key, given[key]) for key in TEXT_KEYS if key in given and given[key] is not None}
    ids = tensors["input_ids"]
    for key, tensor in tensors.items():
        if tensor.shape != ids.shape:
            raise NormscopeError(f"{key} has shape {tuple(tensor.shape)}, but input_ids has shape {tuple(ids.shape)}.")
        if key not in limits.keys:
            raise NormscopeError(f"This model takes no {key}. Remove it from the encoding.")
    mask = tensors.get("attention_mask", torch.ones_like(ids))
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise NormscopeError("attention_mask must contain only zeros and ones.")
    items = []
    words = getattr(given, "word_ids", None)
    for row in range(ids.shape[0]):
        real = mask[row].nonzero().flatten()
        if len(real) == 0:
            raise NormscopeError(f"attention_mask masks every token of input {row}. At least one must be unmasked.")
        # Remove padding on both sides, so that positions start at the first real token; holes stay masked.
        span = slice(int(real[0]), int(real[-1]) + 1)
        if truncation and limits.positions is not None:
            span = slice(span.start, min(span.stop, span.start + limits.positions))
        cut = {key: tensor[row, span] for key, tensor in tensors.items()}
        _check_token_ids(cut["input_ids"], limits)
        tokens = token_names(cut["input_ids"].tolist(), tokenizer)
        try:
            word_ids = tuple(words(row)[span]) if words is not None else None
        except (ValueError, IndexError, TypeError):
            word_ids = None
        spans = _token_spans(given, row)
        items.append(_make_text_item(cut, tokens, word_ids, None if spans is None else spans[span], limits))
    return items


def _as_token_rows(key: str, given: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NormscopeError(f"{key} must be a rectangular array of integers: {error}.") from error
    if tensor.dim() > 0 and tensor.numel() == 0:
        raise NormscopeError(f"The encoding is empty: {key} has no tokens.")
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2:
        raise NormscopeError(f"{key} has {tensor.dim()} dimensions; expected shape (tokens,) or (inputs, tokens).")
    if tensor.dtype == torch.bool and key == "attention_mask":
        tensor = tensor.long()
    if tensor.is_floating_point() and key == "attention_mask" and bool((tensor == tensor.round()).all()):
        tensor = tensor.long()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise NormscopeError(f"{key} must contain integers, not {str(tensor.dtype).removeprefix('torch.')}.")
    return tensor.cpu().long()


def _check_text_limits(tensors: Mapping[str, Tensor], limits: Limits) -> tuple[str, ...]:
    """Raise an error for an input that the model cannot read; return the warnings for the result."""
    length = len(tensors["input_ids"])
    if length == 0:
        raise NormscopeError("The input is empty: the tokenizer returned no tokens.")
    warnings: tuple[str, ...] = ()
    if limits.positions is not None and length > limits.positions:
        warnings = check_length(length, limits, "The input", "Shorten it, or ask for truncation=True.")
    _check_token_ids(tensors["input_ids"], limits)
    for key, size, kind in (
        ("token_type_ids", limits.token_types, "token types"),
        ("position_ids", limits.position_rows, "positions"),
    ):
        if key in tensors:
            low, high = int(tensors[key].min()), int(tensors[key].max())
            if low < 0 or high >= size:
                raise NormscopeError(
                    f"{key} range from {low} to {high}, but the model has {size} {kind} (0 to {size - 1})."
                )
    return warnings


def _check_token_ids(ids: Tensor, limits: Limits) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limits.vocabulary:
        wrong = low if low < 0 else high
        raise NormscopeError(
            f"input_ids contains {wrong}, which is outside the model's vocabulary (0 to {limits.vocabulary - 1})."
        )


def _describe_type(given: Any) -> str:
    kind = type(given).__name__
    if hasattr(given, "__len__") and len(given) == 0:
        return f"an empty {kind}"
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


def pad_batch(items: Sequence[Item], pad: int, device: torch.device) -> dict[str, Tensor]:
    """One batch, padded on the right so that positions do not change. Missing attention masks are added only if there
    is padding, because without one a model may build its own."""
    batch = {}
    items = (
        [_with_attention_mask(item) for item in items]
        if len({len(i.tensors.get("input_ids", ())) for i in items}) > 1
        else items
    )
    for key, first in items[0].tensors.items():  # all items of a batch have the same keys
        rows = [item.tensors[key] for item in items]
        if first.dim() == 1:
            longest = max(len(row) for row in rows)
            fill = pad if key.endswith("input_ids") else 0
            rows = [torch.nn.functional.pad(row, (0, longest - len(row)), value=fill) for row in rows]
        batch[key] = torch.stack(rows).to(device)
    return batch


def _with_attention_mask(item: Item) -> Item:
    ids = item.tensors.get("input_ids")
    if ids is None or "attention_mask" in item.tensors:
        return item
    return replace(item, tensors={**item.tensors, "attention_mask": torch.ones_like(ids)})


def real_tokens(items: Sequence[Item], side: str, device: torch.device) -> Tensor:
    """(items, longest): True for the tokens of one side that are neither padding nor masked."""
    longest = max(len(item.sides[side].names) for item in items)
    masks = [item.sides[side].real for item in items]
    return torch.stack([torch.nn.functional.pad(mask, (0, longest - len(mask))) for mask in masks]).to(device)


def forward_inputs(loaded: LoadedModel, items: Sequence[Item]) -> dict[str, Any]:
    """The arguments of the model's forward method for a batch."""
    batch: dict[str, Any] = dict(pad_batch(items, loaded.limits.pad, loaded.base.device))
    batch |= {key: one.to(loaded.base.device) for item in items for key, one in item.media.items()}
    for key in FEATURES:
        if key in batch:
            batch[key] = batch[key].to(loaded.base.dtype)
    if "use_cache" in loaded.limits.keys:  # keys and values are not needed after the pass
        batch["use_cache"] = False
    if getattr(loaded.model.config, "return_dict", True) is False:  # outputs are accessed by name
        batch["return_dict"] = True
    return batch
