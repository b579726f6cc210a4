"""A tiny, random model of any type in transformers, built from its config alone by shrinking every size it has.

No parameter keeps its initial value: matrices have order-one columns, vectors (biases, norm weights, scales) are moved
away from identity.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto

HEADS = {  # the first that a type has
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
SAMPLES = 2960  # of which the convolutions of wav2vec 2.0 make nine tokens
WIDTH, HEAD_COUNT, KEY_HEADS, HIDDEN, LAYERS, VOCABULARY = 32, 4, 2, 48, 4, 64
# Tiny value -> the attributes of configs that get it.
NAMED_SIZES: tuple[tuple[int, str], ...] = (
    (WIDTH, "hidden_size d_model n_embd dim emb_dim embed_dim word_embed_proj_dim embedding_size"),
    (WIDTH, "input_embedding_size output_embedding_size"),
    (WIDTH, "embedding_dim encoder_hidden_size hidden_size_global d_latents prediction_head_size audio_hidden_size"),
    (HEAD_COUNT, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (HEAD_COUNT, "num_encoder_attention_heads attention_heads num_decoder_attention_heads linear_num_value_heads"),
    (HEAD_COUNT, "num_self_attention_heads num_cross_attention_heads linear_num_heads"),
    (HEAD_COUNT, "swa_num_attention_heads num_attention_heads_per_layer"),
    (KEY_HEADS, "num_key_value_heads num_kv_heads kv_n_heads"),
    (KEY_HEADS, "swa_num_key_value_heads linear_num_key_heads index_n_heads"),
    (HIDDEN, "intermediate_size n_inner ffn_dim d_ff hidden_dim ffn_hidden_size encoder_ffn_dim decoder_ffn_dim"),
    (HIDDEN, "moe_intermediate_size d_inner dim_ff shared_expert_intermediate_size expert_ffn_hidden_size dff mlp_dim"),
    (HIDDEN, "dense_intermediate_size shared_intermediate_size intermediate_size_mlp"),
    (HIDDEN, "moe_shared_expert_intermediate_size feed_forward_size"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"),
    (LAYERS, "num_encoder_layers num_self_attends_per_block"),
    (64, "max_position_embeddings n_positions max_target_positions n_ctx max_source_positions max_seq_len"),
    (64, "max_2d_position_embeddings max_encoder_position_embeddings"),
    (64, "max_decoder_position_embeddings position_bias_max_distance rel_extent mamba_d_ssm"),
    (VOCABULARY, "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size vocab_size_per_layer_input"),
    (VOCABULARY, "entity_vocab_size pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab"),
    (32, "image_size crop_size nemo_conv_channels ext_pw_out_channel depthwise_separable_out_channel output_dim"),
    (16, "qk_head_dim relative_attention_max_distance position_bias_num_buckets index_head_dim intra_bottleneck_size"),
    (12, "q_lora_rank kv_lora_rank"),
    (8, "head_dim d_kv kv_channels d_head dim_head swa_head_dim attention_head_size qk_nope_head_dim qk_rope_head_dim"),
    (8, "v_head_dim mamba_n_heads mamba_d_head mamba_num_heads mamba_head_dim linear_head_dim linear_key_head_dim"),
    (8, "linear_value_head_dim mamba_d_state ssm_state_size state_size hidden_size_per_layer_input"),
    (8, "relative_attention_num_buckets query_pre_attn_scalar block_multiple_of num_latents entity_emb_size"),
    (8, "pronunciation_embed_dim shape_embed_dim downsample_hidden_size output_channels o_lora_rank hc_lowrank"),
    (8, "router_hidden_size"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts rotary_dim sliding_window"),
    (4, "window_size attention_window local_attention attention_window_size sliding_window_size attention_chunk_size"),
    (4, "index_topk block_size local_radius mamba_chunk_size chunk_size laurel_rank num_filters index_block_size"),
    (2, "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts moe_top_k type_vocab_size o_groups"),
    (2, "zero_expert_num n_groups mamba_dt_rank time_step_rank num_sparse_encoder_layers num_sparse_decoder_layers"),
    (2, "index_topk_blocks"),
    (1, "n_group topk_group num_expert_group n_shared_experts moe_num_shared_experts num_shared_experts"),
    (1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
)
SIZES = {name: value for value, names in NAMED_SIZES for name in names.split()}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "cls_token_id": 3}
# Sizes that are set even where the default is None.
NEEDED = {"head_dim", "num_key_value_heads", "vocab_size"}
NEEDED |= {"num_experts_per_tok", "n_routed_experts", "n_shared_experts"}
LOCAL, GLOBAL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
MIXED, DENSE_FIRST = [GLOBAL, LOCAL] * 2, ["dense", "sparse", "sparse", "sparse"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What shrinking by name does not reach: model type of a config, nested ones included -> values.
FURTHER: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 32},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"use_cache": False},
    "chinese_clip_vision_model": {"patch_size": 8},
    "clip_vision_model": {"patch_size": 8},
    "cohere2_moe": {"mlp_layer_types": DENSE_FIRST},
    "cohere_compass_text": {"layer_types": MIXED, "rope_parameters": {LOCAL: ROPE, GLOBAL: ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": KEY_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v4": {
        "layer_types": [LOCAL, *["heavily_compressed_attention", "compressed_sparse_attention"] * 2][:LAYERS],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 1,
        "index_topk": 2,
    },
    "dots1": {"layer_types": MIXED},
    "esm": {"mask_token_id": 4, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": HEAD_COUNT},
    "funnel": {"block_sizes": [2, 1, 1], "num_decoder_layers": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "granitemoehybrid": {"layer_types": [LINEAR, GLOBAL] * 2},
    "hrm_text": {"num_hidden_layers": 2},
    "idefics3_vision": {"patch_size": 8},
    "internvl_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
    "qianfan_ocr_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
    "inkling_text": {"mlp_layer_types": DENSE_FIRST},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "laguna": {"layer_types": MIXED},
    "lfm2": {"layer_types": ["conv", GLOBAL] * 2},
    "lfm2_moe": {"layer_types": ["conv", GLOBAL] * 2},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": MIXED, "mlp_layer_types": DENSE_FIRST},
    "minicpm3": {"dim_model_base": 16},
    "minimax_m3_vl_text": {"layer_types": [GLOBAL, "minimax_m3_sparse"] * 2, "mlp_layer_types": DENSE_FIRST},
    "ministral": {"layer_types": MIXED},
    "mpnet": {"relative_attention_num_buckets": 32},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": VOCABULARY - 1},
    "phi4_multimodal_audio": {"num_blocks": 1, "chunk_size": -1},
    "qwen2": {"layer_types": MIXED, "use_sliding_window": True, "sliding_window": 4},
    "qwen3": {"layer_types": MIXED, "use_sliding_window": True, "sliding_window": 4},
    "qwen2_moe": {"layer_types": MIXED, "use_sliding_window": True, "mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "eos_token_id": 2,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [8, 24],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "smolvlm_vision": {"patch_size": 8},
    "smollm3": {"layer_types": MIXED, "use_sliding_window": True, "sliding_window": 4},
    "vibevoice_acoustic_tokenizer_encoder": {"downsampling_ratios": [2, 2], "depths": [1, 1, 1]},
    "xlstm": {"num_blocks": LAYERS, "qk_dim_factor": 2.0, "v_dim_factor": 2.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": [LINEAR, "hybrid"] * 2},
    "zamba2": {"layers_block_type": [LINEAR, "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 4},
}
ENDINGS = {"image": ("_vision_model", "_vision"), "audio": ("_audio", "_audio_encoder", "_speech")}
# Types of images and sound without a Transformer, and of several inputs at once.
NO_TRANSFORMER = (
    "bit", "convnext", "convnextv2", "dinov3_convnext", "efficientnet", "hgnet_v2", "mobilenet_v1", "mobilenet_v2",
    "poolformer", "pp_lcnet", "regnet", "resnet", "textnet", "timm_wrapper", "timm_backbone", "perceiver", "clip",
    "siglip", "siglip2", "metaclip_2", "shieldgemma2", "vision-text-dual-encoder", "speech-encoder-decoder",
    "llama4", "mllama", "cohere2_vision", "aya_vision", "granite4_vision", "hyperclovax_vision_v2", "dinat",
    "pe_audio",
)  # fmt: skip
# Types that do not run on token ids alone -> the reason.
CANNOT = {
    "gemma3n": "needs the timm package for its vision tower",
    "gemma4_assistant": "needs the hidden states and keys of the model that it drafts for",
    "gemma4_unified_assistant": "needs the hidden states and keys of the model that it drafts for",
    "mra": "its attention outputs zeros without a CUDA kernel",
    "voxtral_realtime": "adds the encoding of audio to every token",
}


def model_types() -> dict[str, tuple[str, str]]:
    """Model type -> kind of head and class name, for every type with a causal, masked or sequence-to-sequence head."""
    found: dict[str, tuple[str, str]] = {}
    for kind, names in HEADS.items():
        for model_type, name in names.items():
            found.setdefault(model_type, (kind, name if isinstance(name, str) else name[0]))
    return found


def media_types() -> dict[str, dict[str, str]]:
    """Model type -> class name, for "image" and "audio": every type whose Transformer reads images or sound alone."""
    heads = {
        "image": (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_MAPPING_NAMES),
        "audio": (
            auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
            auto.MODEL_FOR_CTC_MAPPING_NAMES,
            auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        ),
    }
    found: dict[str, dict[str, str]] = {}
    for kind, mappings in heads.items():
        named = {name for mapping in mappings for name in mapping}
        named |= {name for name in auto.MODEL_MAPPING_NAMES if name.endswith(ENDINGS[kind])}
        found[kind] = {
            name: given if isinstance(given := auto.MODEL_MAPPING_NAMES[name], str) else given[0]
            for name in sorted(named - set(NO_TRANSFORMER) - set(model_types()))
            if name in auto.MODEL_MAPPING_NAMES
        }
    return found


TEXT_HALVES = {"clip_text_model": "CLIPTextModel", "siglip_text_model": "SiglipTextModel"}  # without a head


def class_of(model_type: str) -> str:
    """The class of the tiny model of a type, with a head if it is a model of texts that has one."""
    if model_type in TEXT_HALVES:
        return TEXT_HALVES[model_type]
    media = next((types[model_type] for types in media_types().values() if model_type in types), None)
    return media or model_types()[model_type][1]


def tiny_config(model_type: str, class_name: str | None = None, **options: Any) -> Any:
    """The default config of a type with every size shrunk, nested configs included; `options` are set afterwards.

    If the model class takes one of the nested configs (the text part of a multimodal type), only that one is returned.
    """
    wanted = getattr(transformers, class_name or class_of(model_type)).config_class
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fresh = AutoConfig.for_model(model_type)
        if not isinstance(fresh, wanted):
            fresh = next((part for part in vars(fresh).values() if isinstance(part, wanted)), fresh)
        config = _shrink(fresh)
    for name, value in options.items():
        setattr(config, name, value)
    return config


def _shrink(config: Any) -> Any:
    """A config of the same class that is given only what differs from the defaults, so that it derives the rest."""
    given, default = config.to_dict(), type(config)().to_dict()
    changed: dict[str, Any] = {}
    for name, value in given.items():
        part = vars(config).get(name)
        if isinstance(part, transformers.PreTrainedConfig):
            changed[name] = _shrink(part).to_dict()
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            changed[name] = SIZES[name]
        elif name in SPECIAL and isinstance(value, int | list):
            changed[name] = SPECIAL[name]
        elif name in NEEDED and value is None:
            changed[name] = SIZES[name]
        elif name == "rope_parameters" and isinstance(value, dict):
            changed[name] = _rotate_half(value)
        elif default.get(name) != value:
            changed[name] = value
    if "kv_lora_rank" in given and "num_key_value_heads" in changed:
        changed["num_key_value_heads"] = HEAD_COUNT  # latent attention has no groups
    further = copy.deepcopy(FURTHER.get(config.model_type, {}))  # configs may change the lists that they are given
    return type(config)(**(changed | _per_layer(config, given) | further))


def _rotate_half(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters that rotate at least half of a head: a quarter of eight dimensions is a single angle."""
    if isinstance(factor := rope.get("partial_rotary_factor"), float):
        return rope | {"partial_rotary_factor": max(factor, 0.5)}
    return {name: _rotate_half(value) if isinstance(value, dict) else value for name, value in rope.items()}


