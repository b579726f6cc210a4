"""More families of causal language models, which differ from those of `causal` in a norm, a projection or the order."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from normscope.models.attributes import COMMON, DECODER, GPT, attribute_names
from normscope.models.causal import (
    GATED,
    GPT2,
    LLAMA,
    OPT_ATTENTION,
    OPT_FEED_FORWARD,
    PHI3,
    SELF_ATTENTION,
    decoder_stacks,
    pre_ln_blocks,
)
from normscope.models.encoders import MODERNBERT
from normscope.models.spec import Attention, Block, Branch, Experts, Family, FeedForward, Norm, Refusal, Stack

UNGATED = FeedForward("mlp.up_proj", "mlp.act_fn", "mlp.down_proj")


def llama_layers(
    feed_forward: FeedForward | Experts = GATED,
    norm1: str = "input_layernorm",
    norm2: str = "post_attention_layernorm",
    *,
    kind: Literal["layer", "rms"] = "rms",
    offset: float = 0.0,
    scale: str | None = None,
    attention: Attention = SELF_ATTENTION,
) -> tuple[Stack, ...]:
    """LN ATTN RES LN FF RES; modules that are not given have Llama's names."""
    branches = (
        Branch(op, pre=Norm(norm, kind, offset), scale=scale)
        for op, norm in ((attention, norm1), (feed_forward, norm2))
    )
    return decoder_stacks("layers.*", tuple(Block((branch,)) for branch in branches))


def llama_variant(name: str, types: str, note: str, stacks: tuple[Stack, ...], further: str = "") -> Family:
    """A family with other layers than Llama's, and `further` attributes of its config."""
    return replace(
        LLAMA,
        name=name,
        model_types=tuple(types.split()),
        stacks=stacks,
        attributes=LLAMA.attributes | attribute_names(further),
        note=note,
    )


