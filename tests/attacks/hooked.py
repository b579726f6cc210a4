"""Attacks by hooks: they look at, or change, the input or output of any part of the model."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from tests.attacks.changes import Change, changed, draw
from tests.attacks.recording import NoAnswer, part
from tests.attacks.subject import Inapplicable, Subject, a_layer, attack


class After:
    """A forward hook."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def __call__(self, module: nn.Module, args: Any, made: Any) -> Any:
        return None if self.change.kind == "look" else changed(made, self.change)


class Before:
    """A forward pre-hook with keywords."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.change.kind == "look":
            return None
        if args:
            return (self.change(args[0]), *args[1:]), kwargs
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": self.change(kwargs["hidden_states"])}
        return None


class Restart:
    """A pre-hook of the model that restarts the count of calls in each pass."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.change.restart()


def put(rng: random.Random, subject: Subject, module: nn.Module) -> str:
    change = draw(rng, counted=True)
    before = rng.random() < 0.35
    if change.kind == "some call":
        subject.base.register_forward_pre_hook(Restart(change))
    if before:
        module.register_forward_pre_hook(Before(change), with_kwargs=True, prepend=rng.random() < 0.5)
    else:
        module.register_forward_hook(After(change), prepend=rng.random() < 0.5)
    return f"{'pre-hook' if before else 'hook'}, {change.kind}"


@attack(weight=3)
def hook_part(rng: random.Random, subject: Subject) -> str:
    """At a norm, projection, attention or feed-forward of one layer."""
    number, layer = a_layer(rng, subject)
    path = rng.choice(subject.parts(layer))
    try:
        module = part(layer, path)
    except NoAnswer as error:
        raise Inapplicable(path) from error
    return f"layer {number} {path}: {put(rng, subject, module)}"


@attack(weight=2)
def hook_layer(rng: random.Random, subject: Subject) -> str:
    number, layer = a_layer(rng, subject)
    return f"layer {number}: {put(rng, subject, layer)}"


@attack(weight=1.5)
def hook_inside(rng: random.Random, subject: Subject) -> str:
    """At any module inside a layer, also those that the library does not read: dropouts, activations, sub-blocks."""
    number, layer = a_layer(rng, subject)
    path, module = rng.choice([(path, m) for path, m in layer.named_modules() if path])
    return f"layer {number} {path}: {put(rng, subject, module)}"


@attack(weight=1.5)
def hook_outside(rng: random.Random, subject: Subject) -> str:
    """At embeddings, the base model, final norms, heads and the model itself."""
    layers = {id(m) for layer in subject.layers() for m in layer.modules()}
    found = [(path, m) for path, m in subject.inside.named_modules() if id(m) not in layers]
    path, module = rng.choice(found)
    return f"{path or 'the model'}: {put(rng, subject, module)}"


class OtherIds:
    """A pre-hook of the whole model that changes the input before anything else sees it."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = kwargs.get(self.key)
        if not isinstance(given, Tensor):
            return None
        other = given.flip(-1) if self.key.endswith("ids") else given * 0.5
        return args, {**kwargs, self.key: other}


@attack()
def hook_input(rng: random.Random, subject: Subject) -> str:
    """The model, with or without its head, gets another input than the user's."""
    keys = [key for key in ("input_ids", "pixel_values", "input_features") if key in subject.encoding]
    key = rng.choice(keys)
    module = rng.choice([subject.inside, subject.base, subject.model])
    module.register_forward_pre_hook(OtherIds(key), with_kwargs=True)
    return f"{type(module).__name__}: a pre-hook changes {key}"


@attack(weight=0.5)
def parametrize(rng: random.Random, subject: Subject) -> str:
    """A weight computed anew whenever it is read: spectral or weight norm, as torch does it."""
    number, layer = a_layer(rng, subject)
    found = [(path, m) for path, m in layer.named_modules() if type(m) is nn.Linear]
    if not found:
        raise Inapplicable("no linear module")
    path, module = rng.choice(found)
    from torch.nn.utils import parametrizations, prune

    kind = rng.choice(["weight norm", "prune"])
    if kind == "weight norm":
        parametrizations.weight_norm(module)
        module.parametrizations.weight.original0.data.mul_(1.3)
    else:
        with torch.no_grad():
            prune.random_unstructured(module, "weight", 0.3)
    return f"layer {number} {path}: {kind}"