def _per_layer(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Every list with one entry per layer, cut to the first `LAYERS` layers or more that show every kind of layer."""
    depth = getattr(config, "num_hidden_layers", 0)
    lists = {name: values for name, values in given.items() if isinstance(values, list) and len(values) == depth}
    lists = {name: values for name, values in lists.items() if values != list(range(depth))}  # not indices of layers
    if not lists:
        return {}
    rows = list(zip(*lists.values(), strict=True))
    first = [i for i, row in enumerate(rows) if rows.index(row) == i]
    chosen = sorted(first + [i for i in range(len(rows)) if i not in first][: max(0, LAYERS - len(first))])
    cut = {name: [SIZES.get(name, values[i]) for i in chosen] for name, values in lists.items()}
    return cut | {name: len(chosen) for name in ("num_hidden_layers", "num_layers") if name in given}


def tiny_model(
    model_type: str,
    class_name: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> PreTrainedModel:
    """A tiny random model of a type, in evaluation mode; `options` go to its config."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, class_name, **options)
    config._attn_implementation = config._experts_implementation = "eager"
    cls = getattr(transformers, class_name or class_of(model_type))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = cls(config)
    randomise(model, seed)
    return model.to(dtype).eval()


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter order-one random values: matrices at 1/sqrt(in), vectors plus noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.3 * noise)


