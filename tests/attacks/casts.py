"""Attacks on numbers: parts in another precision, autocast, training mode, dropout."""

import random
from typing import Any

import torch
from torch import nn

from tests.attacks.subject import Inapplicable, Subject, a_layer, attack

SHORT = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def other_dtype(rng: random.Random, subject: Subject) -> torch.dtype:
    return rng.choice([dtype for dtype in SHORT if dtype != subject.dtype])


@attack(weight=1.5)
def cast_embeddings(rng: random.Random, subject: Subject) -> str:
    dtype = other_dtype(rng, subject)
    subject.inside.get_input_embeddings().to(dtype)
    return f"embeddings in {SHORT[dtype]}"


@attack(weight=1.5)
def cast_part(rng: random.Random, subject: Subject) -> str:
    """A layer, or a module inside one."""
    number, layer = a_layer(rng, subject)
    dtype = other_dtype(rng, subject)
    path, module = rng.choice(list(layer.named_modules()))
    if not any(True for _ in module.parameters()):
        raise Inapplicable("nothing to cast")
    module.to(dtype)
    return f"layer {number} {path} in {SHORT[dtype]}"


@attack()
def cast_norms(rng: random.Random, subject: Subject) -> str:
    """All norms in another precision, as is usual in training."""
    dtype = other_dtype(rng, subject)
    for module in subject.inside.modules():
        if "Norm" in type(module).__name__:
            module.to(dtype)
    return f"norms in {SHORT[dtype]}"


@attack()
def cast_head(rng: random.Random, subject: Subject) -> str:
    head = subject.inside.get_output_embeddings() if subject.head else None
    if head is None:
        raise Inapplicable("no head")
    dtype = other_dtype(rng, subject)
    head.to(dtype)
    return f"head in {SHORT[dtype]}"


@attack(late=False)
def cast_all(rng: random.Random, subject: Subject) -> str:
    dtype = rng.choice([torch.float16, torch.bfloat16])
    subject.model.to(dtype)
    for key in ("pixel_values", "input_features"):
        if key in subject.encoding:
            subject.encoding[key] = subject.encoding[key].to(dtype)
    return f"everything in {SHORT[dtype]}"


@attack(weight=1.5)
def autocast(rng: random.Random, subject: Subject) -> str:
    dtype = rng.choice([torch.bfloat16, torch.float16])
    subject.contexts.append(lambda: torch.autocast("cpu", dtype=dtype))
    return f"autocast to {SHORT[dtype]}"


@attack(weight=0.7)
def grad_modes(rng: random.Random, subject: Subject) -> str:
    """Inference mode, gradients on, another default dtype."""
    kind = rng.choice(["inference mode", "gradients", "default dtype"])
    if kind == "default dtype":
        subject.contexts.append(DefaultDtype)
    else:
        subject.contexts.append(torch.inference_mode if kind == "inference mode" else torch.enable_grad)
    return kind


class DefaultDtype:
    """torch.set_default_dtype for a while."""

    def __enter__(self) -> None:
        self.old = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(self.old)


@attack()
def training(rng: random.Random, subject: Subject) -> str:
    """The model, or one module in it, in training mode."""
    path, module = rng.choice(list(subject.inside.named_modules()))
    module.train()
    return f"{path or 'the model'} in training mode"


@attack(weight=0.5)
def dropout(rng: random.Random, subject: Subject) -> str:
    """Rates of dropout, which do nothing in evaluation."""
    found = [m for m in subject.inside.modules() if isinstance(m, nn.Dropout)]
    if not found:
        raise Inapplicable("no dropout")
    for module in found:
        module.p = 0.5
    return "dropout rates of 0.5"
