"""The modules of a model: its layers, the submodules that a decomposition reads, and their parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from normscope.errors import NormscopeError, did_you_mean
from normscope.models.scopes import Step, layer_steps
from normscope.models.spec import Attention, Block, Experts, FeedForward, Norm, Recurrence, Stack

Packing = str | tuple[int, ...]  # of spec.Attention
MATMUL = "matmul"  # as `probabilities` of an attention: the product of probabilities and values
# Activations recognised by their class; `decompose.activations` has a closed form for each.
NAMED_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh")


def has_layers(base: PreTrainedModel, stack: Stack) -> bool:
    """True if the model has layers at the path of the stack."""
    return bool(_modules_at_path(base, stack))


def _modules_at_path(base: PreTrainedModel, stack: Stack) -> list[nn.Module]:
    """The modules at the path of the stack, in which `*` matches any index."""
    # One path component at a time: matching the names of all modules would be slow.
    found: list[nn.Module] = [base]
    for name in stack.layers.split("."):
        children = [list(module.named_children()) for module in found]
        found = [child for some in children for n, child in some if n == name or (name == "*" and n.isdigit())]
    return found


def layer_modules(base: PreTrainedModel, stack: Stack) -> list[nn.Module]:
    """The layer modules of a stack, in order and without duplicates (a shared layer is one module)."""
    found = list(dict.fromkeys(_modules_at_path(base, stack)))
    if not found:
        raise NormscopeError(f"{type(base).__name__} has no layers at {stack.layers}. Correct the path in its family.")
    return found


def watched_paths(steps: Sequence[Step], values: bool) -> set[str]:
    """Paths of the submodules whose inputs and outputs the steps need; with `values`, value projections too."""
    found: set[str] = set()
    for step in steps:
        part = step.part
        if step.reader is not None:
            found.add(step.reader)
        if isinstance(part, Norm):
            found.add(part.path)
        elif isinstance(part, FeedForward):
            found |= _unit_paths(part)
        elif isinstance(part, Experts):
            found |= {part.module} | ({part.router} if part.router else set())
            if part.shared is not None:
                found |= _unit_paths(part.shared) | ({part.shared_gate} if part.shared_gate else set())
        elif isinstance(part, Attention):
            found.add(part.output)
            if part.recurrence is not None:
                norm = part.recurrence.norm.path if isinstance(part.recurrence, Recurrence) else part.value
                found |= {part.value, norm}
            if part.probabilities not in (None, MATMUL):
                found |= {str(part.probabilities), part.value}
            found |= {norm.path for norm in (part.latent_norm, part.value_norm, part.inner_norm) if norm is not None}
            if part.gate is not None:
                found.add(part.gate.path)
            if values:
                found |= {part.value, part.entry}
    return found


def paths_by_row(steps: Sequence[Step]) -> set[str]:
    """Paths of the submodules of which a record needs only the requested rows: all but those before the values."""
    found: set[str] = set()
    for step in steps:
        part = step.part
        if isinstance(part, Norm):
            found.add(part.path)
        elif isinstance(part, FeedForward):
            found |= _unit_paths(part)
        elif isinstance(part, Attention):
            found.add(part.output)
    return found


def _unit_paths(part: FeedForward) -> set[str]:
    found = {part.into, part.out} | ({part.up} if part.up else set())
    return found if part.inner_norm is None else found | {part.inner_norm.path}


def has_recurrence(stack: Stack) -> bool:
    """Whether some layers of a stack mix tokens by a recurrence."""
    branches = [b for blocks in (stack.blocks, *stack.variants) for block in blocks for b in block.branches]
    return any(isinstance(b.op, Attention) and b.op.recurrence is not None for b in branches)


def product_paths(steps: Sequence[Step]) -> list[str]:
    """Paths of the attentions whose probabilities and values are read off their product."""
    parts = (step.part for step in steps)
    return [part.module for part in parts if isinstance(part, Attention) and part.probabilities == MATMUL]


def linear_paths(steps: Sequence[Step]) -> list[str]:
    """Paths of the linear submodules that read the output of another component."""
    found: list[str] = []
    for part in (step.part for step in steps):
        if isinstance(part, FeedForward):
            found += [part.into, part.out, *([part.up] if part.up else [])]
        elif isinstance(part, Attention):
            found.append(part.output)
    return found


def last_path(steps: Sequence[Step]) -> str | None:
    """Path of the submodule after which the steps are complete; None if that is only at the end of the layer."""
    part = steps[-1].part
    if any(isinstance(step.part, FeedForward | Experts) for step in steps):
        return None
    if isinstance(part, Norm):
        return part.path
    return part.output if isinstance(part, Attention) else steps[-1].reader


def value_constant(module: nn.Module, packing: Packing, heads: int, width: int, shift: Tensor | None) -> Tensor | None:
    """(heads, width): the part of a value vector that depends on no token, b_V plus W_V times the shift of the norm
    before it."""
    weight, bias = linear_map(module)
    constant = bias
    if shift is not None:
        projected = weight @ shift.to(weight.dtype)
        constant = projected if bias is None else projected + bias
    return None if constant is None else value_rows(constant, packing, heads, width)


def packing_at(layer: nn.Module, part: Attention, heads: int, width: int) -> Packing:
    """The packing of the values of an attention, with the columns at which they begin if its heads are in groups."""
    if part.groups is None:
        return part.packing
    size, groups = linear_map(layer_submodule(layer, part.value))[0].shape[0], int(layer_attribute(layer, part.groups))
    each, step = heads // groups, size // groups
    return tuple(g * step + step - 2 * each * width + s * width for g in range(groups) for s in range(each))


def value_rows(x: Tensor, packing: Packing, heads: int, width: int) -> Tensor:
    """(..., heads, width): the value vectors in the output of a projection; a view unless `packing` lists columns."""
    columns = value_columns(packing, heads, width, x.shape[-1])
    if packing == "interleaved":
        return x.view(*x.shape[:-1], heads, -1)[..., -width:]
    if isinstance(packing, tuple):
        return x[..., columns.to(x.device)].view(*x.shape[:-1], heads, width)
    if packing == "second":
        return x[..., heads * width : 2 * heads * width].reshape(*x.shape[:-1], heads, width)
    return x[..., -heads * width :].reshape(*x.shape[:-1], heads, width)


def value_columns(packing: Packing, heads: int, width: int, size: int) -> Tensor:
    """(heads * width,): the outputs of a projection of `size` outputs that are values."""
    usual = {
        "alone": (0, width, size == heads * width),
        "tail": (size - heads * width, width, size >= heads * width > 0),
        "second": (heads * width, width, size >= 2 * heads * width),
        "interleaved": (size // heads - width, size // heads, size % heads == 0 and size > heads * width),
    }
    if isinstance(packing, tuple):
        starts, fits = torch.tensor(packing), len(packing) == heads and max(packing) + width <= size
    else:
        first, step, fits = usual[packing]
        starts = first + step * torch.arange(heads)
    if not fits:
        raise NormscopeError(
            f"The value projection has {size} outputs, which does not fit {heads} heads of width {width} with packing "
            f"{packing!r}. The family is described incorrectly, or its values are computed in more than one step."
        )
    columns: Tensor = starts[:, None] + torch.arange(width)
    return columns.flatten()


def value_map(module: nn.Module, packing: Packing, heads: int, shared: int, width: int) -> tuple[Tensor, Tensor | None]:
    """W_V (H, d, d_h) and b_V (H, d_h) for row vectors; each of the `shared` value heads is repeated H / shared
    times."""
    weight, bias = linear_map(module)

    def each(x: Tensor) -> Tensor:
        return value_rows(x, packing, shared, width).repeat_interleave(heads // shared, -2)

    return each(weight.detach().t()).transpose(0, 1), None if bias is None else each(bias.detach())


def linear_map(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a linear module; unless it is a plain nn.Linear or Conv1D, it is called to find
    them."""
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


