"""The models that are attacked: every tiny family, bare or with a head, built once and copied for each case."""

import copy
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests import layer_oracle, oracle, tiny, tiny_layers
from tests.layer_oracle import Attention, Block, Branch, FeedForward, Stack
from tests.tiny_layers import ENCODER_DECODER, IMAGES

KIN = tiny.FAMILIES
FAMILIES = (*KIN, *tiny_layers.FAMILIES)
ENCODERS = (*KIN, "modernbert", "deberta-v2")
CAUSAL = tuple(name for name in FAMILIES if name not in (*ENCODERS, *ENCODER_DECODER, *IMAGES))
GATED = (  # the feed-forward is g(a) * u
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "t5-gated", "modernbert", "dinov2-swiglu",
    "mixtral", "qwen3_moe", "gpt_oss",
)  # fmt: skip
NO_TOKENS = ("opt", "opt-post", "gptj", "gemma3_text")  # have no head for each token


def heads(name: str) -> tuple[str | None, ...]:
    """No head, and those that transformers has."""
    if name in IMAGES:
        return (None, "ImageClassification")
    if name in ENCODER_DECODER:
        return (None, "Seq2SeqLM")
    first = "MaskedLM" if name in ENCODERS else "CausalLM"
    return (None, first, "SequenceClassification", *(() if name in NO_TOKENS else ("TokenClassification",)))


@cache
def pristine(name: str, head: str | None, variant: int) -> PreTrainedModel:
    """The model that cases copy; a variant is another depth, or another way to share ALBERT's layers."""
    module = tiny if name in KIN else tiny_layers
    return module.tiny(name, head, **variants(name)[variant])


def variants(name: str) -> tuple[dict[str, Any], ...]:
    """Two to four layers; of other sizes always those of tiny.py and tiny_layers.py."""
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
    """What the layers of a model are made of: `layer_oracle.describe`, and the other kin of BERT."""
    kind = config.model_type
    if kind not in oracle.PATHS:
        return layer_oracle.describe(config)
    paths = oracle.PATHS[kind]
    attention = Attention(paths.attention, paths.value, paths.output)
    ff = FeedForward((paths.ff_in,), paths.ff_out, paths.activation)
    blocks = Block((Branch(attention),), paths.norm1), Block((Branch(ff),), paths.norm2)
    return {"encoder": Stack(paths.layers, blocks)}


@cache
def family_stacks(name: str) -> dict[str, Stack]:
    """Of a family as it was made: an attack may have edited the config since."""
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
    """One input (batch 1), as `tiny_layers.inputs`, without masks: a case puts them in or not."""
    given: dict[str, Tensor] = tiny_layers.inputs(name, model, length, target, seed)
    if head == "SequenceClassification" and name in CAUSAL:  # read at the last token that is no padding
        given["input_ids"] = given["input_ids"].clamp_min(3)
    return {key: value for key, value in given.items() if not key.endswith("mask")}
