"""The object of an attack, and the list of all attacks."""

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from tests.attacks.families import family_stacks, layer_classes
from tests.attacks.recording import NoAnswer, huggingface, part, paths_of, side_of


class Inapplicable(Exception):  # noqa: N818
    """This attack cannot be made on this model."""


@dataclass
class Subject:
    """A model, an input and the way they are used; attacks change any of these."""

    name: str
    head: str | None
    dtype: torch.dtype
    model: Any  # what the user has, calls, and gives to the library
    encoding: dict[str, Any]
    contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)  # how numbers are computed
    surroundings: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)  # what code is run
    virtual: bool = False  # soft prompts: tokens or keys that the encoding does not have
    earlier: Any = None  # a result from before the attacks

    @property
    def inside(self) -> PreTrainedModel:
        return huggingface(self.model)

    @property
    def base(self) -> Any:
        return self.inside.base_model

    def layers(self) -> list[nn.Module]:
        return [m for m in self.inside.modules() if type(m) in layer_classes(self.name)]

    def lists(self) -> list[nn.ModuleList]:
        """The lists that hold the layers."""
        layers = {id(layer) for layer in self.layers()}
        found = [m for m in self.inside.modules() if isinstance(m, nn.ModuleList) and any(id(c) in layers for c in m)]
        if not found:
            raise Inapplicable("no list of layers")
        return found

    def parts(self, layer: nn.Module) -> list[str]:
        """The paths of a layer's parts."""
        stacks = family_stacks(self.name)
        path = next(path for path, m in self.inside.named_modules() if m is layer)
        try:
            return list(paths_of(layer, stacks[side_of(path, stacks)]))
        except NoAnswer as error:
            raise Inapplicable(str(error)) from error


@contextlib.contextmanager
def around(contexts: list[Callable[[], AbstractContextManager[Any]]]) -> Iterator[None]:
    """Contexts that the user has entered."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


Attack = Callable[[random.Random, Subject], str]


class Listed(NamedTuple):
    attack: Attack
    weight: float  # how often it is drawn, relative to others
    late: bool  # can be made on a model that an Analyzer holds


ATTACKS: dict[str, Listed] = {}


def attack(weight: float = 1.0, late: bool = True) -> Callable[[Attack], Attack]:
    """List an attack: a function of a random generator and a subject that says in words what it did."""

    def register(function: Attack) -> Attack:
        ATTACKS[function.__name__] = Listed(function, weight, late)
        return function

    return register


def a_layer(rng: random.Random, subject: Subject) -> tuple[int, nn.Module]:
    layers = subject.layers()
    if not layers:
        raise Inapplicable("no layers left")
    number = rng.randrange(len(layers))
    return number, layers[number]


def a_part(rng: random.Random, subject: Subject, *kinds: type[nn.Module]) -> tuple[str, nn.Module, nn.Module, str]:
    """A part of a layer, of some classes if given: in words, the module, its parent and its name there."""
    number, layer = a_layer(rng, subject)
    paths = subject.parts(layer)
    rng.shuffle(paths)
    for path in paths:
        try:
            module = part(layer, path)
        except NoAnswer:
            continue
        if not kinds or isinstance(module, kinds):
            parent, name = holder(layer, module)
            return f"layer {number} {path}", module, parent, name
    raise Inapplicable("no such part")


def holder(root: nn.Module, module: nn.Module) -> tuple[nn.Module, str]:
    """The module that has another as its child, and the child's name."""
    for parent in root.modules():
        for name, one in parent.named_children():
            if one is module:
                return parent, name
    raise Inapplicable("it has no parent")
