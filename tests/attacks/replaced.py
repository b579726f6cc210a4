"""Attacks that replace a module by another: norms, linear modules, activations, wrappers, patches."""

import random
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.attacks.changes import Change, changed, draw
from tests.attacks.subject import Inapplicable, Subject, a_layer, a_part, attack, holder
from tests.helpers.tiny import GATED


class Wrapper(nn.Module):
    """Calls the module inside, and perhaps changes its input or output."""

    def __init__(self, inner: nn.Module, change: Change, before: bool, open_: bool) -> None:
        super().__init__()
        self.inner, self.change, self.before, self.open = inner, change, before, open_

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.before:
            args = tuple(self.change(one) if n == 0 else one for n, one in enumerate(args))
            return self.inner(*args, **kwargs)
        return changed(self.inner(*args, **kwargs), self.change)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "inner" and self.__dict__.get("open"):
                return getattr(self.inner, name)
            raise


@attack(weight=2)
def wrap(rng: random.Random, subject: Subject) -> str:
    """A part of a layer in a wrapper; an open one also has the attributes of what is inside."""
    what, module, parent, name = a_part(rng, subject)
    change, before, open_ = draw(rng), rng.random() < 0.3, rng.random() < 0.5
    if rng.random() < 0.5:
        change = Change("look")
    setattr(parent, name, Wrapper(module, change, before, open_))
    return f"{what} wrapped, {change.kind}{' before' if before else ''}{', open' if open_ else ''}"


@attack(weight=1.5)
def wrap_layer(rng: random.Random, subject: Subject) -> str:
    number, layer = a_layer(rng, subject)
    parent, name = holder(subject.inside, layer)
    change, open_ = draw(rng), rng.random() < 0.5
    if rng.random() < 0.5:
        change = Change("look")
    parent._modules[name] = Wrapper(layer, change, rng.random() < 0.3, open_)
    return f"layer {number} wrapped, {change.kind}{', open' if open_ else ''}"


@attack()
def wrap_outside(rng: random.Random, subject: Subject) -> str:
    """Embeddings, final norms and heads."""
    layers = {id(m) for layer in subject.layers() for m in layer.modules()}
    found = [
        (path, m)
        for path, m in subject.inside.named_modules()
        if id(m) not in layers and isinstance(m, nn.Embedding | nn.Linear | nn.LayerNorm) and "." in path
    ]
    if not found:
        raise Inapplicable("nothing outside the layers")
    path, module = rng.choice(found)
    parent, name = holder(subject.inside, module)
    change = draw(rng)
    setattr(parent, name, Wrapper(module, change, False, rng.random() < 0.5))
    return f"{path} wrapped, {change.kind}"


class Tanh(nn.Module):
    """DyT, which some models have instead of a norm."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * x)


class Length(nn.Module):
    """x over its length: a norm that has no weight, no eps and no mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


class Half(nn.Module):
    """Only the mean is taken out."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class Own(nn.LayerNorm):
    """A LayerNorm that does something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.5


class Same(nn.LayerNorm):
    """A LayerNorm of another class."""


class Upcast(nn.LayerNorm):
    """In float32, for input of any dtype."""

    def forward(self, x: Tensor) -> Tensor:
        made = nn.functional.layer_norm(
            x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )
        return made.to(x.dtype)


@attack(weight=2.5)
@torch.no_grad()
def norm(rng: random.Random, subject: Subject) -> str:
    """A norm replaced by none, or by one of another class or with other settings."""
    number, layer = a_layer(rng, subject)
    found = [m for m in layer.modules() if "Norm" in type(m).__name__ and getattr(m, "weight", None) is not None]
    if not found:
        raise Inapplicable("no norm")
    module: Any = rng.choice(found)
    parent, name = holder(layer, module)
    width = module.weight.shape[0]
    makers: dict[str, Any] = {
        "none": nn.Identity,
        "LayerNorm": lambda: nn.LayerNorm(width),
        "LayerNorm without bias": lambda: nn.LayerNorm(width, bias=False),
        "LayerNorm without weights": lambda: nn.LayerNorm(width, elementwise_affine=False),
        "LayerNorm of eps 1": lambda: nn.LayerNorm(width, eps=1.0),
        "RMSNorm": lambda: nn.RMSNorm(width),
        "RMSNorm of eps 0.1": lambda: nn.RMSNorm(width, eps=0.1),
        "tanh": Tanh,
        "length": Length,
        "mean": Half,
        "another class": lambda: Own(width),
        "the same in another class": lambda: Same(width),
        "upcast": lambda: Upcast(width),
        "linear": lambda: nn.Linear(width, width),
    }
    kind = rng.choice(list(makers))
    made = makers[kind]().to(module.weight.dtype)
    for parameter in made.parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rng.randrange(10**6)))
        parameter.copy_((1 + 0.3 * noise if parameter.dim() == 1 else 0.2 * noise).to(parameter.dtype))
    setattr(parent, name, made.eval())
    return f"layer {number} {name} replaced by {kind}"


