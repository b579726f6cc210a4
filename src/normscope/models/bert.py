"""Post-LN encoders of the BERT kind: ``LN(x + ATTN(x))``, then ``LN(x + FF(x))``, with biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from normscope.models.spec import Attention, Block, Branch, Family, FeedForward, Norm, Refusal


def post_ln(attention: Attention, norm1: str, feed_forward: FeedForward, norm2: str) -> tuple[Block, ...]:
    """ATTN RES LN FF RES LN."""
    return (
        Block((Branch(attention),), after=Norm(norm1)),
        Block((Branch(feed_forward),), after=Norm(norm2)),
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Attributes that every transformers config has and that only touch training, heads or bookkeeping.
COMMON = _names(
    "transformers_version architectures output_hidden_states output_attentions return_dict dtype torch_dtype "
    "chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type vocab_size initializer_range "
    "pad_token_id bos_token_id eos_token_id sep_token_id tie_word_embeddings use_cache _name_or_path model_type "
    "_attn_implementation_autoset attn_implementation"
)
SIZES = _names(
    "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob max_position_embeddings type_vocab_size layer_norm_eps classifier_dropout "
    "is_decoder add_cross_attention"
)

BERT = Family(
    name="BERT",
    model_types=("bert",),
    layers="encoder.layer.*",
    blocks=post_ln(
        Attention("attention.self", "attention.self.value", "attention.output.dense"),
        "attention.output.LayerNorm",
        FeedForward("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
        "output.LayerNorm",
    ),
    attributes=COMMON | SIZES,
    refusals=(
        Refusal(
            "add_cross_attention",
            False,
            "its decoder layers have a cross-attention block that the family does not list",
        ),
    ),
    note="post-LN, learned absolute positions, biases everywhere",
)

ROBERTA = replace(
    BERT,
    name="RoBERTa",
    model_types=("roberta",),
    reserved_positions="padding",
    note="as BERT; position ids start after the padding id",
)
XLM_ROBERTA = replace(ROBERTA, name="XLM-RoBERTa", model_types=("xlm-roberta",), note="as RoBERTa, 100 languages")
CAMEMBERT = replace(ROBERTA, name="CamemBERT", model_types=("camembert",), note="as RoBERTa, French")
ELECTRA = replace(
    BERT,
    name="ELECTRA",
    model_types=("electra",),
    attributes=BERT.attributes
    | _names("embedding_size summary_type summary_use_proj summary_activation summary_last_dropout"),
    note="as BERT; embeddings may be projected to the hidden size before the first layer",
)

DISTILBERT = Family(
    name="DistilBERT",
    model_types=("distilbert",),
    layers="transformer.layer.*",
    blocks=post_ln(
        Attention("attention", "attention.v_lin", "attention.out_lin"),
        "sa_layer_norm",
        FeedForward("ffn.lin1", "ffn.activation", "ffn.lin2"),
        "output_layer_norm",
    ),
    attributes=COMMON
    | _names(
        "max_position_embeddings sinusoidal_pos_embds n_layers n_heads dim hidden_dim dropout attention_dropout "
        "activation qa_dropout seq_classif_dropout"
    ),
    depth=("n_layers",),
    note="as BERT without token types",
)

ALBERT = Family(
    name="ALBERT",
    model_types=("albert",),
    layers="encoder.albert_layer_groups.*.albert_layers.*",
    blocks=post_ln(
        Attention("attention", "attention.value", "attention.dense"),
        "attention.LayerNorm",
        FeedForward("ffn", "activation", "ffn_output"),
        "full_layer_layer_norm",
    ),
    attributes=COMMON | SIZES | _names("embedding_size num_hidden_groups inner_group_num classifier_dropout_prob"),
    depth=("num_hidden_layers", "inner_group_num"),
    note="as BERT; one shared layer is called again and again, each call is a layer here",
)

MPNET = Family(
    name="MPNet",
    model_types=("mpnet",),
    layers="encoder.layer.*",
    blocks=post_ln(
        Attention("attention.attn", "attention.attn.v", "attention.attn.o", probabilities="attention.attn.dropout"),
        "attention.LayerNorm",
        FeedForward("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
        "output.LayerNorm",
    ),
    attributes=COMMON | SIZES | {"relative_attention_num_buckets"},
    reserved_positions="padding",
    note="as BERT; a relative position bias touches the attention scores only",
)

FAMILIES = (BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, ELECTRA, DISTILBERT, ALBERT, MPNET)
