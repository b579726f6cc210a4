"""Attacks on the code around a model, which last as long as the case: hooks for all modules, patched classes and
functions."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tests.attacks.changes import Change, changed, draw
from tests.attacks.recording import NoAnswer, part
from tests.attacks.subject import Inapplicable, Subject, a_layer, attack


@contextmanager
def for_all_modules(kind: type[nn.Module], change: Change) -> Iterator[None]:
    """A forward hook on every module of a class, in all models."""

    def hook(module: nn.Module, args: Any, made: Any) -> Any:
        return changed(made, change) if type(module) is kind else None

    handle = register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def a_class(rng: random.Random, subject: Subject) -> type[nn.Module]:
    """The class of a part of a layer, from transformers only: the judge uses torch's classes too."""
    _, layer = a_layer(rng, subject)
    classes = {type(layer)}
    for path in subject.parts(layer):
        try:
            classes.add(type(part(layer, path)))
        except NoAnswer:
            continue
    found = sorted(
        (one for one in classes if one.__module__.startswith("transformers.models")), key=lambda c: c.__name__
    )
    if not found:
        raise Inapplicable("no class of transformers")
    return rng.choice(found)


@attack(weight=0.7)
def global_hook(rng: random.Random, subject: Subject) -> str:
    kind, change = a_class(rng, subject), draw(rng)
    subject.surroundings.append(lambda: for_all_modules(kind, change))
    return f"a hook of all {kind.__name__}, {change.kind}"


@attack()
def patched_class(rng: random.Random, subject: Subject) -> str:
    """`BertSelfAttention.forward = mine`, as some libraries do."""
    kind, change = a_class(rng, subject), draw(rng)
    own: Any = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return changed(own(self, *args, **kwargs), change)

    subject.surroundings.append(lambda: replaced(kind, "forward", forward))
    return f"{kind.__name__}.forward patched, {change.kind}"


@attack()
def patched_function(rng: random.Random, subject: Subject) -> str:
    """A function that transformers' code or torch's has, replaced in its module."""
    _, layer = a_layer(rng, subject)
    file: Any = sys.modules[type(layer).__module__]
    places = [(file, name) for name in ("eager_attention_forward", "apply_rotary_pos_emb") if hasattr(file, name)]
    owner, name = rng.choice([*places, (nn.functional, "scaled_dot_product_attention"), (nn.functional, "softmax")])
    own = getattr(owner, name)
    factor = rng.choice([1.0, 0.9])

    def function(*args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        if isinstance(made, Tensor):
            return made * factor
        if isinstance(made, tuple):
            return (made[0] * factor, *made[1:])
        return made

    subject.surroundings.append(lambda: replaced(owner, name, function))
    return f"{name} patched, times {factor}"


@attack(weight=0.5)
def default_device(rng: random.Random, subject: Subject) -> str:
    """A default device, deterministic algorithms, or no oneDNN."""
    kind = rng.choice(["device", "deterministic", "mkldnn"])

    @contextmanager
    def setting() -> Iterator[None]:
        if kind == "device":
            with torch.device("cpu"):
                yield
        elif kind == "mkldnn":
            with torch.backends.mkldnn.flags(enabled=False):
                yield
        else:
            torch.use_deterministic_algorithms(True)
            try:
                yield
            finally:
                torch.use_deterministic_algorithms(False)

    subject.surroundings.append(setting)
    return kind
