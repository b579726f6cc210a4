"""Families of encoder-decoders: decoder layers attend to their own tokens, then to the encoder's."""

from __future__ import annotations

from dataclasses import replace

from normscope.models.attributes import COMMON, ENCODER_DECODER, attribute_names
from normscope.models.spec import Attention, Block, Branch, Family, FeedForward, Norm, Stack

SELF = Attention("self_attn", "self_attn.v_proj", "self_attn.out_proj")
CROSS = Attention("encoder_attn", "encoder_attn.v_proj", "encoder_attn.out_proj", cross=True)
FEED_FORWARD = FeedForward("fc1", "activation_fn", "fc2")


def bart_blocks(*, cross: bool, pre: bool) -> tuple[Block, ...]:
    """ATTN RES LN (XATTN RES LN) FF RES LN; with `pre`, each norm comes before its operation."""
    parts: list[tuple[Attention | FeedForward, str]] = [
        (SELF, "self_attn_layer_norm"),
        (CROSS, "encoder_attn_layer_norm"),
        (FEED_FORWARD, "final_layer_norm"),
    ]
    if not cross:
        del parts[1]
    if pre:
        return tuple(Block((Branch(op, pre=Norm(norm)),)) for op, norm in parts)
    return tuple(Block((Branch(op),), after=Norm(norm)) for op, norm in parts)


def bart_stacks(*, pre: bool) -> tuple[Stack, ...]:
    return (
        Stack("encoder", "encoder.layers.*", bart_blocks(cross=False, pre=pre)),
        Stack("decoder", "decoder.layers.*", bart_blocks(cross=True, pre=pre)),
    )


BART = Family(
    name="BART",
    model_types=("bart", "blenderbot-small"),
    stacks=bart_stacks(pre=False),
    attributes=COMMON | ENCODER_DECODER,
    note="post-LN, learned positions (also Blenderbot Small)",
)
MBART = replace(
    BART,
    name="mBART",
    model_types=("mbart", "pegasus", "m2m_100", "blenderbot"),
    stacks=bart_stacks(pre=True),
    attributes=BART.attributes | {"encoder_no_repeat_ngram_size"},
    note="as BART, pre-LN (also Pegasus, M2M-100, NLLB and Blenderbot)",
)
MARIAN = replace(BART, name="Marian", model_types=("marian",), note="as BART, sinusoidal positions")
WHISPER = replace(
    BART,
    name="Whisper",
    model_types=("whisper",),
    stacks=bart_stacks(pre=True),
    input="audio",
    positions="max_target_positions",
    attributes=BART.attributes
    | attribute_names(
        "num_mel_bins max_source_positions max_target_positions suppress_tokens begin_suppress_tokens "
        "use_weighted_layer_sum classifier_proj_size apply_spec_augment mask_time_prob mask_time_length "
        "mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks median_filter_width"
    ),
    note="pre-LN; the encoder tokens are audio frames",
)


def t5_stacks(feed_forward: FeedForward, probabilities: str | None = None) -> tuple[Stack, ...]:
    def attention(path: str, *, cross: bool = False) -> Branch:
        op = Attention(path, f"{path}.v", f"{path}.o", probabilities=probabilities, cross=cross)
        return Branch(op, pre=Norm(f"{path.rpartition('.')[0]}.layer_norm", "rms"))

    def feed(number: int) -> Branch:
        inside = f"layer.{number}.DenseReluDense."
        op = FeedForward(
            inside + feed_forward.into,
            inside + feed_forward.activation,
            inside + feed_forward.out,
            None if feed_forward.up is None else inside + feed_forward.up,
        )
        return Branch(op, pre=Norm(f"layer.{number}.layer_norm", "rms"))

    own, cross = attention("layer.0.SelfAttention"), attention("layer.1.EncDecAttention", cross=True)
    return (
        Stack("encoder", "encoder.block.*", (Block((own,)), Block((feed(1),)))),
        Stack("decoder", "decoder.block.*", (Block((own,)), Block((cross,)), Block((feed(2),)))),
    )


T5 = Family(
    name="T5",
    model_types=("t5", "mt5", "umt5"),
    stacks=t5_stacks(FeedForward("wi", "act", "wo")),
    when={"is_gated_act": False},
    positions=None,
    attributes=COMMON
    | attribute_names(
        "d_model d_kv d_ff num_layers num_decoder_layers num_heads relative_attention_num_buckets "
        "relative_attention_max_distance dropout_rate layer_norm_epsilon initializer_factor feed_forward_proj "
        "classifier_dropout is_decoder dense_act_fn is_gated_act scale_decoder_outputs decoder_start_token_id"
    ),
    note="pre-RMSNorm, relative positions, no biases (also mT5 and UMT5)",
)
T5_GATED = replace(
    T5,
    name="T5 (gated)",
    stacks=t5_stacks(FeedForward("wi_0", "act", "wo", up="wi_1")),
    when={"is_gated_act": True},
    note="T5 v1.1 and Flan-T5: gated feed-forward",
)

FAMILIES = (BART, MBART, MARIAN, WHISPER, T5, T5_GATED)
