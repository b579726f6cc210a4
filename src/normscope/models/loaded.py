"""A model that is ready to be analysed: the model, its family, and what it takes. Everything below works on this."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from normscope.errors import NormscopeError
from normscope.models import loading
from normscope.models.modules import has_layers, vocabulary_of
from normscope.models.registry import family_of
from normscope.models.soft_prompts import SoftPrompt, soft_prompt_of
from normscope.models.spec import Family, Side, Stack

TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")  # what a text model may be given


@dataclass(frozen=True)
class Limits:
    """What the model can take."""

    vocabulary: int
    positions: int | None  # the longest input; None: no limit
    computed: bool  # positions are computed and go on behind that
    position_rows: int  # the rows of the position table; some families start counting above zero
    token_types: int
    keys: frozenset[str]  # the arguments of the model's forward pass
    pad: int
    side: Side = "encoder"  # what the tokens of a text are


@dataclass(frozen=True)
class LayerCalls:
    """The layer calls that a forward pass makes on each side."""

    modules: Mapping[str, tuple[nn.Module, ...]]  # the layer module of every call: a shared one stands there often
    heads: Mapping[str, tuple[int, ...]]  # of every call


@dataclass(eq=False)
class LoadedModel:
    """A model, and what its family says of it. `calls` are what a pass was seen to do (`tracing.proof`)."""

    given: nn.Module  # as its user has it, perhaps with adapters around it
    model: PreTrainedModel  # the Hugging Face model inside, with its head if it has one
    base: PreTrainedModel  # without the head
    family: Family
    stacks: tuple[Stack, ...]  # the sides that are there
    tokenizer: Any  # or an image processor, or None
    name: str
    dtype: torch.dtype  # of the decomposition
    revision: str | None = None  # of the hub, if one was asked for
    calls: LayerCalls = field(default_factory=lambda: LayerCalls({}, {}))

    @property
    def two_sided(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return len(self.stacks) == 2

    @property
    def depths(self) -> list[int]:
        """The number of layer calls of each side."""
        return [len(self.layer_calls(stack)) for stack in self.stacks]

    @property
    def head_counts(self) -> list[int]:
        """The number of heads of each side, the largest where layers differ."""
        return [max(self.calls.heads[stack.side]) for stack in self.stacks]

    @property
    def uneven_heads(self) -> bool:
        """Whether the layers of a side have different numbers of heads."""
        return any(len(set(heads)) > 1 for heads in self.calls.heads.values())

    def layer_calls(self, stack: Stack) -> tuple[nn.Module, ...]:
        """The layer module of every call of a side."""
        return self.calls.modules[stack.side]

    @property
    def prompt(self) -> SoftPrompt | None:
        """The soft prompt of peft that the model has now."""
        if self.given is self.model:
            return None
        prompt = soft_prompt_of(self.given)
        if prompt is not None and self.two_sided and prompt.kind == "keys":
            raise NormscopeError(f"Prefix tuning of an encoder-decoder ({self.family.name}) cannot be analysed.")
        return prompt

    def refuse_prompt(self, what: str) -> None:
        """Refuse what leaves virtual tokens out."""
        if self.prompt is not None:
            raise NormscopeError(f"{what} is not available for a model with a soft prompt: it would be left out.")

    @property
    def limits(self) -> Limits:
        """What the first side can take; `target_limits` what the decoder of an encoder-decoder can."""
        prompt = self.prompt
        if prompt is None:
            return self._limits
        taken = None if self._limits.positions is None else max(1, self._limits.positions - prompt.count)
        return replace(self._limits, positions=taken, keys=self._limits.keys - {"position_ids"})

    @cached_property
    def _limits(self) -> Limits:
        config = self.base.config
        rows = _position_rows(self.family, config)
        return Limits(
            vocabulary=vocabulary_of(self.base.get_input_embeddings()),
            positions=_max_positions(self.family, self.base),
            computed=self.family.computed_positions,
            position_rows=2**31 if rows is None or self.family.computed_positions else rows,
            token_types=max(1, int(getattr(config, "type_vocab_size", 1) or 1)),
            keys=frozenset(inspect.signature(self.base.forward).parameters),
            pad=_padding_id(self.base),
            side=self.stacks[0].side,
        )

    @cached_property
    def target_limits(self) -> Limits:
        """What the decoder of an encoder-decoder can take."""
        decoder: Any = getattr(self.base, "decoder", None)
        embedding = getattr(decoder, "embed_tokens", None)
        vocabulary = self.limits.vocabulary if embedding is None else vocabulary_of(embedding)
        return replace(self.limits, vocabulary=vocabulary, keys=frozenset(TOKENS), side="decoder")


def describe(model: Any, tokenizer: Any, dtype: torch.dtype | None) -> LoadedModel:
    """The loaded form of a model that its user holds: unwrapped, and in single precision at least."""
    model = loading.bare(model)
    family = family_of(loading.unwrapped(model))
    given = loading.single_precision(model)
    inside: PreTrainedModel = loading.unwrapped(given)
    base: Any = inside.base_model
    name = str(getattr(inside, "name_or_path", "") or type(inside).__name__)
    return LoadedModel(
        given, inside, base, family, _present(base, family.stacks), tokenizer, name, run_dtype(dtype, base.dtype)
    )


def run_dtype(wanted: torch.dtype | None, model: torch.dtype) -> torch.dtype:
    """The dtype of the decomposition: what was asked for, or that of the model, at least float32."""
    if wanted is not None and not isinstance(wanted, torch.dtype):
        raise NormscopeError(f"dtype is torch.float32 or torch.float64, not {type(wanted).__name__} {wanted!r}.")
    dtype = wanted or (torch.float64 if model == torch.float64 else torch.float32)
    if dtype not in (torch.float32, torch.float64):
        raise NormscopeError(f"Decompositions run in float32 or float64, not {str(dtype).removeprefix('torch.')}.")
    return dtype


def _present(base: PreTrainedModel, stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """The sides that a model has: of an encoder-decoder perhaps the encoder alone."""
    found = tuple(stack for stack in stacks if has_layers(base, stack))
    if len(stacks) == 2 and [stack.side for stack in found] == ["decoder"]:
        raise NormscopeError(
            f"{type(base).__name__} is a decoder without the encoder that it reads. Load the whole model."
        )
    return found or stacks


def _padding_id(base: PreTrainedModel) -> int:
    """The id that pads a batch: the one the embeddings count positions by, where they do (MPNet fixes its own)."""
    own = getattr(getattr(base, "embeddings", None), "padding_idx", None)
    given = getattr(base.config, "pad_token_id", None) if own is None else own
    return max(0, int(given or 0))


def _max_positions(family: Family, base: PreTrainedModel) -> int | None:
    """The longest input the model has positions for; None where there is no limit."""
    rows = _position_rows(family, base.config)
    if rows is None:
        return None
    return rows - (_padding_id(base) + 1 if family.reserved_positions == "padding" else 0)


def _position_rows(family: Family, config: PreTrainedConfig) -> int | None:
    """How many positions the config counts, those that are reserved included; None where there is no limit."""
    if family.positions is None:
        return None
    value = getattr(config, family.positions, None)
    if not isinstance(value, int):
        raise NormscopeError(
            f"The config {type(config).__name__} has no number {family.positions}, which the family {family.name} "
            "names as its positions. Register a family without such a limit with positions=None."
        )
    return value
