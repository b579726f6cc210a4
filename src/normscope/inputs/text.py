"""Texts, pairs, words and encodings as items."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.inputs.item import Item, Tokens, names_of
from normscope.models.loaded import TOKENS, Limits

DECODER = ("decoder_input_ids", "decoder_attention_mask")
IGNORED = {"special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length", "labels", "word_ids"}

Input = str | tuple[str, str] | Mapping[str, Any] | list[str]


def encode_text(given: Any, tokenizer: Any, limits: Limits, truncation: bool = False) -> list[Item]:
    """The items of one input: one, or as many as an encoding has rows. A list of strings is one sentence of words."""
    if isinstance(given, Mapping):
        return _from_encoding(given, tokenizer, limits, truncation)
    if tokenizer is None:
        raise NormscopeError(
            "This Analyzer has no tokenizer, so it takes encodings: a dict with input_ids (and attention_mask). "
            "Give a tokenizer to analyse text."
        )
    if isinstance(given, str):
        return [_from_text(tokenizer, limits, truncation, given)]
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(part, str) for part in given):
        return [_from_text(tokenizer, limits, truncation, *given)]
    if isinstance(given, tuple) and given and all(isinstance(part, str) for part in given):
        texts = "one text" if len(given) == 1 else f"{len(given)} texts"
        raise NormscopeError(
            f"A tuple of {texts} is no input: a pair is (a, b). Use words=[...] for one sentence of words (in stream() "
            "a list of them), stream([...]) for many inputs."
        )
    if isinstance(given, list) and given and all(isinstance(word, str) for word in given):
        return [_from_words(tokenizer, limits, truncation, given)]
    raise NormscopeError(
        f"Cannot analyse {_describe(given)}. Give a text, a pair of texts (a, b), words=[...], or an encoding: a dict "
        "of input_ids, attention_mask, ..."
    )


def check_tokenizer(tokenizer: Any, vocabulary: int) -> None:
    """A tokenizer with more entries than the embedding has rows belongs to another model."""
    if tokenizer is None:
        return
    if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise NormscopeError(
            f"Expected a Hugging Face tokenizer, got {type(tokenizer).__name__}. "
            "Load one with AutoTokenizer.from_pretrained(...), or give None and analyse encodings."
        )
    if len(tokenizer) > vocabulary:
        raise NormscopeError(
            f"The tokenizer does not belong to this model: it has {len(tokenizer)} entries, the model's embedding "
            f"{vocabulary}. Load both from the same name."
        )


def _from_text(tokenizer: Any, limits: Limits, truncation: bool, *texts: str) -> Item:
    if not any(text.strip() for text in texts):
        raise NormscopeError("The text is empty. Give at least one word.")
    return _from_tokenizer(tokenizer, limits, truncation, *texts)


def _from_words(tokenizer: Any, limits: Limits, truncation: bool, words: list[str]) -> Item:
    if not any(word.strip() for word in words):
        raise NormscopeError("The words are empty. Give at least one word.")
    return _from_tokenizer(tokenizer, limits, truncation, words, is_split_into_words=True)


def _from_tokenizer(tokenizer: Any, limits: Limits, truncation: bool, *given: Any, **options: Any) -> Item:
    cut: dict[str, Any] = {"truncation": False}
    if truncation and limits.positions is not None:
        cut = {"truncation": True, "max_length": limits.positions}
    try:
        encoding = tokenizer(*given, **cut, **options, return_attention_mask=True, verbose=False)
    except (ValueError, AssertionError, TypeError) as error:
        raise NormscopeError(f"The tokenizer refused the input: {error}") from error
    ids = encoding["input_ids"]
    try:
        word_ids = tuple(encoding.word_ids())
    except (ValueError, AttributeError):  # a slow tokenizer keeps no words
        word_ids = None
    tensors = {
        key: torch.tensor(encoding[key]) for key in TOKENS if key in encoding and key in limits.keys | {"input_ids"}
    }
    tensors.setdefault("attention_mask", torch.ones(len(ids), dtype=torch.long))
    return _item(tensors, tuple(tokenizer.convert_ids_to_tokens(ids)), word_ids, limits)


def _item(
    tensors: Mapping[str, Tensor], names: tuple[str, ...], word_ids: tuple[int | None, ...] | None, limits: Limits
) -> Item:
    warnings = _check(tensors, limits)
    mask = tensors.get("attention_mask", torch.ones_like(tensors["input_ids"]))
    return Item(tensors, {limits.side: Tokens(names, mask.bool(), word_ids)}, warnings=warnings)


def _from_encoding(given: Mapping[str, Any], tokenizer: Any, limits: Limits, truncation: bool) -> list[Item]:
    unknown = set(given) - set(TOKENS) - IGNORED
    if unknown:
        raise NormscopeError(
            f"Unknown keys in the encoding: {', '.join(sorted(map(str, unknown)))}. Known: {', '.join(TOKENS)}."
        )
    if given.get("input_ids") is None:
        raise NormscopeError("The encoding has no input_ids.")
    tensors = {key: _as_rows(key, given[key]) for key in TOKENS if key in given and given[key] is not None}
    ids = tensors["input_ids"]
    for key, tensor in tensors.items():
        if tensor.shape != ids.shape:
            raise NormscopeError(f"{key} has the shape {tuple(tensor.shape)}, but input_ids {tuple(ids.shape)}.")
        if key not in limits.keys:
            raise NormscopeError(f"This model takes no {key}. Leave it out of the encoding.")
    mask = tensors.get("attention_mask", torch.ones_like(ids))
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise NormscopeError("attention_mask must hold zeros and ones only.")
    items = []
    words = getattr(given, "word_ids", None)
    for row in range(ids.shape[0]):
        real = mask[row].nonzero().flatten()
        if len(real) == 0:
            raise NormscopeError(f"attention_mask masks every token of input {row}: there is nothing to analyse.")
        # Padding goes, on either side, so that positions start at the first real token; holes stay masked.
        span = slice(int(real[0]), int(real[-1]) + 1)
        if truncation and limits.positions is not None:
            span = slice(span.start, min(span.stop, span.start + limits.positions))
        cut = {key: tensor[row, span] for key, tensor in tensors.items()}
        _check_ids(cut["input_ids"], limits)
        tokens = names_of(cut["input_ids"].tolist(), tokenizer)
        try:
            word_ids = tuple(words(row)[span]) if words is not None else None
        except (ValueError, IndexError, TypeError):
            word_ids = None
        items.append(_item(cut, tokens, word_ids, limits))
    return items


def _as_rows(key: str, given: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise NormscopeError(f"{key} is no rectangular table of integers: {error}.") from error
    if tensor.dim() > 0 and tensor.numel() == 0:
        raise NormscopeError(f"The encoding is empty: {key} has no tokens.")
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2:
        raise NormscopeError(f"{key} has {tensor.dim()} dimensions; expected (tokens,) or (inputs, tokens).")
    if tensor.dtype == torch.bool and key == "attention_mask":
        tensor = tensor.long()
    if tensor.is_floating_point() and key == "attention_mask" and bool((tensor == tensor.round()).all()):
        tensor = tensor.long()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise NormscopeError(f"{key} must hold integers, not {str(tensor.dtype).removeprefix('torch.')}.")
    return tensor.cpu().long()


def _check(tensors: Mapping[str, Tensor], limits: Limits) -> tuple[str, ...]:
    """Refuse what the model cannot take; what a result must tell of the rest."""
    length = len(tensors["input_ids"])
    if length == 0:
        raise NormscopeError("The input is empty: the tokenizer made no tokens of it.")
    warnings = check_length(length, limits, "The input", "Shorten it, or ask for truncation=True.")
    _check_ids(tensors["input_ids"], limits)
    for key, size, what in (
        ("token_type_ids", limits.token_types, "token types"),
        ("position_ids", limits.position_rows, "positions"),
    ):
        if key in tensors:
            low, high = int(tensors[key].min()), int(tensors[key].max())
            if low < 0 or high >= size:
                raise NormscopeError(
                    f"{key} run from {low} to {high}, but the model has {size} {what} (0 to {size - 1})."
                )
    return warnings


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


def _check_ids(ids: Tensor, limits: Limits) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= limits.vocabulary:
        wrong = low if low < 0 else high
        raise NormscopeError(
            f"input_ids holds {wrong}, which is outside the model's vocabulary (0 to {limits.vocabulary - 1})."
        )


def _describe(given: Any) -> str:
    kind = type(given).__name__
    return f"an empty {kind}" if hasattr(given, "__len__") and len(given) == 0 else f"a {kind}"
