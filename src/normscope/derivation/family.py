"""Describe a model that has no family: derive each layer, merge the descriptions, and find out about positions."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normscope.derivation.attention import UnexplainedError, find_attention
from normscope.derivation.blocks import find_blocks
from normscope.derivation.cache import describe_once
from normscope.derivation.feed_forward import find_feed_forwards
from normscope.derivation.layers import Chain, find_chains, interface_modules
from normscope.derivation.match import IDENTITY
from normscope.derivation.multipliers import unify_multipliers
from normscope.derivation.watch import LayerCallArguments, watch_layer
from normscope.errors import NormscopeError
from normscope.inputs.samples import random_media
from normscope.models.base import base_of, media_key
from normscope.models.modules import (
    input_embeddings,
    layer_blocks,
    parameter_paths,
    refuse_autocast,
    vocabulary_size,
    watched_paths,
)
from normscope.models.registry import check_family
from normscope.models.scopes import layer_steps, scope_names
from normscope.models.spec import Attention, Block, Branch, Family, Norm, Stack

LENGTH, TARGETS = 11, 7  # tokens of the pass that is watched, and of its target in an encoder-decoder
POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions", "n_ctx")


def describe_model(model: PreTrainedModel, every_layer: bool = False) -> Family:
    """The family of a model, derived from one short pass; raises an error that names what nothing explains. A model of
    the same modules and config is not watched again (`cache`).

    Of layers with the same modules and settings only the first is watched, unless `every_layer`.
    """
    if any(module.training for module in model.modules() if not isinstance(module, nn.ModuleList)):
        raise NormscopeError(
            "The model is in training mode, so dropout would change what is watched. Call model.eval()."
        )
    refuse_autocast(model.device)
    watch = partial(_watch_model, every_layer=True) if every_layer else _watch_model
    return describe_once(model, (_structure(model), every_layer), watch)


def _watch_model(model: PreTrainedModel, every_layer: bool = False) -> Family:
    base: Any = base_of(model)
    inputs = _short_input(model)
    try:
        with torch.no_grad():
            chains = find_chains(base, inputs)
            interface = interface_modules(base, inputs)
    except NormscopeError:
        raise
    except Exception as error:  # models may raise anything
        raise NormscopeError(f"{type(model).__name__} cannot be described: a short pass fails ({error}).") from error
    if len(chains) == 1 and chains[0].crosses:
        seen = max(chains[0].mixtures) == 2
        found = (
            "its encoder has no layers with attention" if seen else "its layers read vectors that no attention mixes"
        )
        raise NormscopeError(f"{type(model).__name__} cannot be described: {found}.")
    stacks = tuple(_stack(base, chain, interface, len(chains) == 2, every_layer) for chain in chains)
    if [stack.side for stack in stacks] not in (["encoder"], ["decoder"], ["encoder", "decoder"]):
        raise NormscopeError(f"{type(model).__name__} has {len(stacks)} stacks of layers, which cannot be described.")
    config = base.config
    family = Family(
        name=f"{config.model_type} (derived)",
        model_types=(config.model_type,),
        stacks=stacks,
        attributes=frozenset(config.to_dict()),
        input=_input_kind(base),
        positions=next((name for name in POSITIONS if isinstance(getattr(config, name, None), int)), None),
        computed_positions=not _has_position_table(base),
        note="derived from the model itself",
        derived=True,
    )
    check_family(family)
    return family


def _input_kind(base: Any) -> Literal["text", "image", "audio"]:
    """What a model reads. A model that also takes text is one of text."""
    if "input_ids" in inspect.signature(base.forward).parameters:
        return "text"
    return "image" if media_key(base) == "pixel_values" else "audio"


def _short_input(model: PreTrainedModel) -> dict[str, Any]:
    """Random token ids for every input that a text pass needs, or a random image or sound."""
    base: Any = base_of(model)
    names = inspect.signature(base.forward).parameters
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {}
    if _input_kind(base) != "text":
        given = {key: one[None].to(base.dtype) for key, one in random_media(base, generator).items()}
    if "input_ids" not in names and "decoder_input_ids" not in names:
        return {key: one.to(base.device) for key, one in given.items()}
    vocabulary = vocabulary_size(input_embeddings(base))
    if vocabulary < 2:
        raise NormscopeError(f"{type(model).__name__} has no table of token embeddings that its inputs could index.")
    low = min(5, vocabulary - 1)
    if not given:
        given["input_ids"] = torch.randint(low, vocabulary, (1, LENGTH), generator=generator)
    if "decoder_input_ids" in names:
        given["decoder_input_ids"] = torch.randint(low, vocabulary, (1, TARGETS), generator=generator)
    if "use_cache" in names:
        given["use_cache"] = False
    device = base.device
    return {name: one.to(device) if isinstance(one, Tensor) else one for name, one in given.items()}


def _stack(base: nn.Module, chain: Chain, interface: frozenset[int], two: bool, every_layer: bool) -> Stack:
    """The stack of a chain: the blocks of its layers, which may be of several kinds in the same order."""
    described: list[tuple[Block, ...]] = []
    known: dict[Any, tuple[Block, ...]] = {}
    causal, in_place = True, False
    for number, call in enumerate(chain.calls):
        key = number if every_layer else _structure(call.layer)
        if key not in known:
            try:
                known[key], masked, changes = _layer(call, interface)
            except UnexplainedError as error:
                raise NormscopeError(
                    f"{type(base).__name__} cannot be described: in {chain.pattern.replace('*', str(number), 1)} "
                    f"({type(call.layer).__name__}), {error}."
                ) from None
            causal, in_place = causal and masked, in_place or changes
        described.append(known[key])
    found: dict[tuple[Block, ...], list[LayerCallArguments]] = {}
    for blocks, call in zip(
        unify_multipliers(described, [call.layer for call in chain.calls]), chain.calls, strict=True
    ):
        found.setdefault(blocks, []).append(call)
    kinds = _same_roles(_merge_identities(list(found)))
    side = ("decoder" if chain.crosses else "encoder") if two else ("decoder" if causal else "encoder")
    if len({scope_names(blocks) for blocks in kinds}) > 1:
        raise NormscopeError(
            f"{type(base).__name__} cannot be described: its layers have different components in different orders."
        )
    specific = sorted(
        kinds, key=lambda blocks: -len(watched_paths(layer_steps(blocks), True) | parameter_paths(blocks))
    )
    for order in (kinds, specific):
        stack = Stack(side, chain.pattern, order[0], tuple(order[1:]), in_place)  # type: ignore[arg-type]
        if all(
            _without_identity(layer_blocks(call.layer, stack)) == _without_identity(blocks)
            for blocks, calls in found.items()
            for call in calls
        ):
            return stack
    raise NormscopeError(
        f"{type(base).__name__} cannot be described: layers with the same modules use them differently."
    )


def _layer(call: LayerCallArguments, interface: frozenset[int]) -> tuple[tuple[Block, ...], bool, bool]:
    """The blocks of a layer, whether its attention is causal, and whether it changes tensors in place."""
    log = watch_layer(call)
    if not log.products:
        raise UnexplainedError("no attention probabilities are multiplied with values")
    paths = frozenset(path for path, module in call.layer.named_modules() if id(module) in interface)
    attentions = [find_attention(log, product, paths) for product in log.products]
    used = frozenset().union(*(one.calls for one in attentions))
    blocks = find_blocks(log, [*attentions, *find_feed_forwards(log, used)])
    weights = log.products[0].weights
    return blocks, bool((weights.triu(1) == 0).all()), log.in_place


def _structure(layer: nn.Module) -> Any:
    """What tells layers apart that may be of different kinds: submodules, shapes, and plain attributes."""
    modules = tuple((path, type(module).__name__) for path, module in layer.named_modules())
    shapes = tuple((name, tuple(one.shape)) for name, one in layer.named_parameters())
    plain = tuple(
        (path, name, repr(value))
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if (isinstance(value, bool | float | str | tuple) or dataclasses.is_dataclass(value)) and name != "training"
    )
    return modules, shapes, plain


def _merge_identities(kinds: list[tuple[Block, ...]]) -> list[tuple[Block, ...]]:
    """Kinds of layers without those that differ only in a norm that is an identity there."""
    chosen: dict[Any, tuple[Block, ...]] = {}
    for blocks in kinds:
        key = _without_identity(blocks)
        if key not in chosen or _identities(chosen[key]) > _identities(blocks):
            chosen[key] = blocks
    return [_drop_identities(blocks) for blocks in chosen.values()]


def _drop_identities(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Blocks without norms that are an identity in every layer."""

    def known(branch: Branch) -> Branch:
        return replace(branch, pre=None) if branch.pre is not None and branch.pre.offset == IDENTITY else branch

    return tuple(replace(block, branches=tuple(map(known, block.branches))) for block in blocks)


