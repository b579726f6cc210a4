"""The models that are attacked: every tiny family, bare or with a head, built once and copied for each case."""

import copy
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.helpers import bert_oracle, layer_oracle
from tests.helpers.layer_oracle import Attention, Block, Branch, FeedForward, Stack
from tests.helpers.tiny import CAUSAL, ENCODER_DECODER, task_heads, tiny
from tests.helpers.tiny import inputs as tiny_inputs


def heads(name: str) -> tuple[str | None, ...]:
    """The base model, and the heads that transformers has for the family."""
    return (None, *task_heads(name))


@cache
def pristine(name: str, head: str | None, variant: int) -> PreTrainedModel:
    """The model that cases copy; a variant has another depth, or shares ALBERT's layers in another way."""
    return tiny(name, head, **variants(name)[variant])


def variants(name: str) -> tuple[dict[str, Any], ...]:
    """Two to four layers; all other sizes are those of tests/helpers/tiny.py."""
    if name == "albert":
        return ({}, {"inner_group_num": 2, "num_hidden_layers": 2}, {"num_hidden_groups": 2, "num_hidden_layers": 4})
    if name in ENCODER_DECODER:
        return ({},) if "t5" in name else ({}, {"decoder_layers": 3})
    deeper = {"gpt2": "n_layer", "gptj": "n_layer"}.get(name, "num_hidden_layers")
    return ({}, {deeper: 3 + len(name) % 2})


def build(name: str, head: str | None, dtype: torch.dtype, variant: int) -> PreTrainedModel:
    """A copy that may be changed."""
    return copy.deepcopy(pristine(name, head, variant)).to(dtype)


def stacks_of(config: Any) -> dict[str, Stack]:
    """The blocks of a model's layers: `layer_oracle.describe`, and the rest of BERT's kin."""
    kind = config.model_type
    if kind not in bert_oracle.PATHS:
        return layer_oracle.describe(config)
    paths = bert_oracle.PATHS[kind]
    attention = Attention(paths.attention, paths.value, paths.output)
    ff = FeedForward((paths.ff_in,), paths.ff_out, paths.activation)
    blocks = Block((Branch(attention),), paths.norm1), Block((Branch(ff),), paths.norm2)
    return {"encoder": Stack(paths.layers, blocks)}


@cache
def family_stacks(name: str) -> dict[str, Stack]:
    """The stacks of an unchanged model of the family: an attack may have edited the config since."""
    return stacks_of(pristine(name, None, 0).config)


def scope_names(stack: Stack) -> list[str]:
    """All scopes of a layer without cross-attention, in its order."""
    found, name = ["ATTN-W"], ""
    for number, block in enumerate(stack.blocks):
        parallel = len(block.branches) > 1
        for branch in block.branches:
            feeds = isinstance(branch.op, FeedForward)
            if branch.pre and not (parallel and feeds):
                name += "LN"
                found += [f"{name}-N"] if number > 0 else []
            name += "FF" if feeds else "ATTN"
            found += [] if parallel and feeds else [f"{name}-N"]
            if branch.post:
                name += "LN"
                found.append(f"{name}-N")
        name += "RES"
        found += [f"{name}-W"] if number == 0 and not parallel else []
        found.append(f"{name}-N")
        if block.after:
            name += "LN"
            found.append(f"{name}-N")
    return found


@cache
def layer_classes(name: str) -> tuple[type[nn.Module], ...]:
    """The classes of a family's layers."""
    base = pristine(name, None, 0).base_model
    patterns = [stack.layers for stack in family_stacks(name).values()]
    found = {type(m) for path, m in base.named_modules() if any(re.fullmatch(one, path) for one in patterns)}
    return tuple(found)


def inputs(name: str, model: PreTrainedModel, head: str | None, length: int, target: int, seed: int) -> dict[str, Any]:
    """One input (batch 1), as in tests/helpers/tiny.py, but without masks: each case decides whether to add them."""
    given: dict[str, Tensor] = tiny_inputs(name, model, length, target, seed)
    if head == "SequenceClassification" and name in CAUSAL:  # read at the last token that is not padding
        given["input_ids"] = given["input_ids"].clamp_min(3)
    return {key: value for key, value in given.items() if not key.endswith("mask")}
