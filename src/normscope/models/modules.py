"""A model's modules: where its layers are, which parts of them the steps need, and their parameters as maps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from normscope.errors import NormscopeError, did_you_mean
from normscope.models.scopes import Step
from normscope.models.spec import Attention, Experts, FeedForward, Norm, Stack

# The activations that are told by their class; `decompose.activations` has a closed form for each.
NAMED_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh")


def has_layers(base: PreTrainedModel, stack: Stack) -> bool:
    """Whether the model has this side at all."""
    return bool(_modules_at_path(base, stack))


def _modules_at_path(base: PreTrainedModel, stack: Stack) -> list[nn.Module]:
    """The modules at the stack's path, whose stars stand for numbers; step by step, as models have many modules."""
    found: list[nn.Module] = [base]
    for name in stack.layers.split("."):
        children = [list(module.named_children()) for module in found]
        found = [child for some in children for n, child in some if n == name or (name == "*" and n.isdigit())]
    return found


def layer_modules(base: PreTrainedModel, stack: Stack) -> list[nn.Module]:
    """The layer modules of a stack, in order, each once (a shared layer is one module)."""
    found = list(dict.fromkeys(_modules_at_path(base, stack)))
    if not found:
        raise NormscopeError(f"{type(base).__name__} has no layers at {stack.layers}: its family is described wrongly.")
    return found


def watched_paths(steps: Sequence[Step], values: bool) -> set[str]:
    """The submodules whose inputs and outputs the steps need; those that make the values too, if they are wanted."""
    found: set[str] = set()
    for step in steps:
        part = step.part
        if step.reader is not None:
            found.add(step.reader)
        if isinstance(part, Norm):
            found.add(part.path)
        elif isinstance(part, FeedForward):
            found |= {part.into, part.out} | ({part.up} if part.up else set())
        elif isinstance(part, Experts):
            found.add(part.module)
        elif isinstance(part, Attention):
            found.add(part.output)
            if part.probabilities is not None:
                found |= {part.probabilities, part.value}
            elif values:
                found.add(part.value)
    return found


def linear_paths(steps: Sequence[Step]) -> list[str]:
    """The linear submodules whose input another component makes."""
    found: list[str] = []
    for part in (step.part for step in steps):
        if isinstance(part, FeedForward):
            found += [part.into, part.out, *([part.up] if part.up else [])]
        elif isinstance(part, Attention):
            found.append(part.output)
    return found


def last_path(steps: Sequence[Step]) -> str | None:
    """The submodule after which the steps are complete, where most of the layer is still to come."""
    part = steps[-1].part
    if any(isinstance(step.part, FeedForward | Experts) for step in steps):
        return None
    if isinstance(part, Norm):
        return part.path
    return part.output if isinstance(part, Attention) else steps[-1].reader


def expert_parameters(
    module: Any, path: str, bias: str | None, expert: int, transposed: bool
) -> tuple[Tensor, Tensor | None]:
    """Weight (in, out) and bias of one expert."""
    weight = layer_attribute(module, path)[expert]
    return weight if transposed else weight.t(), None if bias is None else layer_attribute(module, bias)[expert]


