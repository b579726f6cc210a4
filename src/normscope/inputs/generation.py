"""Generated text (continuations, targets of encoder-decoders), chat prompts and given target texts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from normscope.errors import NormscopeError
from normscope.inputs.item import Item, Tokens, check_length, token_names
from normscope.models.loaded import Limits
from normscope.step_progress import FOLLOWED

MAX_TARGET = 64  # default maximum length of a generated target
PICTURE_KEYS = ("token_type_ids", "mm_token_type_ids")  # which tokens stand for pictures


class _WrittenTokens:
    """Reports the tokens that a model writes: the streamer of its search."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.done = -1  # the prompt comes first

    def put(self, ids: Tensor) -> None:
        """Count one more token."""
        self.done += 1
        self.report(self.most)

    def end(self) -> None:
        """Take back the tokens that the model left out."""
        if self.done < self.most:
            self.report(self.done)

    def report(self, total: int) -> None:
        """Report, if someone follows the run."""
        if self.done > 0 and (steps := FOLLOWED.get()):
            steps.report("tokens written", self.done, total)


def chat_prompt(tokenizer: Any, chat: Any, processor: Any = None) -> str:
    """A conversation as text by the chat template of the processor, or else of the tokenizer, ready for the model's
    next turn."""
    tokenizer = processor if getattr(processor, "chat_template", None) else tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise NormscopeError("This tokenizer has no chat template. Pass the prompt as text.")
    if not isinstance(chat, Sequence) or not chat or not all(isinstance(turn, Mapping) for turn in chat):
        raise NormscopeError('chat must be a list of turns such as {"role": "user", "content": "Hello"}.')
    try:
        model_next = chat[-1].get("role") != "assistant"
        return str(tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=model_next))
    except Exception as error:  # templates may raise anything
        raise NormscopeError(f"The chat template rejected the conversation: {error}") from error


def encode_chat_prompt(tokenizer: Any, prompt: str) -> Mapping[str, Any]:
    """The encoding of a prompt whose special tokens are in its text."""
    encoding: Mapping[str, Any] = tokenizer(prompt, add_special_tokens=False)
    return encoding


def generate_continuation(model: Any, tokenizer: Any, item: Item, tokens: int, limits: Limits) -> Item:
    """The item followed by at most `tokens` tokens that the model generates greedily."""
    if limits.side != "decoder":
        raise NormscopeError("This model is an encoder and does not generate text. Leave generate out.")
    count = check_generated_count(tokens)
    _refuse_fixed_prompt(item)
    prompt = item.tensors["input_ids"]
    check_length(len(prompt) + count, limits, f"The prompt with {count} generated tokens", "Generate fewer.")
    given = {key: one[None] for key, one in item.tensors.items()}
    ids = _generate_ids(model, given | dict(item.media), len(prompt), count)
    new = ids[len(prompt) :]
    warnings = check_length(len(ids), limits, f"The prompt with {len(new)} generated tokens", "Generate fewer.")
    return replace(append_written_tokens(item, new, tokenizer), warnings=warnings)


def append_written_tokens(item: Item, ids: Tensor, tokenizer: Any) -> Item:
    """The item followed by tokens that the model writes or is made to write, which are the answer among its sources."""
    _refuse_fixed_prompt(item)
    side = item.sides["decoder"]
    keys = ("decoder_input_ids", "decoder_attention_mask") if len(item.sides) == 2 else ("input_ids", "attention_mask")
    names = _generated_token_names(tokenizer, ids)
    grown = dict(item.tensors)
    added = dict(zip(keys, (ids, torch.ones_like(ids)), strict=True))
    added |= dict.fromkeys(PICTURE_KEYS, torch.full_like(ids, item.written_type))
    for key, new in added.items():
        if key in grown:
            grown[key] = torch.cat([grown[key], new.to(grown[key])])
    tokens = Tokens(
        side.names + names,
        torch.cat([side.real, torch.ones(len(ids), dtype=torch.bool)]),
        None if side.word_ids is None else side.word_ids + (None,) * len(ids),
        None if side.spans is None else side.spans + (None,) * len(ids),
        side.generated + len(ids),
    )
    sources = item.sources
    if sources is not None:
        special = set(getattr(tokenizer, "all_special_tokens", ()))
        sources = sources.with_answer("decoder", [name not in special for name in names])
    return replace(item, tensors=grown, sides={**item.sides, "decoder": tokens}, sources=sources)