def is_plain_linear(module: nn.Module, own_hooks: int = 0) -> bool:
    """True if a module is an unmodified nn.Linear or Conv1D: no wrapper, no patched forward, and at most `own_hooks`
    forward hooks."""
    hooked = len(module._forward_hooks) > own_hooks or module._forward_pre_hooks or has_global_hooks()
    known = type(module) in (nn.Linear, Conv1D) and type(module).forward in _LINEAR
    return known and not hooked and "forward" not in module.__dict__


def is_wrapped_on_path(layer: nn.Module, path: str) -> bool:
    """True if a module that contains the submodule at `path` is hooked or patched."""
    inside = layer
    for name in path.split(".")[:-1]:
        inside = inside.get_submodule(name)
        if inside._forward_hooks or inside._forward_pre_hooks or "forward" in inside.__dict__:
            return True
    return False


def has_global_hooks() -> bool:
    """True if global module hooks are registered."""
    everywhere = torch.nn.modules.module
    return bool(everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks)


_LINEAR = (nn.Linear.forward, Conv1D.forward)  # as imported, to detect later patches


def is_modified(base: PreTrainedModel) -> bool:
    """True if a part of the model is hooked, patched or wrapped, so that results may depend on the rest of the
    batch."""
    trusted = {type(base).__module__.partition(".")[0], "torch", "transformers", "peft"}
    return has_foreign_hooks(base) or any(
        "forward" in module.__dict__ or type(module).__module__.partition(".")[0] not in trusted
        for module in base.modules()
    )


def has_foreign_hooks(base: PreTrainedModel) -> bool:
    """True if the model has forward hooks that transformers did not register itself."""
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
    """A context in which compiled parts of the model run eagerly, so that hooks are called."""
    compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in base.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def refuse_autocast(device: torch.device) -> None:
    """Raise an error under `torch.autocast`, which would compute in half precision."""
    if torch.is_autocast_enabled(device.type):
        raise NormscopeError(
            "torch.autocast is on: the model would compute in half precision, whose rounding errors exceed small "
            "contributions. Leave the autocast context, or use torch.autocast(..., enabled=False)."
        )


