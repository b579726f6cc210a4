"""Tiny random models of every supported post-LN encoder family, built from configs alone.

No parameter keeps its initial value: norm weights and all biases are away from identity, so that a term that is
dropped or added twice shows up in the numbers, and the attention is clearly not uniform.
"""

import math
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "mpnet")

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "roberta": {"layer_norm_eps": 1e-5},
    "xlm-roberta": {"layer_norm_eps": 1e-5},
    "camembert": {"layer_norm_eps": 1e-5},
    "electra": {"embedding_size": 10},
    "albert": {"embedding_size": 10, "num_hidden_layers": 3},
    "mpnet": {"layer_norm_eps": 1e-5},
}
DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "hidden_act": "activation",
}


def tiny(
    family: str, head: str | None = None, *, dtype: torch.dtype = torch.float64, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A tiny random model of `family` in eval mode: the base model, or with a head such as "MaskedLM".

    `overrides` go to the config under BERT's names (`hidden_act`, `num_hidden_layers`, ...) for every family.
    The parameters are drawn in float64 and then cast: models of one seed differ between dtypes by rounding only.
    The global random state is left as it was.
    """
    options = DEFAULTS | SPECIAL.get(family, {}) | overrides
    if family == "distilbert":
        options = {DISTILBERT_NAMES.get(name, name): value for name, value in options.items()}
    auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto.from_config(AutoConfig.for_model(family, **options)).double()
        randomise(model)
    return model.to(dtype).eval()


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Norm weights 1 + 0.3 N(0,1), other vectors 0.3 N(0,1), matrices 1.25 N(0,1) / sqrt(fan-in): 0.26 at width 24."""
    norm_weights = {id(module.weight) for module in model.modules() if isinstance(module, nn.LayerNorm)}
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if id(parameter) in norm_weights:
            parameter.copy_(1 + 0.3 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(1.25 / math.sqrt(parameter.shape[-1]) * noise)
