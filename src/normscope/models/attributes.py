"""Config attributes that do not affect the decomposition: sizes, dropout, positions, masks, heads, bookkeeping."""

from __future__ import annotations


def attribute_names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Attributes of every transformers config; they affect only training, heads or bookkeeping.
COMMON = attribute_names(
    "transformers_version architectures output_hidden_states output_attentions return_dict dtype torch_dtype "
    "chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type vocab_size initializer_range "
    "pad_token_id bos_token_id eos_token_id sep_token_id tie_word_embeddings use_cache _name_or_path model_type "
    "_attn_implementation_autoset attn_implementation"
)
SIZES = attribute_names(
    "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob max_position_embeddings type_vocab_size layer_norm_eps classifier_dropout "
    "is_decoder add_cross_attention"
)
# Decoder-only models like Llama; masks and positions affect only the attention scores.
DECODER = attribute_names(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "hidden_activation max_position_embeddings rms_norm_eps rope_parameters rope_theta rope_scaling attention_bias "
    "attention_dropout mlp_bias sliding_window use_sliding_window max_window_layers layer_types pretraining_tp"
)
GPT = attribute_names(
    "n_positions n_embd n_layer n_head n_inner activation_function resid_pdrop embd_pdrop attn_pdrop "
    "layer_norm_epsilon summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout"
)
ENCODER_DECODER = attribute_names(
    "max_position_embeddings num_hidden_layers encoder_layers encoder_ffn_dim encoder_attention_heads decoder_layers "
    "decoder_ffn_dim decoder_attention_heads encoder_layerdrop decoder_layerdrop activation_function d_model dropout "
    "attention_dropout activation_dropout init_std classifier_dropout scale_embedding decoder_start_token_id "
    "forced_eos_token_id is_decoder decoder_vocab_size share_encoder_decoder_embeddings"
)
VISION = attribute_names(
    "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
    "attention_probs_dropout_prob layer_norm_eps image_size patch_size num_channels qkv_bias encoder_stride "
    "pooler_output_size pooler_act"
)
