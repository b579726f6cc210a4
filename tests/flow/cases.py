"""Every tiny family with every head that transformers has for it, and an input for each."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from normscope import Analyzer
from normscope.flow.maps import FrozenModel
from normscope.flow.output_head import freeze_with_output_head
from normscope.inputs.encode import encode
from normscope.inputs.item import Item
from tests import layer_oracle
from tests import oracle as kin_oracle
from tests import tiny as kin
from tests import tiny_layers as layers
from tests.tiny_layers import ENCODER_DECODER, IMAGES

KIN = kin.FAMILIES
FAMILIES = (*KIN, *layers.FAMILIES)
SINGLE = (  # transformers computes the norms of these in float32
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "t5", "t5-gated",
    "mixtral", "qwen3_moe", "gpt_oss",
)  # fmt: skip
GATED = (  # the feed-forward is g(a) * u
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "t5-gated", "modernbert", "dinov2-swiglu",
    "mixtral", "qwen3_moe",
)  # fmt: skip
POST_NORM = (*KIN, "opt-post", "deberta-v2")  # of those with one side
ENCODERS = (*KIN, "modernbert", "deberta-v2")
CAUSAL = tuple(name for name in FAMILIES if name not in (*ENCODERS, *ENCODER_DECODER, *IMAGES))
ONE_SIDED = tuple(name for name in FAMILIES if name not in ENCODER_DECODER)
NO_TOKENS = ("opt", "opt-post", "gptj", "gemma3_text")  # have no head for each token


def heads(name: str) -> tuple[str, ...]:
    if name in IMAGES:
        return ("ImageClassification",)
    if name in ENCODER_DECODER:
        more = {"bart": ("MaskedLM", "SequenceClassification"), "t5": ("SequenceClassification", "TokenClassification")}
        return ("Seq2SeqLM", *more.get(name, ()))
    first = "MaskedLM" if name in ENCODERS else "CausalLM"
    return (first, "SequenceClassification") + (() if name in NO_TOKENS else ("TokenClassification",))


CASES = [(name, head) for name in FAMILIES for head in heads(name)]
LANGUAGE = [(name, heads(name)[0]) for name in FAMILIES]  # one case of each family


def tolerance(name: str) -> float:
    return 1e-6 if name in SINGLE else 1e-9


def build(name: str, head: str | None, **options: Any) -> PreTrainedModel:
    return kin.tiny(name, head, **options) if name in KIN else layers.tiny(name, head, **options)


def encoding(name: str, model: PreTrainedModel, head: str | None = None, length: int = 7) -> dict[str, Tensor]:
    given = layers.inputs(name, model, length, 5)
    if head == "TokenClassification":  # of T5 the encoder alone
        given = {key: value for key, value in given.items() if not key.startswith("decoder")}
    if head == "SequenceClassification" and name in ENCODER_DECODER:  # is read where the source has its end
        given["input_ids"][0, -1] = model.config.eos_token_id
        given["decoder_input_ids"] = given["input_ids"].clone()
        given["decoder_attention_mask"] = given["attention_mask"]
    return given


@cache
def opened(name: str, head: str | None = None) -> tuple[Analyzer, dict[str, Tensor], Item, FrozenModel]:
    """A model, its input, the input as an item, and the model frozen there."""
    model = build(name, head)
    lens = Analyzer(model)
    given = encoding(name, model, head)
    (item,) = encode(lens.loaded, given)
    return lens, given, item, freeze_with_output_head(lens.loaded, item)


@cache
def naive(name: str, head: str | None = None) -> dict[str, list[Any]]:
    """side -> its layers as the naive oracles see them, with contribution vectors by scope."""
    lens, given, _, _ = opened(name, head)
    if name in KIN:
        return {"encoder": list(kin_oracle.oracle(lens.model, given))}
    return {side: list(found) for side, found in layer_oracle.oracle(lens.model, given).items()}


def place(frozen: FrozenModel) -> int:
    """A row of the logits that is neither the first nor the last, if there are several."""
    assert frozen.logits is not None
    return len(frozen.logits) // 2


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


def naive_rollout(maps: list[Tensor]) -> Tensor:
    """The product of the maps of all layers, the last first, by plain loops."""
    found = maps[0]
    for one in maps[1:]:
        product = torch.zeros(len(one), found.shape[1], dtype=torch.float64)
        for i in range(product.shape[0]):
            for k in range(product.shape[1]):
                for j in range(len(found)):
                    product[i, k] += one[i, j] * found[j, k]
        found = product
    return found


def naive_joint_rollout(decoder: list[Tensor], encoder: list[Tensor]) -> Tensor:
    """As one model of all tokens, in which the layers of one side leave the tokens of the other alone."""
    n, m = len(decoder[0]), len(encoder[0])
    steps = []
    for one in encoder:
        steps.append(torch.block_diag(torch.eye(n, dtype=torch.float64), one))
    for one in decoder:
        steps.append(torch.cat([one, torch.eye(n + m, dtype=torch.float64)[n:]]))
    return naive_rollout(steps)[:n]


def to_one(row: Tensor) -> Tensor:
    """A row, or rows, scaled to sum to one."""
    return row / row.sum(-1, keepdim=True)