LLAMA_LIKE = replace(
    LLAMA,
    name="Llama-like",
    model_types=("smollm3", "ministral", "ministral3", "seed_oss", "ernie4_5", "hunyuan_v1_dense", "helium"),
    attributes=LLAMA.attributes
    | attribute_names(
        "no_rope_layers no_rope_layer_interval attention_out_bias residual_dropout use_bias eod_token_id"
    ),
    note="as Llama: SmolLM3, Ministral, Seed-OSS, ERNIE 4.5, Hunyuan (dense), Helium",
)
GRANITE = llama_variant(
    "Granite",
    "granite",
    "as Llama; both branches are multiplied by a number",
    llama_layers(scale="residual_multiplier"),
    "embedding_multiplier logits_scaling residual_multiplier attention_multiplier",
)
ARCEE = llama_variant("Arcee", "arcee", "as Llama; feed-forward without gate, squared ReLU", llama_layers(UNGATED))
APERTUS = llama_variant(
    "Apertus",
    "apertus",
    "as Arcee, with xIELU",
    llama_layers(UNGATED, "attention_layernorm", "feedforward_layernorm"),
)
GEMMA = llama_variant(
    "Gemma",
    "gemma",
    "as Llama, norms (1 + gamma), GeGLU",
    llama_layers(offset=1.0),
    "use_bidirectional_attention",
)
PACKED = FeedForward("mlp.gate_up_proj", "mlp.activation_fn", "mlp.down_proj", up="mlp.gate_up_proj")
GLM = replace(
    PHI3,
    name="GLM",
    model_types=("glm",),
    stacks=llama_layers(PACKED),
    note="as Llama; one projection for gate and up",
)
GLM4 = replace(
    GLM,
    name="GLM-4",
    model_types=("glm4",),
    stacks=decoder_stacks(
        "layers.*",
        (
            Block(
                (
                    Branch(
                        SELF_ATTENTION,
                        pre=Norm("input_layernorm", "rms"),
                        post=Norm("post_self_attn_layernorm", "rms"),
                    ),
                )
            ),
            Block(
                (Branch(PACKED, pre=Norm("post_attention_layernorm", "rms"), post=Norm("post_mlp_layernorm", "rms")),)
            ),
        ),
    ),
    note="as GLM, sandwich norms",
)
OLMO2 = replace(
    LLAMA,
    name="OLMo 2",
    model_types=("olmo2", "olmo3", "exaone4"),
    stacks=decoder_stacks(
        "layers.*",
        (
            Block((Branch(SELF_ATTENTION, post=Norm("post_attention_layernorm", "rms")),)),
            Block((Branch(GATED, post=Norm("post_feedforward_layernorm", "rms")),)),
        ),
    ),
    attributes=LLAMA.attributes | {"sliding_window_pattern"},
    note="a norm after each branch and none before (also OLMo 3 and EXAONE 4)",
)
OLMO = replace(
    LLAMA,
    name="OLMo",
    model_types=("olmo",),
    stacks=llama_layers(kind="layer"),
    refusals=(Refusal("clip_qkv", None, "the values are clamped"),),
    note="as Llama, with a LayerNorm without parameters",
)
STABLELM = replace(
    OLMO,
    name="StableLM (sequential)",
    model_types=("stablelm",),
    when={"use_parallel_residual": False},
    attributes=LLAMA.attributes
    | attribute_names("layer_norm_eps use_qkv_bias qk_layernorm use_parallel_residual hidden_dropout"),
    refusals=(),
    note="as Llama, with a LayerNorm",
)
STARCODER2 = replace(
    OLMO,
    name="StarCoder2",
    model_types=("starcoder2",),
    stacks=llama_layers(FeedForward("mlp.c_fc", "mlp.act", "mlp.c_proj"), kind="layer"),
    attributes=LLAMA.attributes | attribute_names("norm_epsilon residual_dropout embedding_dropout use_bias"),
    refusals=(),
    note="pre-LN, rotary positions, biases everywhere",
)
NEMOTRON = replace(
    ARCEE,
    name="Nemotron",
    model_types=("nemotron",),
    stacks=llama_layers(UNGATED, kind="layer", offset=1.0),
    attributes=LLAMA.attributes | {"norm_eps"},
    note="LayerNorm (1 + gamma), squared ReLU, rotary positions",
)
PHI = replace(
    LLAMA,
    name="Phi",
    model_types=("phi",),
    stacks=decoder_stacks(
        "layers.*",
        (
            Block(
                (
                    Branch(Attention("self_attn", "self_attn.v_proj", "self_attn.dense"), pre=Norm("input_layernorm")),
                    Branch(FeedForward("mlp.fc1", "mlp.activation_fn", "mlp.fc2"), pre=Norm("input_layernorm")),
                )
            ),
        ),
    ),
    attributes=LLAMA.attributes
    | attribute_names("resid_pdrop embd_pdrop layer_norm_eps qk_layernorm partial_rotary_factor"),
    note="parallel, one norm shared by attention and feed-forward, biases everywhere (Phi-1 and 2)",
)
COHERE = replace(
    LLAMA,
    name="Cohere",
    model_types=("cohere", "cohere2"),
    stacks=decoder_stacks(
        "layers.*",
        (
            Block(
                (
                    Branch(SELF_ATTENTION, pre=Norm("input_layernorm")),
                    Branch(GATED, pre=Norm("input_layernorm")),
                )
            ),
        ),
    ),
    attributes=LLAMA.attributes | attribute_names("logit_scale layer_norm_eps use_qk_norm"),
    note="parallel, one LayerNorm without bias shared by attention and feed-forward",
)
BLOOM = replace(
    LLAMA,
    name="BLOOM",
    model_types=("bloom",),
    stacks=decoder_stacks(
        "h.*",
        pre_ln_blocks(
            Attention(
                "self_attention",
                "self_attention.query_key_value",
                "self_attention.dense",
                packing="interleaved",
                probabilities="self_attention.attention_dropout",
            ),
            "input_layernorm",
            FeedForward("mlp.dense_h_to_4h", "mlp.gelu_impl", "mlp.dense_4h_to_h"),
            "post_attention_layernorm",
            "layer",
        ),
    ),
    positions=None,
    attributes=LLAMA.attributes
    | attribute_names("n_layer n_head layer_norm_epsilon hidden_dropout slow_but_exact seq_length"),
    refusals=(
        Refusal("apply_residual_connection_post_layernorm", False, "its residual connection begins after the norm"),
    ),
    note="pre-LN, ALiBi, biases everywhere",
)
PERSIMMON = replace(
    LLAMA,
    name="Persimmon",
    model_types=("persimmon",),
    stacks=llama_layers(
        FeedForward("mlp.dense_h_to_4h", "mlp.act", "mlp.dense_4h_to_h"),
        kind="layer",
        attention=Attention("self_attn", "self_attn.query_key_value", "self_attn.dense", packing="interleaved"),
    ),
    attributes=LLAMA.attributes | attribute_names("layer_norm_eps qk_layernorm hidden_dropout"),
    note="pre-LN, rotary positions, squared ReLU, biases everywhere",
)
GPT_BIGCODE = replace(
    GPT2,
    name="GPTBigCode",
    model_types=("gpt_bigcode",),
    when={"multi_query": True},
    attributes=COMMON
    | GPT
    | attribute_names(
        "scale_attn_weights attention_softmax_in_fp32 scale_attention_softmax_in_fp32 multi_query num_key_value_heads"
    ),
    note="as GPT-2, with one key and value for all heads (StarCoder)",
)
BIOGPT = replace(
    GPT2,
    name="BioGPT",
    model_types=("biogpt",),
    stacks=decoder_stacks(
        "layers.*",
        pre_ln_blocks(OPT_ATTENTION, "self_attn_layer_norm", OPT_FEED_FORWARD, "final_layer_norm", "layer"),
    ),
    attributes=COMMON
    | DECODER
    | attribute_names(
        "hidden_dropout_prob attention_probs_dropout_prob layer_norm_eps scale_embedding layerdrop activation_dropout"
    ),
    note="pre-LN, learned positions, biases everywhere",
)
MODERNBERT_DECODER = replace(
    MODERNBERT,
    name="ModernBERT (decoder)",
    model_types=("modernbert-decoder",),
    stacks=decoder_stacks(
        "layers.*",
        pre_ln_blocks(
            Attention("attn", "attn.v_proj", "attn.Wo"),
            "attn_norm",
            FeedForward("mlp.Wi", "mlp.act", "mlp.Wo", up="mlp.Wi"),
            "mlp_norm",
            "layer",
        ),
    ),
    note="as ModernBERT, causal, with a projection for each of query, key and value",
)
LATENT = Attention(
    "self_attn",
    "self_attn.kv_b_proj",
    "self_attn.o_proj",
    packing="interleaved",
    latent="self_attn.kv_a_proj_with_mqa",
    latent_norm=Norm("self_attn.kv_a_layernorm", "rms"),
)
SHARED_EXPERTS = FeedForward(
    "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.act_fn",
    "mlp.shared_experts.down_proj",
    up="mlp.shared_experts.up_proj",
)
LATENT_ROUTED = llama_layers(Experts("mlp.experts", "mlp.experts.act_fn", shared=SHARED_EXPERTS), attention=LATENT)
DEEPSEEK = replace(
    LLAMA,
    name="DeepSeek",
    model_types=("deepseek_v2", "deepseek_v3"),
    stacks=(replace(llama_layers(attention=LATENT)[0], variants=(LATENT_ROUTED[0].blocks,)),),
    attributes=LLAMA.attributes
    | attribute_names("kv_lora_rank q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim")
    | attribute_names("first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts")
    | attribute_names("norm_topk_prob num_experts_per_tok output_router_logits routed_scaling_factor topk_group")
    | attribute_names("topk_method num_nextn_predict_layers rope_interleave"),
    note="values in two steps with a norm between (multi-head latent attention), shared experts beside routed ones",
)

FAMILIES = (
    LLAMA_LIKE,
    GRANITE,
    ARCEE,
    APERTUS,
    DEEPSEEK,
    GEMMA,
    GLM,
    GLM4,
    OLMO,
    OLMO2,
    STABLELM,
    STARCODER2,
    NEMOTRON,
    PHI,
    COHERE,
    BLOOM,
    PERSIMMON,
    GPT_BIGCODE,
    BIOGPT,
    MODERNBERT_DECODER,
)
