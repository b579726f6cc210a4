"""Families whose layers mix tokens by recurrences (linear attention, state spaces), in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from normscope.models.attributes import attribute_names
from normscope.models.causal import GATED, LLAMA, ROUTED
from normscope.models.further_causal import llama_layers
from normscope.models.spec import (
    Attention,
    AttentionGate,
    Experts,
    FeedForward,
    GatedNorm,
    Recurrence,
    Stack,
)


def hybrid_layers(*kinds: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """The layers of several kinds in one stack. Those that name more submodules come first."""
    (first,), *others = kinds
    return (replace(first, variants=tuple(stack.blocks for (stack,) in others)),)


DELTA_NET = Attention(
    "linear_attn",
    "linear_attn.in_proj_qkvz",
    "linear_attn.out_proj",
    groups="linear_attn.num_k_heads",
    recurrence=Recurrence("torch_chunk_gated_delta_rule", "linear_attn.conv1d", "last", GatedNorm("linear_attn.norm")),
)
GATED_ATTENTION = Attention(
    "self_attn",
    "self_attn.v_proj",
    "self_attn.o_proj",
    gate=AttentionGate("self_attn.q_proj", "sigmoid", "interleaved"),
    hybrid=True,
)
SHARED_EXPERT = Experts(
    "mlp.experts",
    "mlp.experts.act_fn",
    shared=FeedForward(
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.act_fn",
        "mlp.shared_expert.down_proj",
        up="mlp.shared_expert.up_proj",
    ),
    shared_gate="mlp.shared_expert_gate",
)
LINEAR_ATTENTION = attribute_names(
    "linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim "
    "partial_rotary_factor full_attention_interval"
)
EXPERT_SIZES = attribute_names(
    "moe_intermediate_size shared_expert_intermediate_size num_experts norm_topk_prob decoder_sparse_step "
    "mlp_only_layers"
)
QWEN3_NEXT = replace(
    LLAMA,
    name="Qwen3-Next",
    model_types=("qwen3_next",),
    stacks=hybrid_layers(
        *(
            llama_layers(feed_forward, offset=1.0, attention=attention)
            for attention in (DELTA_NET, GATED_ATTENTION)
            for feed_forward in (SHARED_EXPERT, GATED)
        )
    ),
    attributes=LLAMA.attributes | ROUTED | LINEAR_ATTENTION | EXPERT_SIZES,
    note="Gated DeltaNet in most layers, attention with a gate in the others, a mixture of experts with a shared one",
)
SPLIT_DELTA_NET = replace(DELTA_NET, value="linear_attn.in_proj_qkv", packing="tail", groups=None)
QWEN3_5 = replace(
    LLAMA,
    name="Qwen3.5 (text)",
    model_types=("qwen3_5_text",),
    stacks=hybrid_layers(
        *(llama_layers(offset=1.0, attention=attention) for attention in (SPLIT_DELTA_NET, GATED_ATTENTION))
    ),
    attributes=LLAMA.attributes | LINEAR_ATTENTION,
    note="Gated DeltaNet in most layers, attention with a gate in the others",
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="Qwen3.5-MoE (text)",
    model_types=("qwen3_5_moe_text",),
    stacks=hybrid_layers(
        *(
            llama_layers(SHARED_EXPERT, offset=1.0, attention=attention)
            for attention in (SPLIT_DELTA_NET, GATED_ATTENTION)
        )
    ),
    attributes=QWEN3_5.attributes | ROUTED | EXPERT_SIZES,
    note="as Qwen3.5, with a mixture of experts and a shared one",
)

FAMILIES = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
