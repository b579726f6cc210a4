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


def dinov2_stacks(feed_forward: FeedForward, attention: Attention = ATTENTION) -> tuple[Stack, ...]:
    blocks = (
        Block((Branch(attention, pre=Norm("norm1"), scale="layer_scale1.lambda1"),)),
        Block((Branch(feed_forward, pre=Norm("norm2"), scale="layer_scale2.lambda1"),)),
    )
    return (Stack("encoder", "encoder.layer.*", blocks),)


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

FAMILIES = (VIT, DEIT, DINOV2, DINOV2_SWIGLU, REGISTERS)
