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

HEADS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
WIDTH, HEAD_COUNT, KEY_HEADS, HIDDEN, LAYERS, VOCABULARY = 32, 4, 2, 48, 4, 64
# Attribute of a config -> its tiny value.
SIZES: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "n_embed", "embed_dim"), WIDTH)
    | dict.fromkeys(("word_embed_proj_dim", "embedding_size", "input_embedding_size", "output_embedding_size"), WIDTH)
    | dict.fromkeys(("attention_hidden_size", "inner_dim", "hidden_dim_model", "cross_layer_hidden_size"), WIDTH)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEAD_COUNT)
    | dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "attention_heads"), HEAD_COUNT)
    | dict.fromkeys(("num_decoder_attention_heads", "decoder_num_attention_heads"), HEAD_COUNT)
    | dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_kv_heads"), KEY_HEADS)
    | dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size"), HIDDEN)
    | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "d_inner", "dim_ff"), HIDDEN)
    | dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size", "dense_intermediate_size"), HIDDEN)
    | dict.fromkeys(("mlp_hidden_size", "shared_intermediate_size", "intermediate_size_mlp", "ffn_size"), HIDDEN)
    | dict.fromkeys(("encoder_ffn_size", "decoder_ffn_size", "moe_shared_expert_intermediate_size"), HIDDEN)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), LAYERS)
    | dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers", "n_layer_encoder"), LAYERS)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx", "seq_length"), 64)
    | dict.fromkeys(("max_source_positions", "max_seq_len", "max_sequence_length", "max_seq_length"), 64)
    | dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size"), VOCABULARY)
    | dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "kv_channels", "d_head"), 8)
    | dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 12)
    | dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_total"), 4)
    | dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2)
    | dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), 1)
    | dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1)
    | {"type_vocab_size": 2, "rotary_dim": 4, "window_size": 16, "sliding_window": 16, "attention_window": 8}
    | {"qk_head_dim": 16, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "bottleneck_size": 8}
)
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "cls_token_id": 3}
# Sizes that are set even where the default is None, to be derived from sizes that are not there.
DERIVED = ("head_dim",)
NAMES = ("model_type", "transformers_version", "architectures")
# What shrinking by name does not reach: model type of a config, nested ones included -> values.
FURTHER: dict[str, dict[str, Any]] = {}


def model_types() -> dict[str, tuple[str, str]]:
    """Model type -> kind of head and class name, for every type with a causal, masked or sequence-to-sequence head."""
    found: dict[str, tuple[str, str]] = {}
    for kind, names in HEADS.items():
        for model_type, name in names.items():
            found.setdefault(model_type, (kind, name if isinstance(name, str) else name[0]))
    return found


def tiny_config(model_type: str, class_name: str | None = None) -> Any:
    """The default config of a type with every size shrunk, nested configs included.

    Where the model class takes a nested config (the text part of a multimodal type), it is that one.
    """
    wanted = getattr(transformers, class_name or model_types()[model_type][1]).config_class
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fresh = AutoConfig.for_model(model_type)
        if not isinstance(fresh, wanted):
            fresh = next((part for part in vars(fresh).values() if isinstance(part, wanted)), fresh)
        return _shrink(fresh)


def _shrink(config: Any) -> Any:
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
        elif name in DERIVED and value is None:
            changed[name] = SIZES[name]
        elif name not in NAMES and default.get(name) != value:
            changed[name] = value
    if "kv_lora_rank" in given and "num_key_value_heads" in changed:
        changed["num_key_value_heads"] = HEAD_COUNT  # latent attention has no groups
    return type(config)(**(changed | _per_layer(given) | FURTHER.get(config.model_type, {})))


def _per_layer(given: dict[str, Any]) -> dict[str, Any]:
    """The lists with one entry per layer, cut to as few layers as have every combination of kinds that occurs."""
    depth = next((given[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in given), None)
    named = {k: v for k, v in given.items() if isinstance(v, list) and len(v) == depth and not k.endswith(("idxs", "s_ids"))}
    rows = list(zip(*named.values(), strict=True))
    first = [i for i, row in enumerate(rows) if rows.index(row) == i]
    chosen = sorted(first + [i for i in range(len(rows)) if i not in first][: max(0, LAYERS - len(first))])
    if not named:
        return {}
    return {name: [values[i] for i in chosen] for name, values in named.items()} | {"num_hidden_layers": len(chosen)}


def tiny_model(
    model_type: str, class_name: str | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A tiny random model of a type, in evaluation mode."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, class_name)
    config._attn_implementation = "eager"
    cls = getattr(transformers, class_name or model_types()[model_type][1])
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
    """Keyword arguments for a pass over random text: token ids of the vocabulary that are not special."""
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor(sorted(set(range(VOCABULARY)) - set(_special_ids(model.config))))

    def draw(count: int) -> torch.Tensor:
        return allowed[torch.randint(len(allowed), (1, count), generator=generator)]

    inputs: dict[str, Any] = {"input_ids": draw(length)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = draw(length - 2)
    return inputs


def _special_ids(config: Any) -> Iterator[int]:
    for name, value in config.to_dict().items():
        part = vars(config).get(name)
        if isinstance(part, transformers.PreTrainedConfig):
            yield from _special_ids(part)
        elif name.endswith(("token_id", "token_index", "token_ids")):
            yield from value if isinstance(value, list) else [value]
