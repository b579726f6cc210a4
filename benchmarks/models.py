"""The models that are measured, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, BertConfig, BertModel, LlamaConfig, LlamaModel, PreTrainedModel

from normscope import default_model

VOCABULARY = 1000


def bert(layers: int = 12, positions: int = 512) -> PreTrainedModel:
    """The shape of BERT-base with random weights."""
    return _random(num_hidden_layers=layers, max_position_embeddings=positions)


def llama(layers: int = 2) -> PreTrainedModel:
    """The shape of a Llama of a billion parameters with random weights: 32 heads over 8, gated."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    model = LlamaModel(config)
    model.set_attn_implementation("sdpa")
    model.eval()
    return model


SHAPES: dict[str, Callable[[int], PreTrainedModel]] = {"bert": lambda n: bert(n, 2048), "llama": llama}


def minilm() -> PreTrainedModel:
    """The default model, all-MiniLM-L6-v2; raises NormscopeError when it is not installed."""
    model: PreTrainedModel = AutoModel.from_pretrained(
        default_model.default_model_folder(), dtype=torch.float32, attn_implementation="sdpa"
    )
    model.eval()
    return model


def tiny() -> PreTrainedModel:
    """A small model none of whose parameters is trivial, for checking numbers."""
    model = _random(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def _random(**sizes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=VOCABULARY, **sizes), add_pooling_layer=False)
    model.set_attn_implementation("sdpa")
    model.eval()
    return model


def encoding(batch: int, length: int) -> dict[str, Tensor]:
    """`batch` inputs of `length` random tokens, nothing masked."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, VOCABULARY, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
