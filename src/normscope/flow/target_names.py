"""The logits that a user means: by index, by the name of a class, or by a token."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normscope.errors import NormscopeError, did_you_mean
from normscope.models.loaded import LoadedModel


def target_logit_row(loaded: LoadedModel, logits: Tensor, tokens: tuple[str, ...], position: Any) -> int:
    """The row of the logits at a position; by default that of the last token, or of the mask."""
    size = len(logits)
    if position is not None:
        return check_target_position(position, size, "logits")
    if size == 1 or loaded.stacks[-1].side == "decoder":
        return size - 1
    mask = getattr(loaded.tokenizer, "mask_token", None)
    if mask in tokens:
        return tokens.index(mask)
    raise NormscopeError("This model has logits at every token: pass position=, or mask a token in the text.")


def check_target_position(position: Any, size: int, what: str) -> int:
    """The position counted from 0, refused if there is none in the logits or states."""
    if isinstance(position, bool) or not isinstance(position, int):
        raise NormscopeError(f"A position is an integer, not {type(position).__name__} {position!r}.")
    if not -size <= position < size:
        raise NormscopeError(
            f"There is no position {position} in the {what}: valid are 0 to {size - 1} (or -{size} to -1)."
        )
    return position % size


def target_logit_index(loaded: LoadedModel, logits: Tensor, row: int, target: Any) -> int:
    """The logit of a class or token, or the largest in a row ("top")."""
    size = logits.shape[1]
    if isinstance(target, str):
        if target == "top":
            return int(logits[row].argmax())
        return _target_index_of_name(loaded, size, target)
    if isinstance(target, bool) or not isinstance(target, int):
        raise NormscopeError(
            f"A target is an index, a label, a token, a slice of the text's tokens, a Passage or a vector, not "
            f"{type(target).__name__} {target!r}."
        )
    if not -size <= target < size:
        raise NormscopeError(f"There is no logit {target}: valid are 0 to {size - 1}.")
    return target % size


def _target_index_of_name(loaded: LoadedModel, size: int, target: str) -> int:
    if not target_has_vocabulary_logits(loaded, size):
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
    found = target_token_id(loaded, target)
    if found is not None:
        return found
    pieces = target_pieces(loaded, target)
    raise NormscopeError(f"{target!r} is split into {pieces}; pass one of these tokens.")


def target_token_id(loaded: LoadedModel, target: str) -> int | None:
    """The id of a word that is one token. A language model predicts words in running text, so the form that marks the
    start of a word comes first."""
    vocabulary = loaded.tokenizer.get_vocab()
    for form in (f"\u2581{target.strip()}", f"\u0120{target.strip()}", target, target.strip()):
        if form in vocabulary:
            return int(vocabulary[form])
    return None


def target_pieces(loaded: LoadedModel, target: str, after_space: bool = False) -> list[str]:
    """The tokens of a word or text in running text: with a space before it where the tokenizer marks one, unless the
    text before it ends with a space."""
    tokenizer, word = loaded.tokenizer, target.strip()
    pieces = tokenizer.tokenize(word) if word else []
    if pieces and not after_space and not pieces[0].startswith("\u2581"):
        pieces = tokenizer.tokenize(f" {word}")
    if not pieces or tokenizer.unk_token in pieces:
        raise NormscopeError(f"{target!r} is not in the vocabulary.")
    return [str(piece) for piece in pieces]


def target_has_vocabulary_logits(loaded: LoadedModel, size: int) -> bool:
    """Whether logits are of tokens, not of classes. The config of a model of several parts has one for its text."""
    config: Any = loaded.model.config
    vocabulary = getattr(config.get_text_config(decoder=True), "vocab_size", getattr(config, "vocab_size", 2**62))
    return size >= int(vocabulary)


def target_class_names(loaded: LoadedModel) -> dict[int, str]:
    """The names of a classifier's classes by index, from the config."""
    found: Any = loaded.model.config.id2label or {}
    return {int(index): str(name) for index, name in found.items()}


def target_logit_name(loaded: LoadedModel, logits: Tensor, index: int) -> str:
    """The token or class of a logit, in quotes."""
    if target_has_vocabulary_logits(loaded, logits.shape[1]):
        token = loaded.tokenizer.convert_ids_to_tokens(index) if loaded.tokenizer is not None else index
        return repr(token)
    return repr(target_class_names(loaded).get(index, index))