def inputs_for(model: PreTrainedModel, length: int = 9, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments for a pass over random text, in which no token is special, or over a random picture or sound.

    A picture has the size of the config, and a sound `SAMPLES` samples. Encoder-decoders get a shorter target too, and
    models of audio codes one row of ids per codebook.
    """
    generator = torch.Generator().manual_seed(seed)
    config, key = model.config, model.main_input_name
    if key in ("pixel_values", "input_values"):
        picture = key == "pixel_values"
        shape = (config.num_channels, config.image_size, config.image_size) if picture else (SAMPLES,)
        return {key: torch.randn(1, *shape, generator=generator).to(model.dtype)}
    allowed = torch.tensor(sorted(set(range(VOCABULARY)) - set(_special_ids(model.config))))
    rows = model.config.num_codebooks if model.config.model_type.startswith("musicgen") else 1

    def draw(count: int) -> torch.Tensor:
        return allowed[torch.randint(len(allowed), (rows, count), generator=generator)]

    inputs: dict[str, Any] = {"input_ids": draw(length)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = draw(max(1, length - 2))
    return inputs


def _special_ids(config: Any) -> Iterator[Any]:
    """The special token ids that a config and its nested configs name."""
    for name, value in config.to_dict().items():
        part = vars(config).get(name)
        if isinstance(part, transformers.PreTrainedConfig):
            yield from _special_ids(part)
        elif name.endswith(("token_id", "token_index", "token_ids")):
            yield from value if isinstance(value, list) else [value]
