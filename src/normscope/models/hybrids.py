"""Families whose layers mix tokens by recurrences (linear attention, state spaces), in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from normscope.models.attributes import COMMON, attribute_names
from normscope.models.causal import GATED, LLAMA, ROUTED, SELF_ATTENTION, decoder_stacks
from normscope.models.further_causal import llama_layers
from normscope.models.spec import (
    Attention,
    AttentionGate,
    Block,
    Branch,
    Experts,
    FeedForward,
    GatedNorm,
    Norm,
    Recurrence,
    ShortConvolution,
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


STATE_SPACE = Recurrence("mamba2_chunk_scan", "mamba.conv1d", "first", GatedNorm("mamba.norm", gate_first=True))
MAMBA = Attention("mamba", "mamba.in_proj", "mamba.out_proj", packing="second", recurrence=STATE_SPACE)
PLAIN_ATTENTION = replace(SELF_ATTENTION, hybrid=True)
MAMBA2 = replace(
    LLAMA,
    name="Mamba-2",
    model_types=("mamba2",),
    stacks=decoder_stacks(
        "layers.*",
        (
            Block(
                (
                    Branch(
                        Attention(
                            "mixer",
                            "mixer.in_proj",
                            "mixer.out_proj",
                            packing="second",
                            recurrence=replace(
                                STATE_SPACE,
                                filter="mixer.conv1d",
                                norm=replace(STATE_SPACE.norm, path="mixer.norm"),
                            ),
                        ),
                        pre=Norm("norm", "rms"),
                    ),
                )
            ),
        ),
    ),
    positions=None,
    attributes=COMMON
    | attribute_names(
        "num_heads head_dim hidden_size state_size num_hidden_layers layer_norm_epsilon expand conv_kernel n_groups "
        "use_bias use_conv_bias hidden_act residual_in_fp32 time_step_rank time_step_min time_step_max "
        "time_step_floor time_step_limit rescale_prenorm_residual rms_norm chunk_size layer_types"
    ),
    note="no attention and no feed-forward: every layer is a state space with a short convolution and a gated norm",
)
STATE_SPACES = attribute_names(
    "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv mamba_expand mamba_chunk_size "
    "mamba_conv_bias mamba_proj_bias time_step_limit"
)
BAMBA = replace(
    LLAMA,
    name="Bamba",
    model_types=("bamba",),
    stacks=hybrid_layers(
        *(
            llama_layers(
                FeedForward(
                    "feed_forward.gate_proj", "feed_forward.act_fn", "feed_forward.down_proj", up="feed_forward.up_proj"
                ),
                norm2="pre_ff_layernorm",
                attention=attention,
            )
            for attention in (MAMBA, PLAIN_ATTENTION)
        )
    ),
    attributes=LLAMA.attributes
    | STATE_SPACES
    | attribute_names("attn_layer_indices num_logits_to_keep z_loss_coefficient"),
    note="Mamba-2 in most layers, attention in the others",
)
GRANITE_DENSE = FeedForward(
    "shared_mlp.input_linear", "shared_mlp.activation", "shared_mlp.output_linear", up="shared_mlp.input_linear"
)
GRANITE_HYBRID = replace(
    LLAMA,
    name="Granite-4 hybrid",
    model_types=("granitemoehybrid",),
    stacks=hybrid_layers(
        *(
            llama_layers(feed_forward, scale="residual_multiplier", attention=attention)
            for attention in (MAMBA, PLAIN_ATTENTION)
            for feed_forward in (
                Experts("block_sparse_moe.experts", "block_sparse_moe.experts.act_fn", shared=GRANITE_DENSE),
                GRANITE_DENSE,
            )
        )
    ),
    attributes=LLAMA.attributes
    | ROUTED
    | STATE_SPACES
    | attribute_names(
        "embedding_multiplier logits_scaling residual_multiplier attention_multiplier shared_intermediate_size "
        "position_embedding_type"
    ),
    note="Mamba-2 in most layers, attention in the others; a mixture of experts with a shared one, or that one alone",
)

SHORT_CONVOLUTION = Attention(
    "conv", "conv.in_proj", "conv.out_proj", packing="tail", recurrence=ShortConvolution("conv.conv")
)
LFM2_ATTENTION = Attention("self_attn", "self_attn.v_proj", "self_attn.out_proj", hybrid=True)
LFM2_DENSE = FeedForward("feed_forward.w1", "ACT2FN.silu", "feed_forward.w2", up="feed_forward.w3")
LFM2 = replace(
    LLAMA,
    name="LFM2",
    model_types=("lfm2",),
    stacks=hybrid_layers(
        *(
            llama_layers(LFM2_DENSE, "operator_norm", "ffn_norm", attention=attention)
            for attention in (SHORT_CONVOLUTION, LFM2_ATTENTION)
        )
    ),
    attributes=LLAMA.attributes
    | attribute_names(
        "norm_eps conv_bias conv_L_cache block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim "
        "full_attn_idxs"
    ),
    note="short convolutions with two gates in most layers, attention in the others",
)
LFM2_MOE = replace(
    LFM2,
    name="LFM2-MoE",
    model_types=("lfm2_moe",),
    stacks=hybrid_layers(
        *(
            llama_layers(feed_forward, "operator_norm", "ffn_norm", attention=attention)
            for attention in (SHORT_CONVOLUTION, LFM2_ATTENTION)
            for feed_forward in (Experts("feed_forward.experts", "feed_forward.experts.act_fn"), LFM2_DENSE)
        )
    ),
    attributes=LFM2.attributes
    | ROUTED
    | EXPERT_SIZES
    | attribute_names("num_dense_layers use_expert_bias routed_scaling_factor"),
    note="as LFM2, with a mixture of experts in all but the first layers",
)

FAMILIES = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, MAMBA2, BAMBA, GRANITE_HYBRID, LFM2, LFM2_MOE)
