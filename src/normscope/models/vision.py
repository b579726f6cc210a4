"""Families of Vision Transformers, whose tokens are image patches."""

from __future__ import annotations

from dataclasses import replace

from normscope.models.attributes import COMMON, VISION, attribute_names
from normscope.models.spec import Attention, Block, Branch, Family, FeedForward, Norm, Stack

ATTENTION = Attention("attention", "attention.v_proj", "attention.o_proj")

VIT = Family(
    name="ViT",
    model_types=("vit",),
    stacks=(
        Stack(
            "encoder",
            "layers.*",
            (
                Block((Branch(ATTENTION, pre=Norm("layernorm_before")),)),
                Block((Branch(FeedForward("mlp.fc1", "mlp.activation_fn", "mlp.fc2"), pre=Norm("layernorm_after")),)),
            ),
        ),
    ),
    input="image",
    positions=None,
    attributes=COMMON | VISION,
    note="pre-LN; patches and a [CLS] token",
)

DEIT = replace(VIT, name="DeiT", model_types=("deit",), note="as ViT, with a distillation token after [CLS]")


def dinov2_stacks(
    feed_forward: FeedForward, attention: Attention = ATTENTION, layers: str = "encoder.layer.*"
) -> tuple[Stack, ...]:
    blocks = (
        Block((Branch(attention, pre=Norm("norm1"), scale="layer_scale1.lambda1"),)),
        Block((Branch(feed_forward, pre=Norm("norm2"), scale="layer_scale2.lambda1"),)),
    )
    return (Stack("encoder", layers, blocks),)


DINOV2 = Family(
    name="DINOv2",
    model_types=("dinov2",),
    stacks=dinov2_stacks(FeedForward("mlp.fc1", "mlp.activation_fn", "mlp.fc2")),
    when={"use_swiglu_ffn": False},
    input="image",
    positions=None,
    attributes=COMMON
    | VISION
    | attribute_names(
        "mlp_ratio layerscale_value drop_path_rate use_swiglu_ffn apply_layernorm reshape_hidden_states use_mask_token "
        "stage_names out_features out_indices"
    ),
    note="as ViT, with LayerScale",
)
DINOV2_SWIGLU = replace(
    DINOV2,
    name="DINOv2 (SwiGLU)",
    stacks=dinov2_stacks(FeedForward("mlp.gate_proj", "mlp.act_fn", "mlp.down_proj", up="mlp.up_proj")),
    when={"use_swiglu_ffn": True},
    note="the giant model: gated feed-forward",
)
REGISTERS = replace(
    DINOV2,
    name="DINOv2 with registers",
    model_types=("dinov2_with_registers",),
    attributes=DINOV2.attributes | {"num_register_tokens"},
    note="as DINOv2, with register tokens between [CLS] and the patches",
)

DINOV3_PLAIN = FeedForward("mlp.up_proj", "mlp.act_fn", "mlp.down_proj")
DINOV3_GATED = FeedForward("mlp.gate_proj", "mlp.act_fn", "mlp.down_proj", up="mlp.up_proj")
DINOV3 = replace(
    REGISTERS,
    name="DINOv3",
    model_types=("dinov3_vit",),
    stacks=dinov2_stacks(DINOV3_PLAIN, layers="model.layer.*"),
    when={"use_gated_mlp": False},
    attributes=REGISTERS.attributes
    | attribute_names(
        "attention_dropout rope_theta query_bias key_bias value_bias proj_bias mlp_bias use_gated_mlp pos_embed_shift "
        "pos_embed_jitter pos_embed_rescale"
    ),
    note="as DINOv2 with registers, rotary positions",
)
DINOV3_SWIGLU = replace(
    DINOV3,
    name="DINOv3 (SwiGLU)",
    stacks=dinov2_stacks(DINOV3_GATED, layers="model.layer.*"),
    when={"use_gated_mlp": True},
    note="the huge and 7B models: gated feed-forward",
)


def beit_blocks(attention: Attention, feed_forward: FeedForward, *, scaled: bool = True) -> tuple[Block, ...]:
    """LN ATTN SCALE RES LN FF SCALE RES."""
    parts: list[tuple[Attention | FeedForward, str]] = [
        (attention, "layernorm_before"),
        (feed_forward, "layernorm_after"),
    ]
    return tuple(
        Block((Branch(op, pre=Norm(norm), scale=f"lambda_{n}" if scaled else None),))
        for n, (op, norm) in enumerate(parts, start=1)
    )


def data2vec_stacks(*, scaled: bool = True) -> tuple[Stack, ...]:
    attention = Attention(
        "attention.attention", "attention.attention.value", "attention.output.dense", probabilities="matmul"
    )
    feed_forward = FeedForward("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense")
    return (Stack("encoder", "encoder.layer.*", beit_blocks(attention, feed_forward, scaled=scaled)),)


def beit_stacks(*, scaled: bool = True) -> tuple[Stack, ...]:
    feed_forward = FeedForward("mlp.fc1", "mlp.activation_fn", "mlp.fc2")
    return (Stack("encoder", "layers.*", beit_blocks(ATTENTION, feed_forward, scaled=scaled)),)


UNSCALED = {"layer_scale_init_value": 0.0}
BEIT = Family(
    name="BEiT",
    model_types=("beit",),
    stacks=beit_stacks(),
    input="image",
    positions=None,
    attributes=COMMON
    | VISION
    | attribute_names(
        "use_mask_token use_absolute_position_embeddings use_relative_position_bias use_shared_relative_position_bias "
        "layer_scale_init_value drop_path_rate use_mean_pooling pool_scales use_auxiliary_head auxiliary_loss_weight "
        "auxiliary_channels auxiliary_num_convs auxiliary_concat_input semantic_loss_ignore_index add_fpn "
        "reshape_hidden_states stage_names out_features out_indices"
    ),
    note="as ViT, with LayerScale; relative positions affect only the attention scores",
)
BEIT_UNSCALED = replace(
    BEIT, name="BEiT (unscaled)", stacks=beit_stacks(scaled=False), when=UNSCALED, note="as BEiT, without LayerScale"
)
DATA2VEC_VISION = replace(
    BEIT, name="Data2Vec (vision)", model_types=("data2vec-vision",), stacks=data2vec_stacks(), note="as BEiT"
)
DATA2VEC_UNSCALED = replace(
    DATA2VEC_VISION,
    name="Data2Vec (vision, unscaled)",
    stacks=data2vec_stacks(scaled=False),
    when=UNSCALED,
    note="as BEiT, without LayerScale",
)

FAMILIES = (
    VIT,
    DEIT,
    DINOV2,
    DINOV2_SWIGLU,
    REGISTERS,
    DINOV3,
    DINOV3_SWIGLU,
    BEIT_UNSCALED,  # before the same types with LayerScale
    BEIT,
    DATA2VEC_UNSCALED,
    DATA2VEC_VISION,
)
