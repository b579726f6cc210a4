"""Families of text encoders; BERT-like layers are ``LN(x + ATTN(x))``, then ``LN(x + FF(x))``, with biases."""

from __future__ import annotations

from dataclasses import replace

from normscope.models.attributes import COMMON, DECODER, SIZES, attribute_names
from normscope.models.causal import GATED, SELF_ATTENTION
from normscope.models.spec import Attention, Block, Branch, Family, FeedForward, Norm, Refusal, Stack


def post_ln_blocks(attention: Attention, norm1: str, feed_forward: FeedForward, norm2: str) -> tuple[Block, ...]:
    """ATTN RES LN FF RES LN."""
    return (
        Block((Branch(attention),), after=Norm(norm1)),
        Block((Branch(feed_forward),), after=Norm(norm2)),
    )


BERT_BLOCKS = post_ln_blocks(
    Attention("attention.self", "attention.self.value", "attention.output.dense"),
    "attention.output.LayerNorm",
    FeedForward("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
    "output.LayerNorm",
)
ALBERT_BLOCKS = post_ln_blocks(
    Attention("attention", "attention.value", "attention.dense"),
    "attention.LayerNorm",
    FeedForward("ffn", "activation", "ffn_output"),
    "full_layer_layer_norm",
)

BERT = Family(
    name="BERT",
    model_types=("bert", "ernie", "layoutlm"),
    stacks=(Stack("encoder", "encoder.layer.*", BERT_BLOCKS),),
    attributes=COMMON | SIZES | attribute_names("max_2d_position_embeddings task_type_vocab_size use_task_id"),
    refusals=(
        Refusal(
            "add_cross_attention",
            False,
            "its decoder layers have a cross-attention block that the family does not list",
        ),
    ),
    note="post-LN, learned absolute positions, biases everywhere (also ERNIE, and LayoutLM for text)",
)

ROBERTA = replace(
    BERT,
    name="RoBERTa",
    model_types=("roberta", "data2vec-text"),
    reserved_positions="padding",
    note="as BERT; position ids start after the padding id (also Data2Vec's text model)",
)
XLM_ROBERTA = replace(ROBERTA, name="XLM-RoBERTa", model_types=("xlm-roberta",), note="as RoBERTa, 100 languages")
CAMEMBERT = replace(ROBERTA, name="CamemBERT", model_types=("camembert",), note="as RoBERTa, French")
ELECTRA = replace(
    BERT,
    name="ELECTRA",
    model_types=("electra",),
    attributes=BERT.attributes
    | attribute_names("embedding_size summary_type summary_use_proj summary_activation summary_last_dropout"),
    note="as BERT; embeddings may be projected to the hidden size before the first layer",
)

DISTILBERT_BLOCKS = post_ln_blocks(
    Attention("attention", "attention.v_lin", "attention.out_lin"),
    "sa_layer_norm",
    FeedForward("ffn.lin1", "ffn.activation", "ffn.lin2"),
    "output_layer_norm",
)

DISTILBERT = Family(
    name="DistilBERT",
    model_types=("distilbert",),
    stacks=(Stack("encoder", "transformer.layer.*", DISTILBERT_BLOCKS),),
    attributes=COMMON
    | attribute_names(
        "max_position_embeddings sinusoidal_pos_embds n_layers n_heads dim hidden_dim dropout attention_dropout "
        "activation qa_dropout seq_classif_dropout"
    ),
    note="as BERT without token types",
)

ALBERT = Family(
    name="ALBERT",
    model_types=("albert",),
    stacks=(Stack("encoder", "encoder.albert_layer_groups.*.albert_layers.*", ALBERT_BLOCKS),),
    attributes=COMMON
    | SIZES
    | attribute_names("embedding_size num_hidden_groups inner_group_num classifier_dropout_prob"),
    note="as BERT; one shared layer is called repeatedly, and each call counts as a layer",
)

MPNET = Family(
    name="MPNet",
    model_types=("mpnet",),
    stacks=(
        Stack(
            "encoder",
            "encoder.layer.*",
            post_ln_blocks(
                Attention(
                    "attention.attn", "attention.attn.v", "attention.attn.o", probabilities="attention.attn.dropout"
                ),
                "attention.LayerNorm",
                FeedForward("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
                "output.LayerNorm",
            ),
        ),
    ),
    attributes=COMMON | SIZES | {"relative_attention_num_buckets"},
    reserved_positions="padding",
    note="as BERT; a relative position bias affects only the attention scores",
)

DEBERTA = Family(
    name="DeBERTa-v2",
    model_types=("deberta-v2",),
    stacks=(
        Stack(
            "encoder",
            "encoder.layer.*",
            post_ln_blocks(
                Attention(
                    "attention.self",
                    "attention.self.value_proj",
                    "attention.output.dense",
                    probabilities="attention.self.dropout",
                ),
                "attention.output.LayerNorm",
                FeedForward("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
                "output.LayerNorm",
            ),
        ),
    ),
    attributes=COMMON
    | SIZES
    | attribute_names(
        "relative_attention max_relative_positions position_biased_input pos_att_type pooler_dropout "
        "pooler_hidden_act pooler_hidden_size legacy position_buckets norm_rel_ebd share_att_key"
    ),
    refusals=(
        Refusal(
            "conv_kernel_size",
            0,
            "the convolution after its first layer mixes tokens outside of attention, through an activation",
        ),
    ),
    note="as BERT; relative positions affect only the attention scores (also DeBERTa-v3)",
)

MODERNBERT = Family(
    name="ModernBERT",
    model_types=("modernbert",),
    stacks=(
        Stack(
            "encoder",
            "layers.*",
            (
                Block((Branch(Attention("attn", "attn.Wqkv", "attn.Wo", packing="tail"), pre=Norm("attn_norm")),)),
                Block((Branch(FeedForward("mlp.Wi", "mlp.act", "mlp.Wo", up="mlp.Wi"), pre=Norm("mlp_norm")),)),
            ),
        ),
    ),
    attributes=COMMON
    | DECODER
    | attribute_names(
        "initializer_cutoff_factor norm_eps norm_bias cls_token_id local_attention global_attn_every_n_layers "
        "embedding_dropout mlp_dropout decoder_bias classifier_pooling classifier_dropout classifier_bias "
        "classifier_activation deterministic_flash_attn sparse_prediction sparse_pred_ignore_index"
    ),
    computed_positions=True,
    note="pre-LN (an identity before the first attention), gated, rotary positions, local attention in most layers",
)

EUROBERT = Family(
    name="EuroBERT",
    model_types=("eurobert",),
    stacks=(
        Stack(
            "encoder",
            "layers.*",
            (
                Block((Branch(SELF_ATTENTION, pre=Norm("input_layernorm", "rms")),)),
                Block((Branch(GATED, pre=Norm("post_attention_layernorm", "rms")),)),
            ),
        ),
    ),
    attributes=COMMON | DECODER | attribute_names("mask_token_id classifier_pooling"),
    computed_positions=True,
    note="Llama's layers, which attend in both directions",
)
NOMIC_BERT = Family(
    name="NomicBERT",
    model_types=("nomic_bert",),
    stacks=(
        Stack(
            "encoder",
            "layers.*",
            post_ln_blocks(SELF_ATTENTION, "post_attention_layernorm", GATED, "post_mlp_layernorm"),
        ),
    ),
    attributes=COMMON | SIZES | attribute_names("rope_parameters head_dim"),
    computed_positions=True,
    note="post-LN, gated, rotary positions, no biases",
)


def pre_ln_bert(norm1: str, norm2: str, activation: str = "intermediate.intermediate_act_fn") -> tuple[Stack, ...]:
    """BERT's modules in the order LN ATTN RES LN FF RES."""
    attention = Attention("attention.self", "attention.self.value", "attention.output.dense")
    feed_forward = FeedForward("intermediate.dense", activation, "output.dense")
    blocks = (Block((Branch(attention, pre=Norm(norm1)),)), Block((Branch(feed_forward, pre=Norm(norm2)),)))
    return (Stack("encoder", "encoder.layer.*", blocks),)


ROBERTA_PRE = replace(
    ROBERTA,
    name="RoBERTa-PreLayerNorm",
    model_types=("roberta-prelayernorm",),
    stacks=pre_ln_bert("attention.LayerNorm", "intermediate.LayerNorm"),
    note="as RoBERTa, pre-LN",
)
XLM_ROBERTA_XL = replace(
    ROBERTA,
    name="XLM-RoBERTa-XL",
    model_types=("xlm-roberta-xl",),
    stacks=pre_ln_bert("attention.self_attn_layer_norm", "LayerNorm"),
    note="as XLM-RoBERTa, pre-LN",
)
ESM = replace(
    ROBERTA,
    name="ESM",
    model_types=("esm",),
    stacks=pre_ln_bert("attention.LayerNorm", "LayerNorm", "ACT2FN.gelu"),
    when={"position_embedding_type": "absolute"},
    attributes=ROBERTA.attributes
    | attribute_names(
        "mask_token_id rope_theta position_embedding_type emb_layer_norm_before token_dropout vocab_list"
    ),
    note="protein language model: pre-LN, learned positions",
)
ESM_ROTARY = replace(
    ESM,
    name="ESM (rotary)",
    when={"position_embedding_type": "rotary"},
    reserved_positions="none",
    computed_positions=True,
    note="ESM-2: as ESM, rotary positions",
)

FAMILIES = (
    BERT,
    ROBERTA,
    XLM_ROBERTA,
    CAMEMBERT,
    ELECTRA,
    DISTILBERT,
    ALBERT,
    MPNET,
    DEBERTA,
    MODERNBERT,
    EUROBERT,
    NOMIC_BERT,
    ROBERTA_PRE,
    XLM_ROBERTA_XL,
    ESM,
    ESM_ROTARY,
)
