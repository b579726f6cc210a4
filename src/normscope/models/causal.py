"""Families of causal language models (decoder-only)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from normscope.models.attributes import COMMON, DECODER, GPT, attribute_names
from normscope.models.spec import Attention, Block, Branch, Experts, Family, FeedForward, Norm, Refusal, Stack


def pre_ln_blocks(
    attention: Attention, norm1: str, feed_forward: FeedForward | Experts, norm2: str, kind: Literal["layer", "rms"]
) -> tuple[Block, ...]:
    """LN ATTN RES LN FF RES."""
    return (
        Block((Branch(attention, pre=Norm(norm1, kind)),)),
        Block((Branch(feed_forward, pre=Norm(norm2, kind)),)),
    )


def decoder_stacks(layers: str, blocks: tuple[Block, ...]) -> tuple[Stack, ...]:
    return (Stack("decoder", layers, blocks),)


GPT2 = Family(
    name="GPT-2",
    model_types=("gpt2",),
    stacks=decoder_stacks(
        "h.*",
        pre_ln_blocks(
            Attention("attn", "attn.c_attn", "attn.c_proj", packing="tail"),
            "ln_1",
            FeedForward("mlp.c_fc", "mlp.act", "mlp.c_proj"),
            "ln_2",
            "layer",
        ),
    ),
    attributes=COMMON
    | GPT
    | attribute_names("scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn"),
    refusals=(
        Refusal(
            "add_cross_attention",
            False,
            "its layers have a cross-attention block that the family does not list",
        ),
    ),
    note="pre-LN, learned absolute positions, biases everywhere",
)

OPT_ATTENTION = Attention("self_attn", "self_attn.v_proj", "self_attn.out_proj")
OPT_FEED_FORWARD = FeedForward("fc1", "activation_fn", "fc2")
OPT = Family(
    name="OPT",
    model_types=("opt",),
    stacks=decoder_stacks(
        "decoder.layers.*",
        pre_ln_blocks(OPT_ATTENTION, "self_attn_layer_norm", OPT_FEED_FORWARD, "final_layer_norm", "layer"),
    ),
    when={"do_layer_norm_before": True},
    attributes=COMMON
    | DECODER
    | attribute_names(
        "ffn_dim do_layer_norm_before _remove_final_layer_norm word_embed_proj_dim dropout activation_function "
        "layerdrop init_std enable_bias layer_norm_elementwise_affine"
    ),
    note="pre-LN, ReLU, learned positions",
)
OPT_POST = replace(
    OPT,
    name="OPT (post-LN)",
    stacks=decoder_stacks(
        "decoder.layers.*",
        (
            Block((Branch(OPT_ATTENTION),), after=Norm("self_attn_layer_norm")),
            Block((Branch(OPT_FEED_FORWARD),), after=Norm("final_layer_norm")),
        ),
    ),
    when={"do_layer_norm_before": False},
    note="the 350m model: post-LN, embeddings projected to the hidden size",
)

NEOX_ATTENTION = Attention("attention", "attention.query_key_value", "attention.dense", packing="interleaved")
NEOX_FEED_FORWARD = FeedForward("mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h")
GPT_NEOX = Family(
    name="GPT-NeoX",
    model_types=("gpt_neox",),
    stacks=decoder_stacks(
        "layers.*",
        (
            Block(
                (
                    Branch(NEOX_ATTENTION, pre=Norm("input_layernorm")),
                    Branch(NEOX_FEED_FORWARD, pre=Norm("post_attention_layernorm")),
                )
            ),
        ),
    ),
    when={"use_parallel_residual": True},
    attributes=COMMON
    | DECODER
    | attribute_names("hidden_dropout classifier_dropout layer_norm_eps use_parallel_residual is_decoder rotary_pct"),
    computed_positions=True,
    note="parallel: attention and feed-forward both read the layer's input (also Pythia)",
)
GPT_NEOX_SEQUENTIAL = replace(
    GPT_NEOX,
    name="GPT-NeoX (sequential)",
    stacks=decoder_stacks(
        "layers.*",
        pre_ln_blocks(NEOX_ATTENTION, "input_layernorm", NEOX_FEED_FORWARD, "post_attention_layernorm", "layer"),
    ),
    when={"use_parallel_residual": False},
    note="pre-LN, for use_parallel_residual=False",
)

GPTJ = Family(
    name="GPT-J",
    model_types=("gptj",),
    stacks=decoder_stacks(
        "h.*",
        (
            Block(
                (
                    Branch(
                        Attention("attn", "attn.v_proj", "attn.out_proj", probabilities="attn.attn_dropout"),
                        pre=Norm("ln_1"),
                    ),
                    Branch(FeedForward("mlp.fc_in", "mlp.act", "mlp.fc_out"), pre=Norm("ln_1")),
                )
            ),
        ),
    ),
    attributes=COMMON | GPT | attribute_names("rotary_dim"),
    note="parallel, one norm shared by attention and feed-forward, rotary positions",
)

SELF_ATTENTION = Attention("self_attn", "self_attn.v_proj", "self_attn.o_proj")
GATED = FeedForward("mlp.gate_proj", "mlp.act_fn", "mlp.down_proj", up="mlp.up_proj")
LLAMA = Family(
    name="Llama",
    model_types=("llama",),
    stacks=decoder_stacks(
        "layers.*", pre_ln_blocks(SELF_ATTENTION, "input_layernorm", GATED, "post_attention_layernorm", "rms")
    ),
    attributes=COMMON | DECODER,
    computed_positions=True,
    note="pre-RMSNorm, SwiGLU, rotary positions, grouped key-value heads, no biases",
)
MISTRAL = replace(LLAMA, name="Mistral", model_types=("mistral",), note="as Llama, with a sliding window")
QWEN2 = replace(LLAMA, name="Qwen2", model_types=("qwen2",), note="as Llama, with a value bias")
QWEN3 = replace(LLAMA, name="Qwen3", model_types=("qwen3",), note="as Llama; queries and keys are normalised")
PHI3 = replace(
    LLAMA,
    name="Phi-3",
    model_types=("phi3",),
    stacks=decoder_stacks(
        "layers.*",
        pre_ln_blocks(
            Attention("self_attn", "self_attn.qkv_proj", "self_attn.o_proj", packing="tail"),
            "input_layernorm",
            FeedForward("mlp.gate_up_proj", "mlp.activation_fn", "mlp.down_proj", up="mlp.gate_up_proj"),
            "post_attention_layernorm",
            "rms",
        ),
    ),
    attributes=LLAMA.attributes
    | attribute_names("resid_pdrop embd_pdrop original_max_position_embeddings partial_rotary_factor"),
    note="as Llama; one projection for query, key and value, and one for gate and up",
)

GEMMA2 = Family(
    name="Gemma-2",
    model_types=("gemma2",),
    stacks=decoder_stacks(
        "layers.*",
        (
            Block(
                (
                    Branch(
                        SELF_ATTENTION,
                        pre=Norm("input_layernorm", "rms", 1.0),
                        post=Norm("post_attention_layernorm", "rms", 1.0),
                    ),
                )
            ),
            Block(
                (
                    Branch(
                        GATED,
                        pre=Norm("pre_feedforward_layernorm", "rms", 1.0),
                        post=Norm("post_feedforward_layernorm", "rms", 1.0),
                    ),
                )
            ),
        ),
    ),
    attributes=COMMON
    | DECODER
    | attribute_names(
        "query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping use_bidirectional_attention "
        "_sliding_window_pattern sliding_window_pattern rope_local_base_freq"
    ),
    note="sandwich norms (1 + gamma), GeGLU, local attention in every other layer; logit softcap after the layers",
)
GEMMA3 = replace(
    GEMMA2, name="Gemma-3 (text)", model_types=("gemma3_text",), note="as Gemma-2; queries and keys are normalised"
)

ROUTED = attribute_names(
    "num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef router_jitter_noise"
)
MIXTRAL = replace(
    LLAMA,
    name="Mixtral",
    model_types=("mixtral",),
    stacks=decoder_stacks(
        "layers.*",
        pre_ln_blocks(
            SELF_ATTENTION,
            "input_layernorm",
            Experts("mlp.experts", "mlp.experts.act_fn"),
            "post_attention_layernorm",
            "rms",
        ),
    ),
    attributes=LLAMA.attributes | ROUTED,
    note="as Llama, with a mixture of experts; routing weights are frozen",
)
QWEN3_MOE = replace(
    MIXTRAL,
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    stacks=(replace(MIXTRAL.stacks[0], variants=(LLAMA.stacks[0].blocks,)),),
    attributes=MIXTRAL.attributes
    | attribute_names("moe_intermediate_size num_experts norm_topk_prob decoder_sparse_step mlp_only_layers"),
    note="as Qwen3, with a mixture of experts in all or some layers; routing weights are frozen",
)

GPT_OSS = replace(
    MIXTRAL,
    name="gpt-oss",
    model_types=("gpt_oss",),
    stacks=decoder_stacks(
        "layers.*",
        pre_ln_blocks(
            replace(SELF_ATTENTION, sinks=True),
            "input_layernorm",
            Experts(
                "mlp.experts",
                "mlp.experts._apply_gate",
                into_bias="gate_up_proj_bias",
                out_bias="down_proj_bias",
                transposed=True,
                interleaved=True,
                bend="limit",
            ),
            "post_attention_layernorm",
            "rms",
        ),
    ),
    attributes=MIXTRAL.attributes | attribute_names("swiglu_alpha swiglu_limit"),
    note="as Mixtral; attention sinks take part of each row's weight, experts clamp their gates",
)

FAMILIES = (
    GPT2,
    OPT,
    OPT_POST,
    GPT_NEOX,
    GPT_NEOX_SEQUENTIAL,
    GPTJ,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI3,
    GEMMA2,
    GEMMA3,
    MIXTRAL,
    QWEN3_MOE,
    GPT_OSS,
)
