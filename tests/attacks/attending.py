"""Attacks on how a model attends: custom implementations, registered with transformers' attention interface."""

import random
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from tests.attacks.subject import Inapplicable, Subject, attack


def same(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def sharper(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Scores multiplied by two."""
    return sdpa_attention_forward(module, 2 * query, key, value, attention_mask, **kwargs)


def shifted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Every key has the value of another."""
    return sdpa_attention_forward(module, query, key, value.roll(1, 2), attention_mask, **kwargs)


def blind(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Without any mask."""
    return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": False})


def linear(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """No softmax at all."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    made = (query @ key.transpose(2, 3)).relu() @ value
    return (made / key.shape[2]).transpose(1, 2), None


FUNCTIONS = {"same": same, "sharper": sharper, "shifted": shifted, "blind": blind, "linear": linear}
for name, function in FUNCTIONS.items():
    AttentionInterface.register(f"attack_{name}", function)
    AttentionMaskInterface.register(f"attack_{name}", sdpa_mask if name != "linear" else eager_mask)
AttentionInterface.register("attack_maskless", same)  # transformers makes no mask for it


@attack(weight=2)
def attention_function(rng: random.Random, subject: Subject) -> str:
    """A registered implementation that computes the same, or something else."""
    kind = rng.choice([*FUNCTIONS, "maskless", "same"])
    try:
        subject.inside.set_attn_implementation(f"attack_{kind}")
    except (ValueError, ImportError) as error:
        raise Inapplicable(str(error)) from error
    return f"attention: {kind}"


@attack()
def implementation(rng: random.Random, subject: Subject) -> str:
    """Another implementation of transformers."""
    kind = rng.choice(["eager", "sdpa"])
    try:
        subject.inside.set_attn_implementation(kind)
    except (ValueError, ImportError) as error:
        raise Inapplicable(str(error)) from error
    return f"attention: {kind}"


@attack(weight=0.5)
def one_config_attends_otherwise(rng: random.Random, subject: Subject) -> str:
    """One layer with its own config."""
    import copy

    layers = [layer for layer in subject.layers() if any("config" in vars(m) for m in layer.modules())]
    if not layers:
        raise Inapplicable("no config in a layer")
    layer = rng.choice(layers)
    kind = rng.choice(["eager", "sdpa", "attack_sharper", "attack_same"])
    config = copy.deepcopy(subject.inside.config)
    config._attn_implementation_internal = kind
    for module in layer.modules():
        if "config" in vars(module):
            module.config = config
    return f"one layer attends by {kind}"


@attack()
@torch.no_grad()
def attention_setting(rng: random.Random, subject: Subject) -> str:
    """The scale of the scores, a window or a cap, changed on the modules."""
    found = [
        (m, n)
        for layer in subject.layers()
        for m in layer.modules()
        for n in ("scaling", "sliding_window", "attn_logit_softcapping", "is_causal", "scale_attn")
        if n in vars(m) and vars(m)[n] is not None
    ]
    if not found:
        raise Inapplicable("no such setting")
    module, name = rng.choice(found)
    old: Any = vars(module)[name]
    value = {"is_causal": not old, "sliding_window": 2}.get(name, old * 2 if isinstance(old, float) else 2)
    setattr(module, name, value)
    return f"{type(module).__name__}.{name}={value}"
