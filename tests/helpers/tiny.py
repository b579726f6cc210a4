"""Tiny random models of every supported family, built from configs alone, and inputs for them.

No parameter keeps its initial value: norm weights, LayerScale, attention sinks and all biases are away from identity,
so that a term that is dropped or added twice shows up in the numbers, and the attention is clearly not uniform.
"""

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from normscope.models.versions import installed_version, minor_version, sdpa_ignores

BERT: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40,
}
COMMON = BERT | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = COMMON | {"num_key_value_heads": 2}
GPT: dict[str, Any] = {
    "vocab_size": 50,
    "n_embd": 24,
    "n_head": 4,
    "n_inner": 36,
    "n_layer": 2,
    "n_positions": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {name: value for name, value in COMMON.items() if name != "intermediate_size"} | {"ffn_dim": 36}
NEOX = COMMON | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.34}}
T5: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 24,
    "d_kv": 5,
    "d_ff": 36,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 36,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
IMAGE: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "image_size": 12,
    "patch_size": 4,
}
EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}

BERT_CONFIGS: dict[str, dict[str, Any]] = {  # layers as in the papers: ATTN RES LN FF RES LN
    "bert": BERT,
    "roberta": BERT | {"layer_norm_eps": 1e-5},
    "xlm-roberta": BERT | {"layer_norm_eps": 1e-5},
    "camembert": BERT | {"layer_norm_eps": 1e-5},
    "electra": BERT | {"embedding_size": 10},
    "distilbert": BERT,
    "albert": BERT | {"embedding_size": 10, "num_hidden_layers": 3},
    "mpnet": BERT | {"layer_norm_eps": 1e-5},
}
OTHER_CONFIGS: dict[str, dict[str, Any]] = {  # "family" or "family-variant"
    "gpt2": GPT,
    "opt": OPT | {"word_embed_proj_dim": 24},
    "opt-post": OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "gpt_neox": NEOX,
    "gpt_neox-sequential": NEOX | {"use_parallel_residual": False},
    "gptj": GPT | {"rotary_dim": 4},
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 4},
    "qwen2": GROUPED,
    "qwen3": GROUPED | {"head_dim": 8},
    "gemma2": GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 10, "sliding_window": 4},
    "gemma3_text": GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 10, "sliding_window": 4},
    "phi3": GROUPED,
    "modernbert": COMMON
    | {
        "num_hidden_layers": 3,
        "local_attention": 6,
        "global_attn_every_n_layers": 3,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "deberta-v2": COMMON | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    "t5": T5 | {"feed_forward_proj": "relu"},
    "t5-gated": T5 | {"feed_forward_proj": "gated-gelu"},
    "bart": BART,
    "marian": BART,
    "whisper": {name: value for name, value in BART.items() if name != "max_position_embeddings"}
    | {"num_mel_bins": 5, "max_source_positions": 8, "max_target_positions": 40},
    "vit": IMAGE | {"intermediate_size": 36},
    "dinov2": IMAGE | {"mlp_ratio": 2},
    "dinov2-swiglu": IMAGE | {"mlp_ratio": 2, "use_swiglu_ffn": True},
    "deit": IMAGE | {"intermediate_size": 36, "architectures": ["DeiTForImageClassification"]},
    "dinov2_with_registers": IMAGE | {"mlp_ratio": 2, "num_register_tokens": 3},
    "mixtral": EXPERTS,
    "qwen3_moe": GROUPED | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "gpt_oss": EXPERTS
    | {
        "head_dim": 8,
        "sliding_window": 4,
        "swiglu_limit": 1.0,  # small, so that the clamp acts
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
DELTA_NET = GROUPED | {
    "head_dim": 8,
    "max_position_embeddings": 100,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
}
MAMBA_HYBRID = GROUPED | {
    "max_position_embeddings": 100,
    "num_hidden_layers": 3,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_proj_bias": True,
}
SHORT_CONVOLUTIONS = GROUPED | {
    "max_position_embeddings": 100,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "conv_L_cache": 3,
}
HYBRID_CONFIGS: dict[str, dict[str, Any]] = {  # recurrences in some or all layers
    "qwen3_next": DELTA_NET | SHARED_EXPERT | {"mlp_only_layers": [2]},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | SHARED_EXPERT,
    "mamba2": {
        "vocab_size": 50,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_heads": 6,
        "head_dim": 8,
        "n_groups": 2,
        "state_size": 5,
        "residual_in_fp32": False,  # rounds a float64 stream
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "lfm2": SHORT_CONVOLUTIONS | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": SHORT_CONVOLUTIONS
    | {"num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "bamba": MAMBA_HYBRID | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA_HYBRID
    | EXPERTS
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "max_position_embeddings": 100,
        "residual_multiplier": 0.5,
        "shared_intermediate_size": 10,
    },
}
CONFIGS = BERT_CONFIGS | OTHER_CONFIGS
DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "hidden_act": "activation",
}

BERT_FAMILIES = tuple(BERT_CONFIGS)
OTHER_FAMILIES = tuple(OTHER_CONFIGS)
FAMILIES = (*BERT_FAMILIES, *OTHER_FAMILIES)
HYBRIDS = tuple(HYBRID_CONFIGS)
ALTERNATING = ("gemma2", "gemma3_text", "gpt_oss")  # sliding and full attention in turn
ENCODER_DECODER = ("t5", "t5-gated", "bart", "marian", "whisper")
IMAGES = ("vit", "deit", "dinov2", "dinov2-swiglu", "dinov2_with_registers")
ENCODERS = (*BERT_FAMILIES, "modernbert", "deberta-v2")  # text models
CAUSAL = tuple(name for name in FAMILIES if name not in (*ENCODERS, *ENCODER_DECODER, *IMAGES))
GATED = (  # the feed-forward is g(a) * u; gpt-oss has another function of a and u
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "t5-gated", "modernbert", "dinov2-swiglu",
    "mixtral", "qwen3_moe",
)  # fmt: skip
FLOAT32_NORMS = (  # transformers computes their norms in float32
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "t5", "t5-gated",
    "mixtral", "qwen3_moe", "gpt_oss",
)  # fmt: skip
NO_TOKEN_CLASSIFICATION = ("opt", "opt-post", "gptj", "gemma3_text")  # transformers has no such head for them


VALUE_PROJECTIONS = [  # in the second layer
    ("bert", "encoder.layer.1.attention.self.value"),
    ("gpt2", "h.1.attn.c_attn"),
    ("gpt_neox", "layers.1.attention.query_key_value"),
    ("llama", "layers.1.self_attn.v_proj"),
    ("deberta-v2", "encoder.layer.1.attention.self.value_proj"),
]


def task_heads(name: str) -> tuple[str, ...]:
    """The heads tested with a family, as in the names of transformers' AutoModelFor... classes."""
    if name in IMAGES:
        return ("ImageClassification",)
    if name in ENCODER_DECODER:
        return ("Seq2SeqLM",)
    first = "MaskedLM" if name in ENCODERS else "CausalLM"
    return (first, "SequenceClassification", *(() if name in NO_TOKEN_CLASSIFICATION else ("TokenClassification",)))


def model_type(name: str) -> str:
    """The model type: "opt-post" is "opt", "deberta-v2" is itself."""
    return name if name in (*BERT_FAMILIES, "deberta-v2") else name.split("-")[0]


def tiny(
    name: str, head: str | None = None, *, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A tiny random model in eval mode: the base model, or with a head such as "CausalLM".

    `overrides` go to the config under the family's own names; DistilBERT takes BERT's. The parameters are drawn in
    float64 and then cast: models of one seed differ between dtypes by rounding only. The global random state is left
    unchanged. A test of a model that the installed transformers does not have, or in which it cannot be recorded, is
    skipped.
    """
    options = (CONFIGS | HYBRID_CONFIGS)[name] | overrides
    if model_type(name) not in CONFIG_MAPPING:
        pytest.skip(f"transformers {installed_version()} has no {model_type(name)}")
    if name == "modernbert" and minor_version(installed_version()) < (5, 1):
        pytest.skip("its attention is in a table of its own")
    if name == "distilbert":
        options = {DISTILBERT_NAMES.get(option, option): value for option, value in options.items()}
    if name in ALTERNATING and "layer_types" not in options:
        kinds = ("sliding_attention", "full_attention")
        options = options | {"layer_types": [kinds[n % 2] for n in range(options["num_hidden_layers"])]}
    if name == "whisper" and head == "Seq2SeqLM":
        head = "SpeechSeq2Seq"
    model = random_model(model_type(name), head, seed=seed, **options)
    if dtype == torch.float64 and any(hasattr(module, "experts") for module in model.modules()):
        model.set_experts_implementation("eager")  # the default, a grouped product, refuses float64
    return model.to(dtype)


def random_model(kind: str, head: str | None = None, *, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A float64 model of any transformers model type, with random parameters, in eval mode."""
    auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(kind, **options)
        attention = {"attn_implementation": "eager"} if sdpa_ignores(config, installed_version()) else {}
        model: PreTrainedModel = auto.from_config(config, **attention).double()
        randomise(model)
    return model.eval()


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Norm weights 1 + 0.3 N(0,1) (Gemma's, which are added to one, 0.3 N), LayerScale 0.5 + 0.3 N, sinks N(0,1).

    Other vectors are 0.3 N(0,1), matrices 1.25 N(0,1) / sqrt(fan-in).
    """
    centre, spread = {}, {}
    for module in model.modules():
        kind = type(module).__name__
        if "Norm" in kind and isinstance(getattr(module, "weight", None), nn.Parameter):
            centre[id(module.weight)] = 0.0 if kind.startswith("Gemma") else 1.0
        if "LayerScale" in kind:
            centre[id(module.lambda1)] = 0.5
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            spread[id(module.sinks)] = 1.0
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.dim() == 4 else parameter.shape[-1]
        scale = 0.3 if parameter.dim() == 1 else 1.25 / math.sqrt(fan_in)
        scale = spread.get(id(parameter), scale)
        parameter.copy_(centre.get(id(parameter), 0.0) + scale * torch.randn_like(parameter))
    for name, buffer in model.named_buffers():
        if name.endswith("final_logits_bias"):
            buffer.copy_(0.3 * torch.randn_like(buffer))


def inputs(name: str, model: PreTrainedModel, length: int = 9, target: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """One input (batch 1) for the model; `target` is the decoder's length in an encoder-decoder.

    Images and spectrograms have the size fixed by the model's config.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> Tensor:
        return torch.randint(3, 50, (1, n), generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator, dtype=torch.float64).to(model.dtype)

    config = model.config
    if name in IMAGES:
        return {"pixel_values": noise(config.num_channels, config.image_size, config.image_size)}
    if name == "whisper":
        encoding = {"input_features": noise(config.num_mel_bins, 2 * config.max_source_positions)}
    else:
        encoding = {"input_ids": ids(length)}
        encoding["attention_mask"] = torch.ones_like(encoding["input_ids"])
    if name in ENCODER_DECODER:
        encoding["decoder_input_ids"] = ids(target)
        encoding["decoder_attention_mask"] = torch.ones_like(encoding["decoder_input_ids"])
    return encoding