def norm_epsilon(module: nn.Module) -> float | None:
    """The epsilon of a norm, whose attribute has several possible names; None if not found."""
    named = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return next((float(one) for one in named if isinstance(one, float | int)), None)


def norm_map(module: nn.Module, width: int, centred: bool) -> tuple[Tensor, Tensor | None]:
    """Gain and shift of a norm, found by calling it: ``N(0)`` is the shift, and ``N(c u)`` with u of alternating signs
    and c so large that epsilon is negligible gives the gain."""
    reference = next(module.parameters(), None)
    device = None if reference is None else reference.device
    plain = copy.deepcopy(module).double()
    u = 1.0 - 2.0 * (torch.arange(width, dtype=torch.float64, device=device) % 2)
    unit = u - u.mean() if centred else u
    unit = unit / unit.square().mean().sqrt()
    try:
        shift = plain.forward(torch.zeros_like(u)[None])[0]
        gain = (plain.forward(1e6 * u[None])[0] - shift) / unit
    except Exception as error:  # modules may raise anything
        raise NormscopeError(f"Expected a norm, but {type(module).__name__} cannot be called as one.") from error
    return gain, shift if bool(shift.any()) else None


def norm_inverse(x: Tensor, output: Tensor, gain: Tensor, shift: Tensor | None, centred: bool) -> Tensor:
    """(b, i): 1 / s_i of a norm, by least squares from its input and output."""
    x, y = x.double(), output.double()
    read = (x - x.mean(-1, keepdim=True) if centred else x) * gain
    unshifted = y if shift is None else y - shift
    fitted = (read * unshifted).sum(-1) / read.square().sum(-1).clamp_min(1e-300)
    return fitted.to(output.dtype)


def input_embeddings(base: Any) -> Any:
    """The embeddings of the input; None for models of sound, which have none."""
    try:
        return base.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def vocabulary_size(embedding: Any) -> int:
    """Rows of an embedding table, possibly inside an adapter; 1 if there is no table."""
    for inside in embedding.modules() if isinstance(embedding, nn.Module) else ():
        if isinstance(inside, nn.Embedding):
            return inside.num_embeddings
    return int(getattr(embedding, "num_embeddings", 1))


def layer_blocks(layer: nn.Module, stack: Stack) -> tuple[Block, ...]:
    """The blocks of a layer: the first of the stack's that name only submodules and parameters which the layer has."""
    for blocks in (stack.blocks, *stack.variants[:-1]) if stack.variants else ():
        modules = watched_paths(layer_steps(blocks), values=True)
        if all(isinstance(_attribute_or_none(layer, path), nn.Module) for path in modules) and all(
            _attribute_or_none(layer, path) is not None for path in parameter_paths(blocks)
        ):
            return blocks
    return stack.variants[-1] if stack.variants else stack.blocks


def parameter_paths(blocks: Sequence[Block]) -> set[str]:
    """Paths of the parameters and numbers that the blocks name."""
    branches = [branch for block in blocks for branch in block.branches]
    named: list[Any] = [block.skip for block in blocks] + [branch.scale for branch in branches]
    for op in (branch.op for branch in branches):
        if isinstance(op, Attention):
            gate = None if op.gate is None else op.gate.bias
            named += [op.value_shift, op.value_scale, op.output_bias, op.sink_scores, gate, op.groups]
            named.append(None if op.recurrence is None else op.recurrence.filter)
        elif isinstance(op, Experts):
            named.append(op.scale)
    return {path for path in named if isinstance(path, str)}


def _attribute_or_none(layer: nn.Module, path: str) -> Any:
    found: Any = layer
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def activation_at(layer: nn.Module, path: str) -> Any:
    """The activation at a path of the layer, or the function of transformers that ``ACT2FN.name`` names."""
    kind, _, name = path.partition(".")
    return ACT2FN[name] if kind == "ACT2FN" else layer_attribute(layer, path)


def layer_attribute(layer: nn.Module, path: str) -> Any:
    """The attribute at a dotted path: a module, parameter or method; the layer itself at the empty path."""
    found: Any = layer
    for name in path.split(".") if path else ():
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
    """Explain a path that does not exist in a layer, with similar names."""
    near = did_you_mean(path, [name for name, _ in layer.named_modules() if name])
    return f"the model was modified, or its family is described incorrectly.{near}"


def activation_name(activation: Any) -> str | None:
    """The name of an activation, judged by its class and not by the config; None unless in NAMED_ACTIVATIONS."""
    if "forward" in getattr(activation, "__dict__", {}):
        return None  # patched
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else None
    return _activation_names().get(type(activation))


@lru_cache(maxsize=1)
def _activation_names() -> dict[type, str]:
    return {type(ACT2FN[name]): name for name in NAMED_ACTIVATIONS}