@attack()
def norm_setting(rng: random.Random, subject: Subject) -> str:
    """The eps of a norm, changed on the module."""
    number, layer = a_layer(rng, subject)
    found = [
        (m, n) for m in layer.modules() for n in ("eps", "variance_epsilon") if isinstance(getattr(m, n, None), float)
    ]
    if not found:
        raise Inapplicable("no eps")
    module, name = rng.choice(found)
    value = rng.choice([0.0, 1e-3, 0.5])
    setattr(module, name, value)
    return f"layer {number}: {name}={value}"


class Int8(nn.Module):
    """A linear layer with weights in eight bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.packed.to(x.dtype) * self.scale, self.bias)


class Low(nn.Module):
    """A linear layer of low rank beside another: LoRA by hand, without its attributes."""

    def __init__(self, base: nn.Module, width: int, out: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.base = base
        self.down = nn.Parameter(0.3 * torch.randn(width, 2, generator=generator).to(dtype))
        self.up = nn.Parameter(0.3 * torch.randn(2, out, generator=generator).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down @ self.up


class Sub(nn.Linear):
    """A subclass of nn.Linear that does something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class Bent(nn.Linear):
    """A subclass of nn.Linear that is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x))


@attack(weight=2)
@torch.no_grad()
def linear(rng: random.Random, subject: Subject) -> str:
    """A linear module replaced by one of another class, linear or not."""
    what, module, parent, name = a_part(rng, subject, nn.Linear, Conv1D)
    any_module: Any = module
    weight = any_module.weight if isinstance(module, nn.Linear) else any_module.weight.T
    out, width = weight.shape
    kind = rng.choice(["int8", "low rank", "subclass", "bent", "sequence", "conv1d", "no bias", "two steps"])
    if kind == "int8":
        made: nn.Module = Int8(weight, any_module.bias)
    elif kind == "low rank":
        made = Low(module, width, out, weight.dtype)
    elif kind in ("subclass", "bent"):
        made = (Sub if kind == "subclass" else Bent)(width, out).to(weight.dtype)
        made.load_state_dict(
            {"weight": weight, "bias": torch.zeros(out) if any_module.bias is None else any_module.bias}
        )
    elif kind == "sequence":
        made = nn.Sequential(module, nn.Dropout(0.1))
    elif kind == "conv1d":
        made = Conv1D(out, width).to(weight.dtype)
        made.weight.copy_(weight.T)
        made.bias.copy_(torch.zeros(out) if any_module.bias is None else any_module.bias)
    elif kind == "no bias":
        made = nn.Linear(width, out, bias=False).to(weight.dtype)
        made.weight.copy_(weight)
    else:
        first, second = nn.Linear(width, 5), nn.Linear(5, out)
        generator = torch.Generator().manual_seed(4)
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        made = nn.Sequential(first, second).to(weight.dtype)
    setattr(parent, name, made.eval())
    return f"{what} replaced: {kind}"


class Clipped(nn.Module):
    """An activation with a kink off the integers."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x).clamp(-0.1, 1.0)


@attack()
def activation(rng: random.Random, subject: Subject) -> str:
    """The feed-forward's activation replaced, the config unchanged."""
    number, layer = a_layer(rng, subject)
    for path in ("intermediate.intermediate_act_fn", "activation_fn", "activation", "mlp.act", "mlp.act_fn",
                 "ffn.activation", "mlp.activation_fn"):  # fmt: skip
        parent_path, _, name = path.rpartition(".")
        try:
            parent = layer.get_submodule(parent_path)
        except AttributeError:
            continue
        if name in parent._modules:
            plain = subject.name not in (*GATED, "gpt_oss")  # the judge's quadrature has its panels at integers
            kind = rng.choice([nn.ReLU, nn.SiLU, nn.GELU, nn.Tanh, nn.Identity, nn.ELU, *([Clipped] if plain else [])])
            setattr(parent, name, kind())
            return f"layer {number} {path} replaced by {kind.__name__}"
    raise Inapplicable("no activation")


class Patched:
    """A forward that is put on an instance; it holds no module, so that it copies with one."""

    def __init__(self, change: Change) -> None:
        self.change = change

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return changed(type(module).forward(module, *args, **kwargs), self.change)


@attack(weight=2)
def patch(rng: random.Random, subject: Subject) -> str:
    """The forward of one instance replaced."""
    number, layer = a_layer(rng, subject)
    paths = ["", *subject.parts(layer)]
    path = rng.choice(paths)
    try:
        module = layer.get_submodule(path)
    except AttributeError as error:
        raise Inapplicable(path) from error
    change = draw(rng)
    module.forward = types.MethodType(Patched(change), module)  # type: ignore[method-assign]
    return f"layer {number} {path or 'itself'}: forward patched, {change.kind}"


@attack()
def patch_outside(rng: random.Random, subject: Subject) -> str:
    """The forward of the base model, of the whole model or of an embedding replaced."""
    module = rng.choice([subject.inside, subject.base, subject.inside.get_input_embeddings()])
    change = draw(rng)
    module.forward = types.MethodType(Patched(change), module)
    return f"{type(module).__name__}: forward patched, {change.kind}"
