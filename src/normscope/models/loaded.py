"""`LoadedModel`: a model with its family, limits and tokenizer, as passed to every other part of the library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from normscope.errors import NormscopeError
from normscope.models import loading
from normscope.models.base import base_of
from normscope.models.modules import has_layers, input_embeddings, vocabulary_size
from normscope.models.registry import find_family
from normscope.models.soft_prompts import SoftPrompt, active_soft_prompt
from normscope.models.spec import Family, Side, Stack

TEXT_KEYS = (  # possible inputs of a text model, one number for each token
    "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids",
)  # fmt: skip
MODALITIES = 4  # text, image, video, audio: what a model that sees calls the types of its tokens


@dataclass(frozen=True)
class Limits:
    """Limits on the inputs of a model."""

    vocabulary: int
    positions: int | None  # the longest input; None: no limit
    computed: bool  # positions are computed (rotary, ALiBi), so longer inputs are possible
    position_rows: int  # rows of the position table, reserved ones included
    token_types: int
    keys: frozenset[str]  # the arguments of the model's forward method
    pad: int  # token id used for padding
    side: Side = "encoder"  # the stack that reads the text


@dataclass(frozen=True)
class LayerCalls:
    """The layer calls of a forward pass, by side."""

    modules: Mapping[str, tuple[nn.Module, ...]]  # the layer module of each call; shared layers occur repeatedly
    heads: Mapping[str, tuple[int, ...]]  # the number of heads of each call


@dataclass(eq=False)
class LoadedModel:
    """A model and everything known about it.

    `tracing.proof.prove` runs before every analysis and updates the fields that can change while the model is in use:
    `calls`, `depths`, `head_counts`, `prompt` and `limits`.
    """

    given: nn.Module  # the model as passed by the user, possibly wrapped by adapters
    model: PreTrainedModel  # the Hugging Face model inside `given`, including its head
    base: PreTrainedModel  # without the head
    family: Family
    stacks: tuple[Stack, ...]  # the stacks that the model has
    two_sided: bool  # True for an encoder-decoder
    tokenizer: Any  # or an image processor, or None
    processor: Any  # of a text with pictures or sound; None if a tokenizer was given
    name: str
    dtype: torch.dtype  # of the decomposition
    base_limits: Limits  # of the first stack, ignoring any soft prompt
    limits: Limits  # of the first stack
    revision: str | None = None  # the requested hub revision
    prompt: SoftPrompt | None = None  # the active peft soft prompt
    calls: LayerCalls = field(default_factory=lambda: LayerCalls({}, {}))
    depths: list[int] = field(default_factory=list)  # number of layer calls of each stack
    head_counts: list[int] = field(default_factory=list)  # number of heads of each stack (the maximum over its layers)

    @cached_property
    def target_limits(self) -> Limits:
        """The limits of the decoder in an encoder-decoder."""
        decoder: Any = getattr(self.base, "decoder", None)
        embedding = getattr(decoder, "embed_tokens", None)
        vocabulary = self.limits.vocabulary if embedding is None else vocabulary_size(embedding)
        return replace(self.limits, vocabulary=vocabulary, keys=frozenset(TEXT_KEYS), side="decoder")

    def refuse_prompt(self, what: str) -> None:
        """Raise an error if the model has a soft prompt, which `what` would ignore."""
        if self.prompt is not None:
            raise NormscopeError(
                f"{what} is not supported for a model with a soft prompt, because the prompt would be ignored."
            )


def load_model(
    model: Any,
    tokenizer: Any,
    dtype: torch.dtype | None,
    describe: Callable[[PreTrainedModel], Family],
    known: bool = True,
) -> LoadedModel:
    """Unwrap a model, convert half precision to float32, and collect what is known about it. `describe` finds the
    family of a model whose type is unknown, or of any model unless `known`."""
    model = loading.unwrap_compiled(model)
    family = find_family(loading.unwrap_adapters(model)) if known else None
    given = loading.single_precision(model)
    if family is None:
        family = describe(loading.unwrap_adapters(given))
    inside: PreTrainedModel = loading.unwrap_adapters(given)
    base: Any = base_of(inside)
    stacks = _present_stacks(base, family.stacks)
    limits = _read_limits(family, base, stacks[0].side)
    loaded = LoadedModel(
        given=given,
        model=inside,
        base=base,
        family=family,
        stacks=stacks,
        two_sided=len(stacks) == 2,
        tokenizer=_part_of_processor(tokenizer, family),
        processor=tokenizer if hasattr(tokenizer, "tokenizer") else None,
        name=str(getattr(inside, "name_or_path", "") or type(inside).__name__),
        dtype=run_dtype(dtype, base.dtype),
        base_limits=limits,
        limits=limits,
    )
    update_prompt(loaded)
    return loaded


def _part_of_processor(given: Any, family: Family) -> Any:
    """The tokenizer in a processor, or its image processor for a model that reads images alone; other things are
    returned as they are."""
    if not hasattr(given, "tokenizer"):
        return given
    return given.image_processor if family.input == "image" and hasattr(given, "image_processor") else given.tokenizer


def picture_token_id(base: PreTrainedModel) -> int | None:
    """The id of the tokens in whose place a model puts pictures; None for a model that reads text alone."""
    config: Any = base.config
    found = getattr(config, "image_token_id", None)
    found = getattr(config, "image_token_index", None) if found is None else found
    return found if isinstance(found, int) else None


def check_processor(loaded: LoadedModel) -> None:
    """Raise an error if a processor puts other tokens in the place of pictures than the model expects."""
    wanted, processor = picture_token_id(loaded.base), loaded.processor
    if wanted is None or not hasattr(processor, "image_processor"):
        return
    found = [getattr(processor, "image_token_id", None), *(getattr(processor, "image_token_ids", None) or ())]
    if wanted not in found:
        raise NormscopeError(
            f"The processor does not belong to this model: it marks pictures with the token {found[0]}, but the model "
            f"puts them in the place of the token {wanted}. Load both from the same checkpoint."
        )


def check_tokenizer(tokenizer: Any, vocabulary: int) -> None:
    """Raise an error if `tokenizer` is not a tokenizer, or has more entries than the embedding has rows."""
    if tokenizer is None:
        return
    if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise NormscopeError(
            f"Expected a Hugging Face tokenizer, got {type(tokenizer).__name__}. "
            "Load one with AutoTokenizer.from_pretrained(...), or pass None and analyse encodings."
        )
    if len(tokenizer) > vocabulary:
        raise NormscopeError(
            f"The tokenizer does not belong to this model: it has {len(tokenizer)} entries, but the model's embedding "
            f"has {vocabulary}. Load both from the same checkpoint."
        )


def update_prompt(loaded: LoadedModel) -> None:
    """Set `prompt` to the active soft prompt and `limits` to those that remain for the text."""
    prompt = active_soft_prompt(loaded.given)
    if prompt is not None and loaded.two_sided and prompt.kind == "keys":
        raise NormscopeError(f"Prefix tuning of an encoder-decoder ({loaded.family.name}) is not supported.")
    limits = loaded.base_limits
    if prompt is not None:
        left = None if limits.positions is None else max(1, limits.positions - prompt.count)
        limits = replace(limits, positions=left, keys=limits.keys - {"position_ids"})
    loaded.prompt, loaded.limits = prompt, limits


def _read_limits(family: Family, base: PreTrainedModel, side: Side) -> Limits:
    config = base.config
    rows = _position_rows(family, config)
    return Limits(
        vocabulary=vocabulary_size(input_embeddings(base)),
        positions=_max_positions(family, base),
        computed=family.computed_positions,
        position_rows=2**31 if rows is None or family.computed_positions else rows,
        token_types=MODALITIES if picture_token_id(base) is not None else _token_types(config),
        keys=frozenset(inspect.signature(base.forward).parameters),
        pad=_padding_id(base),
        side=side,
    )


def _token_types(config: Any) -> int:
    return max(1, int(getattr(config, "type_vocab_size", 1) or 1))


def run_dtype(wanted: torch.dtype | None, model: torch.dtype) -> torch.dtype:
    """The dtype of the decomposition: `wanted`, or the dtype of the model, but at least float32."""
    if wanted is not None and not isinstance(wanted, torch.dtype):
        raise NormscopeError(f"dtype must be torch.float32 or torch.float64, not {type(wanted).__name__} {wanted!r}.")
    dtype = wanted or (torch.float64 if model == torch.float64 else torch.float32)
    if dtype not in (torch.float32, torch.float64):
        raise NormscopeError(f"Decompositions run in float32 or float64, not {str(dtype).removeprefix('torch.')}.")
    return dtype


def _present_stacks(base: PreTrainedModel, stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """The stacks whose layers exist in the model; an encoder-decoder may be loaded as an encoder only."""
    found = tuple(stack for stack in stacks if has_layers(base, stack))
    if len(stacks) == 2 and [stack.side for stack in found] == ["decoder"]:
        raise NormscopeError(
            f"{type(base).__name__} is the decoder of an encoder-decoder without the encoder. Load the whole model."
        )
    return found or stacks


def _padding_id(base: PreTrainedModel) -> int:
    """The padding id: `padding_idx` of the embeddings if set (MPNet ignores the config), or `pad_token_id`."""
    found = getattr(getattr(base, "embeddings", None), "padding_idx", None)
    if found is None and picture_token_id(base) is not None:  # the config of the whole may name another tokenizer's
        found = getattr(base.config.get_text_config(), "pad_token_id", None)
    elif found is None:
        found = getattr(base.config, "pad_token_id", None)
    return max(0, int(found or 0))


def _max_positions(family: Family, base: PreTrainedModel) -> int | None:
    """The longest input that the model has positions for; None if unlimited."""
    rows = _position_rows(family, base.config)
    if rows is None:
        return None
    return rows - (_padding_id(base) + 1 if family.reserved_positions == "padding" else 0)


def _position_rows(family: Family, config: PreTrainedConfig) -> int | None:
    """The number of positions in the config, reserved ones included; None if unlimited."""
    if family.positions is None:
        return None
    value = getattr(config, family.positions, None)
    if not isinstance(value, int):
        raise NormscopeError(
            f"{type(config).__name__} has no integer attribute {family.positions}, which the family {family.name} "
            "gives as its number of positions. Correct the name, or register the family with positions=None if its "
            "inputs can be of any length."
        )
    return value
