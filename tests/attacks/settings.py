"""Attacks on configs and on what is wrapped around a model."""

import random
from typing import Any

import torch
from torch import nn

from tests.attacks.subject import Inapplicable, Subject, attack

EDITS: dict[str, tuple[Any, ...]] = {
    "layer_norm_eps": (1e-2,),
    "rms_norm_eps": (1e-2,),
    "layer_norm_epsilon": (1e-2,),
    "num_hidden_layers": (1, 3, 7),
    "n_layer": (1, 3, 7),
    "n_layers": (1, 5),
    "num_layers": (1, 5),
    "num_decoder_layers": (1, 5),
    "encoder_layers": (1, 5),
    "decoder_layers": (1, 5),
    "num_attention_heads": (1, 2, 8),
    "n_head": (2,),
    "n_heads": (2,),
    "num_key_value_heads": (1, 4),
    "hidden_act": ("relu",),
    "is_decoder": (True,),
    "use_cache": (False, True),
    "sliding_window": (2, None),
    "local_attention": (2,),
    "position_embedding_type": ("relative_key",),
    "output_attentions": (True,),
    "output_hidden_states": (True,),
    "max_position_embeddings": (4, 1000),
    "n_positions": (4, 1000),
    "pad_token_id": (7, None),
    "use_parallel_residual": (True, False),
    "do_layer_norm_before": (True, False),
    "attn_logit_softcapping": (1.0, None),
    "final_logit_softcapping": (1.0, None),
    "num_experts_per_tok": (1, 3),
    "model_type": ("bert", "llama", "nothing"),
    "num_hidden_groups": (1, 3),
    "inner_group_num": (1, 2),
    "vocab_size": (30, 100),
    "type_vocab_size": (1, 5),
    "layer_types": (None, ["full_attention"] * 9),
}


@attack(weight=2.5)
def config_edit(rng: random.Random, subject: Subject) -> str:
    """An attribute of the config edited after the model was made."""
    config: Any = subject.inside.config
    names = [name for name in EDITS if hasattr(config, name)]
    if not names:
        raise Inapplicable("nothing to edit")
    name = rng.choice(names)
    value = rng.choice(EDITS[name])
    try:
        setattr(config, name, value)
    except Exception as error:  # transformers checks some of them
        raise Inapplicable(str(error)) from error
    return f"config.{name}={value!r}"


@attack(weight=1.5)
def return_tuples(rng: random.Random, subject: Subject) -> str:
    subject.inside.config.return_dict = False
    return "config.return_dict=False"


@attack(late=False)
def compile_wrapper(rng: random.Random, subject: Subject) -> str:
    """What torch.compile returns, before it has compiled anything."""
    if subject.model is not subject.inside:
        raise Inapplicable("wrapped already")
    try:
        subject.model = torch.compile(subject.model)
    except Exception as error:  # a patched forward may be nothing that it takes
        raise Inapplicable(str(error)) from error
    return "torch.compile"


@attack()
def compile_layer(rng: random.Random, subject: Subject) -> str:
    """`module.compile()` in place, with a backend that leaves everything as it is: the hooks stay."""
    layers = subject.lists()[0]
    number = rng.randrange(len(layers))
    layers[number] = Optimized(layers[number])
    return f"layer {number} in a wrapper such as torch.compile's"


class Optimized(nn.Module):
    """As torch._dynamo.OptimizedModule: the module under `_orig_mod`, whose attributes it has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_mod":
            return self._modules[name]
        return getattr(self._orig_mod, name)


@attack(late=False, weight=0.7)
def data_parallel(rng: random.Random, subject: Subject) -> str:
    subject.model = nn.DataParallel(subject.model)
    return "DataParallel"


class Around(nn.Module):
    """A user's own class around a model: it may do more than call it."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, **kwargs: Any) -> Any:
        return (self.factor * self.model(**kwargs)[0],)

    def get_base_model(self) -> nn.Module:
        return self.model


@attack(late=False, weight=0.7)
def own_class(rng: random.Random, subject: Subject) -> str:
    subject.model = Around(subject.model, rng.choice([1.0, 2.0]))
    return "in a new class"


@attack(weight=0.7)
def checkpointing(rng: random.Random, subject: Subject) -> str:
    """Gradient checkpointing switched on, which does nothing in evaluation."""
    try:
        subject.inside.gradient_checkpointing_enable()
    except ValueError as error:
        raise Inapplicable(str(error)) from error
    return "gradient checkpointing"


@attack(weight=0.7)
def frozen_parameters(rng: random.Random, subject: Subject) -> str:
    subject.inside.requires_grad_(rng.random() < 0.5)
    return "requires_grad_"


@attack(weight=0.7)
def tied(rng: random.Random, subject: Subject) -> str:
    """Two linear modules with one weight."""
    found = [m for layer in subject.layers() for m in layer.modules() if type(m) is nn.Linear]
    by_shape: dict[Any, list[nn.Linear]] = {}
    for module in found:
        by_shape.setdefault(module.weight.shape, []).append(module)
    groups = [some for some in by_shape.values() if len(some) > 1]
    if not groups:
        raise Inapplicable("no two of one shape")
    one, other = rng.sample(rng.choice(groups), 2)
    other.weight = one.weight
    return "two weights tied"
