"""Tiny models of families unknown to normscope, with descriptions as users might register them.

Bloom has its own attention code, with queries, keys and values packed in one projection. DeepSeek-V3 computes its
values in two steps with a norm between them (multi-head latent attention), so that no projection of the states is W_V.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from normscope.models.spec import Attention, Block, Branch, Family, FeedForward, Norm, Stack
from tests.helpers.tiny import COMMON, random_model

IDS: dict[str, Tensor] = {"input_ids": torch.tensor([[5, 9, 7, 30, 8, 41, 12]])}


def bloom() -> PreTrainedModel:
    return random_model("bloom", "CausalLM", vocab_size=50, hidden_size=24, n_layer=2, n_head=4)


def bloom_family(model: PreTrainedModel) -> Family:
    attention = Attention(
        "self_attention",
        "self_attention.query_key_value",
        "self_attention.dense",
        packing="interleaved",
        probabilities="self_attention.attention_dropout",
    )
    feed_forward = FeedForward("mlp.dense_h_to_4h", "mlp.gelu_impl", "mlp.dense_4h_to_h")
    blocks = (
        Block((Branch(attention, pre=Norm("input_layernorm")),)),
        Block((Branch(feed_forward, pre=Norm("post_attention_layernorm")),)),
    )
    stack = Stack("decoder", "h.*", blocks)
    return Family("Bloom", ("bloom",), (stack,), frozenset(model.config.to_dict()), positions=None)


def latent(rank: int = 8) -> PreTrainedModel:
    """DeepSeek-V3 with dense feed-forwards."""
    options = {"kv_lora_rank": rank, "q_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 5}
    experts = {"first_k_dense_replace": 9, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    few = {"num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return random_model("deepseek_v3", "CausalLM", **COMMON, **options, **experts, **few)


def latent_family(model: PreTrainedModel, value: str, packing: Literal["alone", "tail", "interleaved"]) -> Family:
    blocks = (
        Block(
            (Branch(Attention("self_attn", value, "self_attn.o_proj", packing), pre=Norm("input_layernorm", "rms")),)
        ),
        Block(
            (
                Branch(
                    FeedForward("mlp.gate_proj", "mlp.act_fn", "mlp.down_proj", up="mlp.up_proj"),
                    pre=Norm("post_attention_layernorm", "rms"),
                ),
            )
        ),
    )
    return Family(
        "Latent", ("deepseek_v3",), (Stack("decoder", "layers.*", blocks),), frozenset(model.config.to_dict())
    )


LATENT: list[tuple[str, Any]] = [  # wrong ways to describe its values
    ("self_attn.kv_b_proj", "alone"),
    ("self_attn.kv_b_proj", "tail"),
    ("self_attn.kv_b_proj", "interleaved"),
    ("self_attn.kv_a_proj_with_mqa", "tail"),
]