def _same_roles(kinds: list[tuple[Block, ...]]) -> list[tuple[Block, ...]]:
    """Kinds of layers in which a branch has a scale, of 1 if need be, in all kinds or in none, and which all have
    attention sinks if some do, since a layer may have them without using them."""
    if any(isinstance(one.op, Attention) and one.op.sinks for blocks in kinds for b in blocks for one in b.branches):
        kinds = list(dict.fromkeys(_with_sinks(blocks) for blocks in kinds))
    scaled = {
        (n, k)
        for blocks in kinds
        for n, block in enumerate(blocks)
        for k, branch in enumerate(block.branches)
        if branch.scale is not None
    }

    def with_scale(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        return tuple(
            replace(
                block,
                branches=tuple(
                    replace(one, scale=1.0) if (n, k) in scaled and one.scale is None else one
                    for k, one in enumerate(block.branches)
                ),
            )
            for n, block in enumerate(blocks)
        )

    return [with_scale(blocks) for blocks in kinds] if len(kinds) > 1 else kinds


def _with_sinks(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    def with_sinks(branch: Branch) -> Branch:
        return replace(branch, op=replace(branch.op, sinks=True)) if isinstance(branch.op, Attention) else branch

    return tuple(replace(block, branches=tuple(map(with_sinks, block.branches))) for block in blocks)


def _identities(blocks: tuple[Block, ...]) -> int:
    return sum(b.pre is not None and b.pre.offset == IDENTITY for block in blocks for b in block.branches)


def _without_identity(blocks: tuple[Block, ...]) -> Any:
    """The blocks for comparison: the first norm of each branch by its path alone, since an identity has no kind, and no
    scales of 1."""

    def plain(branch: Branch) -> Branch:
        pre = None if branch.pre is None else Norm(branch.pre.path)
        op = replace(branch.op, sinks=False) if isinstance(branch.op, Attention) else branch.op
        return replace(branch, op=op, pre=pre, scale=None if branch.scale == 1.0 else branch.scale)

    return tuple(replace(block, branches=tuple(map(plain, block.branches))) for block in blocks)


def _has_position_table(base: nn.Module) -> bool:
    """Whether positions are looked up in a table, so that longer inputs are impossible."""
    if _input_kind(base) != "text":
        return False
    words = input_embeddings(base)
    tables = [one for one in base.modules() if isinstance(one, nn.Embedding) and one is not words]
    rows = {getattr(base.config, name, None) for name in POSITIONS}
    return any(abs(one.num_embeddings - size) <= 4 for one in tables for size in rows if isinstance(size, int))