def unpack_joint_activation(
    packed: Callable[[Tensor], Tensor], interleaved: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of gate and up from one of both as the model packs them."""

    def function(a: Tensor, u: Tensor) -> Tensor:
        return packed(torch.stack([a, u], -1).flatten(-2) if interleaved else torch.cat([a, u], -1))

    return function


def value_constant(module: nn.Module, packing: str, heads: int, width: int, shift: Tensor | None) -> Tensor | None:
    """(heads, width) the part of every value vector that comes from no token: b_V, and W_V times the shift of the norm
    before it."""
    weight, bias = linear_map(module)
    constant = bias
    if shift is not None:
        through = weight @ shift.to(weight.dtype)
        constant = through if bias is None else through + bias
    return None if constant is None else value_rows(constant, packing, heads, width)


def value_rows(x: Tensor, packing: str, heads: int, width: int) -> Tensor:
    """(..., heads, width) the values among what a projection outputs."""
    size, found = heads * width, x.shape[-1]
    fits = {"tail": 0 < size <= found, "interleaved": found == 3 * size, "alone": found == size}[packing]
    if not fits:
        raise NormscopeError(
            f"The value projection has {found} outputs, not {heads} heads of width {width} with the packing "
            f"{packing!r}: the family is described wrongly, or its values are made in more than one step."
        )
    if packing == "interleaved":
        return x.view(*x.shape[:-1], heads, 3, width)[..., 2, :]
    return x[..., -size:].reshape(*x.shape[:-1], heads, width)


def value_map(module: nn.Module, packing: str, heads: int, shared: int, width: int) -> tuple[Tensor, Tensor | None]:
    """W_V (H, d, d_h) and b_V (H, d_h) for row vectors; of `shared` heads, each is repeated for those that share it."""
    weight, bias = linear_map(module)

    def each(x: Tensor) -> Tensor:
        return value_rows(x, packing, shared, width).repeat_interleave(heads // shared, -2)

    return each(weight.detach().t()).transpose(0, 1), None if bias is None else each(bias.detach())


def linear_map(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a linear module, read from what it does where it is no plain nn.Linear."""
    if type(module) is nn.Linear:
        return module.weight, module.bias
    if type(module) is Conv1D:
        return module.weight.t(), module.bias
    features = getattr(module, "in_features", None)
    reference = next(module.parameters(), None)
    if features is None or reference is None:
        raise NormscopeError(f"Expected a linear module, found {type(module).__name__}.")
    eye = torch.eye(features, dtype=reference.dtype, device=reference.device)
    constant = module(torch.zeros_like(eye[:1]))
    return (module(eye) - constant).t(), constant[0]


def is_plain_linear(module: nn.Module, besides: int = 0) -> bool:
    """Whether a module is a linear map by its code alone: no hook but `besides` so many, no wrapper, no patched
    forward."""
    hooked = len(module._forward_hooks) > besides or module._forward_pre_hooks or has_global_hooks()
    known = type(module) in (nn.Linear, Conv1D) and type(module).forward in _LINEAR
    return known and not hooked and "forward" not in module.__dict__


def is_wrapped_on_path(layer: nn.Module, path: str) -> bool:
    """Whether somebody has hooked or patched one of the modules that a submodule is inside of."""
    inside = layer
    for name in path.split(".")[:-1]:
        inside = inside.get_submodule(name)
        if inside._forward_hooks or inside._forward_pre_hooks or "forward" in inside.__dict__:
            return True
    return False


def has_global_hooks() -> bool:
    """Whether there are hooks on all modules of the process."""
    everywhere = torch.nn.modules.module
    return bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


_LINEAR = (nn.Linear.forward, Conv1D.forward)  # as they were when this was imported


def is_modified(base: PreTrainedModel) -> bool:
    """Whether somebody has hooked, patched or wrapped a part of the model, so that an item may not be the same in a
    batch as alone."""
    own = {type(base).__module__.partition(".")[0], "torch", "transformers", "peft"}
    return has_foreign_hooks(base) or any(
        "forward" in module.__dict__ or type(module).__module__.partition(".")[0] not in own
        for module in base.modules()
    )


def has_foreign_hooks(base: PreTrainedModel) -> bool:
    """Whether somebody listens to the model, other than transformers itself for its outputs."""
    if has_global_hooks():
        return True
    hooks = (
        hook
        for module in base.modules()
        if module._forward_hooks or module._forward_pre_hooks
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )
    return any(not (getattr(hook, "__module__", None) or "").startswith("transformers.") for hook in hooks)


def without_compilation(base: nn.Module) -> AbstractContextManager[Any]:
    """Runs compiled parts of the model eagerly, so that hooks see them."""
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in base.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def norm_epsilon(module: nn.Module) -> float | None:
    """The epsilon of a norm, by whatever name; None where it has none that is known."""
    named = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return next((float(one) for one in named if isinstance(one, float | int)), None)


def norm_map(module: nn.Module, width: int, centred: bool) -> tuple[Tensor, Tensor | None]:
    """Gain and shift of a norm, read from what it does: ``N(0)`` is the shift, and ``N(u)`` for a large u of +-1 the
    gain, since no epsilon counts there."""
    reference = next(module.parameters(), None)
    device = None if reference is None else reference.device
    plain = copy.deepcopy(module).double()
    u = 1.0 - 2.0 * (torch.arange(width, dtype=torch.float64, device=device) % 2)
    unit = u - u.mean() if centred else u
    unit = unit / unit.square().mean().sqrt()
    try:
        shift = plain.forward(torch.zeros_like(u)[None])[0]
        gain = (plain.forward(1e6 * u[None])[0] - shift) / unit
    except Exception as error:  # a module raises what it likes
        raise NormscopeError(f"Expected a norm, found {type(module).__name__}, which does not work as one.") from error
    return gain, shift if bool(shift.any()) else None


def norm_inverse(x: Tensor, output: Tensor, gain: Tensor, shift: Tensor | None, centred: bool) -> Tensor:
    """(b, i): 1 / s_i of a norm, by least squares from what it read and put out."""
    x, y = x.double(), output.double()
    read = (x - x.mean(-1, keepdim=True) if centred else x) * gain
    made = y if shift is None else y - shift
    fitted = (read * made).sum(-1) / read.square().sum(-1).clamp_min(1e-300)
    return fitted.to(output.dtype)


def vocabulary_size(embedding: Any) -> int:
    """The rows of a table of embeddings, also where an adapter is around it; 1 where there is no table."""
    for inside in embedding.modules() if isinstance(embedding, nn.Module) else ():
        if isinstance(inside, nn.Embedding):
            return inside.num_embeddings
    return int(getattr(embedding, "num_embeddings", 1))


def layer_attribute(layer: nn.Module, path: str) -> Any:
    """What a dotted path leads to, a module or not."""
    found: Any = layer
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise NormscopeError(f"{type(layer).__name__} has no {path}: {_no_such_part(layer, path)}") from error
    return found


def layer_submodule(layer: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path."""
    found = layer_attribute(layer, path)
    if not isinstance(found, nn.Module):
        raise NormscopeError(f"{type(layer).__name__} has no {path}: {_no_such_part(layer, path)}")
    return found


def _no_such_part(layer: nn.Module, path: str) -> str:
    """What a layer does have, where a path leads nowhere."""
    near = did_you_mean(path, [name for name, _ in layer.named_modules() if name])
    return f"this is a modified model, or its family is described wrongly.{near}"


def activation_name(activation: Any) -> str | None:
    """The activation's name where it is one of NAMED_ACTIVATIONS, judged by its class, not by the config."""
    if "forward" in getattr(activation, "__dict__", {}):
        return None  # patched
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else None
    return _activation_names().get(type(activation))


@lru_cache(maxsize=1)
def _activation_names() -> dict[type, str]:
    return {type(ACT2FN[name]): name for name in NAMED_ACTIVATIONS}
