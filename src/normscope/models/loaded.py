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
from normscope.models.modules import has_layers, vocabulary_size
from normscope.models.registry import family_of
from normscope.models.soft_prompts import SoftPrompt, active_soft_prompt
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
    """A model and everything known about it. What may change while it is in use (`calls`, `prompt` and what follows
    from them) is kept up to date by `tracing.proof.prove`, which runs before every analysis."""

    given: nn.Module  # as its user has it, perhaps with adapters around it
    model: PreTrainedModel  # the Hugging Face model inside, with its head if it has one
    base: PreTrainedModel  # without the head
    family: Family
    stacks: tuple[Stack, ...]  # the sides that exist
    two_sided: bool  # an encoder-decoder
    tokenizer: Any  # or an image processor, or None
    name: str
    dtype: torch.dtype  # of the decomposition
    base_limits: Limits  # of the first side, without a soft prompt
    limits: Limits  # of the first side
    revision: str | None = None  # of the hub, if one was asked for
    prompt: SoftPrompt | None = None  # of peft
    calls: LayerCalls = field(default_factory=lambda: LayerCalls({}, {}))
    depths: list[int] = field(default_factory=list)  # layer calls on each side
    head_counts: list[int] = field(default_factory=list)  # heads on each side, the most if its layers differ

    @cached_property
    def target_limits(self) -> Limits:
        """The limits of the decoder of an encoder-decoder."""
        decoder: Any = getattr(self.base, "decoder", None)
        embedding = getattr(decoder, "embed_tokens", None)
        vocabulary = self.limits.vocabulary if embedding is None else vocabulary_size(embedding)
        return replace(self.limits, vocabulary=vocabulary, keys=frozenset(TOKENS), side="decoder")

    def refuse_prompt(self, what: str) -> None:
        """Refuse anything that would ignore virtual tokens."""
        if self.prompt is not None:
            raise NormscopeError(f"{what} is not available for a model with a soft prompt: it would be left out.")


def load_model(model: Any, tokenizer: Any, dtype: torch.dtype | None) -> LoadedModel:
    """The LoadedModel of a model that its user holds: unwrapped, and in single precision at least."""
    model = loading.unwrap_compiled(model)
    family = family_of(loading.unwrap_adapters(model))
    given = loading.single_precision(model)
    inside: PreTrainedModel = loading.unwrap_adapters(given)
    base: Any = inside.base_model
    stacks = _present_stacks(base, family.stacks)
    limits = _read_limits(family, base, stacks[0].side)
    loaded = LoadedModel(
        given=given,
        model=inside,
        base=base,
        family=family,
        stacks=stacks,
        two_sided=len(stacks) == 2,
        tokenizer=tokenizer,
        name=str(getattr(inside, "name_or_path", "") or type(inside).__name__),
        dtype=run_dtype(dtype, base.dtype),
        base_limits=limits,
        limits=limits,
    )
    update_prompt(loaded)
    return loaded


def update_prompt(loaded: LoadedModel) -> None:
    """Note the soft prompt that the model has now, and the limits that it leaves for a text."""
    prompt = active_soft_prompt(loaded.given)
    if prompt is not None and loaded.two_sided and prompt.kind == "keys":
        raise NormscopeError(f"Prefix tuning of an encoder-decoder ({loaded.family.name}) cannot be analysed.")
    limits = loaded.base_limits
    if prompt is not None:
        left = None if limits.positions is None else max(1, limits.positions - prompt.count)
        limits = replace(limits, positions=left, keys=limits.keys - {"position_ids"})
    loaded.prompt, loaded.limits = prompt, limits


def _read_limits(family: Family, base: PreTrainedModel, side: Side) -> Limits:
    config = base.config
    rows = _position_rows(family, config)
    return Limits(
        vocabulary=vocabulary_size(base.get_input_embeddings()),
        positions=_max_positions(family, base),
        computed=family.computed_positions,
        position_rows=2**31 if rows is None or family.computed_positions else rows,
        token_types=max(1, int(getattr(config, "type_vocab_size", 1) or 1)),
        keys=frozenset(inspect.signature(base.forward).parameters),
        pad=_padding_id(base),
        side=side,
    )


def run_dtype(wanted: torch.dtype | None, model: torch.dtype) -> torch.dtype:
    """The dtype of the decomposition: what was asked for, or that of the model, at least float32."""
    if wanted is not None and not isinstance(wanted, torch.dtype):
        raise NormscopeError(f"dtype is torch.float32 or torch.float64, not {type(wanted).__name__} {wanted!r}.")
    dtype = wanted or (torch.float64 if model == torch.float64 else torch.float32)
    if dtype not in (torch.float32, torch.float64):
        raise NormscopeError(f"Decompositions run in float32 or float64, not {str(dtype).removeprefix('torch.')}.")
    return dtype


def _present_stacks(base: PreTrainedModel, stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
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
