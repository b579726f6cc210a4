"""Families of speech encoders, whose tokens are frames that convolutions make of a waveform."""

from __future__ import annotations

from dataclasses import replace

from normscope.models.attributes import COMMON, attribute_names
from normscope.models.encoders import post_ln_blocks
from normscope.models.spec import Attention, Block, Branch, Family, FeedForward, Norm, Refusal, Stack

ATTENTION = Attention("attention", "attention.v_proj", "attention.out_proj")
FEED_FORWARD = FeedForward(
    "feed_forward.intermediate_dense", "feed_forward.intermediate_act_fn", "feed_forward.output_dense"
)
POST = post_ln_blocks(ATTENTION, "layer_norm", FEED_FORWARD, "final_layer_norm")
PRE = (
    Block((Branch(ATTENTION, pre=Norm("layer_norm")),)),
    Block((Branch(FEED_FORWARD, pre=Norm("final_layer_norm")),)),
)

# Before the first layer (convolutions), behind the last (heads), or of the training only.
SPEECH = COMMON | attribute_names(
    "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act layer_norm_eps hidden_dropout "
    "activation_dropout attention_dropout final_dropout layerdrop feat_extract_norm feat_extract_activation "
    "feat_proj_dropout feat_proj_layer_norm feat_quantizer_dropout conv_dim conv_stride conv_kernel conv_bias "
    "num_feat_extract_layers num_conv_pos_embeddings num_conv_pos_embedding_groups conv_pos_kernel_size "
    "conv_pos_batch_norm apply_spec_augment mask_time_prob mask_time_length mask_time_min_masks mask_feature_prob "
    "mask_feature_length mask_feature_min_masks num_codevectors_per_group num_codevector_groups codevector_dim "
    "proj_codevector_dim num_negatives contrastive_logits_temperature diversity_loss_weight ctc_loss_reduction "
    "ctc_zero_infinity use_weighted_layer_sum classifier_proj_size tdnn_dim tdnn_kernel tdnn_dilation "
    "xvector_output_dim adapter_kernel_size adapter_stride num_adapter_layers output_hidden_size"
)
SHORTER = Refusal(
    "add_adapter", False, "convolutions behind its last layer merge frames, so that its outputs are others"
)
BEHIND = Refusal("adapter_attn_dim", None, "an adapter with a norm and an activation follows the feed-forward")

WAV2VEC2 = Family(
    name="wav2vec 2.0",
    model_types=("wav2vec2", "hubert"),
    stacks=(Stack("encoder", "encoder.layers.*", POST),),
    when={"do_stable_layer_norm": False},
    input="audio",
    positions=None,
    attributes=SPEECH | {"do_stable_layer_norm", "adapter_attn_dim"},
    refusals=(SHORTER,),
    note="post-LN; the tokens are frames of 20 ms (also HuBERT)",
)
WAV2VEC2_PRE = replace(
    WAV2VEC2,
    name="wav2vec 2.0 (pre-LN)",
    stacks=(Stack("encoder", "encoder.layers.*", PRE),),
    when={"do_stable_layer_norm": True},
    attributes=SPEECH | {"do_stable_layer_norm"},
    refusals=(SHORTER, BEHIND),
    note="pre-LN: the large models and XLS-R (also HuBERT's)",
)
DATA2VEC_AUDIO = replace(
    WAV2VEC2,
    name="Data2Vec (audio)",
    model_types=("data2vec-audio",),
    when={},
    attributes=SPEECH,
    note="as wav2vec 2.0",
)

FAMILIES = (WAV2VEC2, WAV2VEC2_PRE, DATA2VEC_AUDIO)
