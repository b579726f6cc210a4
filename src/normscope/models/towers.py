"""Families of the two halves of models that compare pictures with texts, each a model of its own."""

from __future__ import annotations

from dataclasses import replace

from normscope.models.attributes import COMMON, attribute_names
from normscope.models.encoder_decoders import SELF
from normscope.models.spec import Block, Branch, Family, FeedForward, Norm, Stack

BLOCKS = (
    Block((Branch(SELF, pre=Norm("layer_norm1")),)),
    Block((Branch(FeedForward("mlp.fc1", "mlp.activation_fn", "mlp.fc2"), pre=Norm("layer_norm2")),)),
)
HALF = COMMON | attribute_names(
    "hidden_size intermediate_size projection_dim projection_size num_hidden_layers num_attention_heads hidden_act "
    "layer_norm_eps attention_dropout initializer_factor"
)

CLIP_TEXT = Family(
    name="CLIP (text)",
    model_types=("clip_text_model",),
    stacks=(Stack("decoder", "encoder.layers.*", BLOCKS),),
    attributes=HALF | {"max_position_embeddings"},
    note="pre-LN; each token sees those before it, and the end token stands for the text",
)
SIGLIP_TEXT = replace(
    CLIP_TEXT,
    name="SigLIP (text)",
    model_types=("siglip_text_model",),
    stacks=(Stack("encoder", "encoder.layers.*", BLOCKS),),
    note="as CLIP's text model, but attends in both directions",
)
CLIP_VISION = Family(
    name="CLIP (vision)",
    model_types=("clip_vision_model", "chinese_clip_vision_model"),
    stacks=(Stack("encoder", "encoder.layers.*", BLOCKS),),
    attributes=HALF | attribute_names("image_size patch_size num_channels"),
    input="image",
    positions=None,
    note="pre-LN; patches and a [CLS] token (also Chinese-CLIP)",
)
SIGLIP_VISION = replace(
    CLIP_VISION,
    name="SigLIP (vision)",
    model_types=("siglip_vision_model",),
    note="as CLIP's vision model, but patches only",
)

FAMILIES = (CLIP_TEXT, SIGLIP_TEXT, CLIP_VISION, SIGLIP_VISION)