def _refuse_fixed_prompt(item: Item) -> None:
    """Refuse an encoding with tensors whose continuation is not known, such as position ids."""
    extra = set(item.tensors) - {"input_ids", "attention_mask", *(PICTURE_KEYS if item.media else ())}
    if len(item.sides) == 1 and extra:
        raise NormscopeError(f"Cannot continue a prompt with {', '.join(sorted(extra))}. Pass the whole input instead.")


def generate_target(model: Any, tokenizer: Any, source: Item, tokens: int | None, limits: Limits) -> Item:
    """The target that an encoder-decoder generates for a source, as its decoder reads it (without the last token)."""
    count = MAX_TARGET if tokens is None else check_generated_count(tokens)
    if limits.positions is not None:
        count = min(count, limits.positions - 1)
    ids = _generate_ids(model, {k: v[None] for k, v in source.tensors.items()}, 1, count)
    return _generation_decoder_item(ids[:-1] if len(ids) > 1 else ids, tokenizer)


def force_generation_target(model: Any, tokenizer: Any, target: Any, limits: Limits, truncation: bool) -> Item:
    """A given target text as the decoder reads it: the start token, then the text without its last token."""
    if tokenizer is None:
        raise NormscopeError("This Analyzer has no tokenizer. Pass the target as decoder_input_ids in the encoding.")
    if not isinstance(target, str) or not target.strip():
        raise NormscopeError("text_target must be a non-empty text or an encoding with input_ids.")
    start = getattr(model.config, "decoder_start_token_id", None)
    if start is None:
        start = getattr(model.generation_config, "decoder_start_token_id", None)
    if start is None:
        raise NormscopeError("The model's config has no decoder_start_token_id. Pass the target as decoder_input_ids.")
    ids = list(tokenizer(text_target=target)["input_ids"])
    if getattr(model, "main_input_name", "") == "input_features" and ids[:1] == [int(start)]:
        ids = ids[1:]  # Whisper's tokenizer puts the start token in front itself
    if truncation:
        ids = ids[: limits.positions]
    warnings = check_length(len(ids), limits, "The target", "Shorten it, or ask for truncation=True.")
    return replace(_generation_decoder_item(torch.tensor([int(start), *ids[:-1]]), tokenizer), warnings=warnings)


def _generation_decoder_item(ids: Tensor, tokenizer: Any) -> Item:
    mask = torch.ones_like(ids)
    tensors = {"input_ids": ids, "attention_mask": mask}
    return Item(tensors, {"decoder": Tokens(_generated_token_names(tokenizer, ids), mask.bool())})


def _generated_token_names(tokenizer: Any, ids: Tensor) -> tuple[str, ...]:
    return token_names(ids.tolist(), tokenizer)


def check_generated_count(tokens: Any) -> int:
    """A number of tokens to generate."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise NormscopeError(f"generate must be a number of tokens, at least 1, not {tokens!r}.")
    return tokens


def _generate_ids(model: Any, given: Mapping[str, Tensor], begin: int, count: int) -> Tensor:
    """Token ids: the `begin` of the prompt or target, and at most `count` that are generated greedily."""
    if not callable(getattr(model, "generate", None)) or not model.can_generate():
        raise NormscopeError(
            f"{type(model).__name__} has no head that generates text. Load it with AutoModelForCausalLM or "
            "AutoModelForSeq2SeqLM, or pass the whole text (for an encoder-decoder, the target)."
        )
    moved = {
        key: value.to(model.device, model.dtype if value.is_floating_point() else None) for key, value in given.items()
    }
    config = copy.deepcopy(model.generation_config)
    unset = dict.fromkeys(("max_new_tokens", "temperature", "top_p", "top_k"))  # avoid warnings about unused settings
    config.update(max_length=begin + count, do_sample=False, num_beams=1, use_cache=True, **unset)
    # Not model.generate: overrides such as Whisper's drop the tokens that the decoder started from.
    search: Any = GenerationMixin.generate
    try:
        with torch.no_grad():
            generated: Tensor = search(model, **moved, generation_config=config, streamer=_WrittenTokens(count))
    except (ValueError, IndexError, RuntimeError, KeyError) as error:
        raise NormscopeError(f"The model failed to generate text: {error}. Pass the whole text instead.") from error
    return generated[0].cpu()
