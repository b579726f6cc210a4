"""The proof at the door: one short input through a model twice, as it is and watched.

A watched pass must give every layer's output, and the head's, as the model alone does; and every component of every
layer must come out of its record as it came out of the model. What was proved holds for the model as it stands: whether
it still is that one is looked at before each run (`standing`), and it is proved again where it is not.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isnan, nan
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from normscope.errors import NormscopeError
from normscope.inputs.encode import encode, forward_inputs, real_tokens
from normscope.inputs.item import Item
from normscope.inputs.samples import random_inputs
from normscope.models.loaded import LayerCalls, LoadedModel, update_prompt
from normscope.models.modules import layer_modules, without_compilation
from normscope.models.scopes import Step, layer_steps
from normscope.models.spec import Side, Stack
from normscope.tracing.build import RecordRequest
from normscope.tracing.records import AttentionRecord, LayerRecord
from normscope.tracing.replay import replay_layer
from normscope.tracing.trace import (
    attention_configs,
    attention_implementation,
    model_lock,
    refuse_autocast,
    watched_pass,
)

CLOSE = 1e-4  # relative difference from which on two vectors are not the same; rounding stays well below


SHORT = 4  # tokens of the input that a model is proved with
HOLED = 40  # tokens of the longer one for an attention that is not transformers' own, with holes in its mask

_proved: WeakKeyDictionary[nn.Module, tuple[Any, LayerCalls]] = WeakKeyDictionary()


@dataclass(frozen=True)
class ProofInput:
    """What both passes are given."""

    inputs: Mapping[str, Any]
    real: Mapping[Side, Tensor]  # (b, n): the tokens that are not padding


def prove(loaded: LoadedModel) -> None:
    """Refuse a model that computes anything else than what is seen of it, and note the layer calls that it makes. A
    model that was proved and has not been changed since is not run again."""
    # A list of layers that was cut is a new one, in training mode by itself, which changes nothing.
    lists = nn.ModuleList | nn.ModuleDict
    if any(module.training for module in loaded.given.modules() if not isinstance(module, lists)):
        raise NormscopeError("The model is in training mode: dropout would change every number. Call model.eval().")
    if loaded.given is not loaded.model:  # peft may have switched to another adapter
        update_prompt(loaded)
    with model_lock(loaded.base):
        found = _proved.get(loaded.base)
        if found is None or found[0] != (loaded.stacks, computation_state(loaded)):
            forget_proof(loaded)
            calls = _first_proof(loaded)  # first: transformers may add hooks when the model runs
            found = _proved[loaded.base] = ((loaded.stacks, computation_state(loaded)), calls)
        loaded.calls = calls = found[1]
        loaded.depths = [len(calls.modules[stack.side]) for stack in loaded.stacks]
        loaded.head_counts = [max(calls.heads[stack.side]) for stack in loaded.stacks]


def forget_proof(loaded: LoadedModel) -> None:
    """Have a model proved again, as if nothing were known of it."""
    with model_lock(loaded.base):
        _proved.pop(loaded.base, None)


def _first_proof(loaded: LoadedModel) -> LayerCalls:
    if loaded.family.input == "text" and has_foreign_attention(loaded.base):  # it must heed masks and windows too
        compare_passes(loaded, _proof_sample(loaded, HOLED, holes=True))
    calls, worst = compare_passes(loaded, _proof_sample(loaded, SHORT))
    if isnan(worst):
        raise NormscopeError(
            "The model alone outputs NaN or infinite values for a short input. Check its weights and dtype."
        )
    return calls


def _proof_sample(loaded: LoadedModel, length: int, *, holes: bool = False) -> ProofInput:
    made = random_inputs(loaded, [length])[0]
    if holes:
        made["attention_mask"] = (torch.arange(len(made["input_ids"])) % 5 != 2).long()
    return proof_input(loaded, encode(loaded, made))


def proof_input(loaded: LoadedModel, items: Sequence[Item]) -> ProofInput:
    """A batch to compare two passes on."""
    real = {stack.side: real_tokens(items, stack.side, loaded.base.device) for stack in loaded.stacks}
    return ProofInput(forward_inputs(loaded, items), real)


def compare_passes(loaded: LoadedModel, given: ProofInput) -> tuple[LayerCalls, float]:
    """What was seen of a pass, and the largest difference from the model alone, of the vectors' length; the model is
    refused where the two passes begin to differ. NaN: the model alone outputs what is not finite."""
    base, prompt = loaded.base, loaded.prompt
    refuse_maskless_attention(base)
    with model_lock(base):
        alone, made, entered = _plain_pass(loaded, given)
        comparison = _Comparison(loaded, given, alone)
        requests = [
            RecordRequest(
                stack,
                layer_steps(stack.blocks),
                None,
                comparison.on_layer(stack),
                given.real[stack.side],
                links=True,
                virtual=prompt.count if prompt is not None and prompt.kind == "keys" else 0,
            )
            for stack in loaded.stacks
        ]
        # Some heads call the decoder inside the base model, which analyses call as a whole.
        model = (loaded.model if prompt is None else loaded.given) if entered else base
        watched = watched_pass(base, given.inputs, requests, loaded.dtype, model, to_the_end=True)
        comparison.compare_heads(made, watched if entered else None)
        heads = {side: tuple(some) for side, some in comparison.heads.items()}
        modules = {side: tuple(call for call, _ in some) for side, some in alone.items()}
        return LayerCalls(modules, heads), comparison.worst


def computation_state(loaded: LoadedModel) -> Any:
    """All that decides how a pass is computed, but for the numbers: modules, their code, hooks, dtypes, attention.
    Two of these are equal where nothing of it was changed."""
    modules = []
    for module in loaded.given.modules():
        own = module.__dict__
        modules.append(
            (
                weakref.ref(module),
                type(module).forward,
                own.get("forward"),
                own.get("is_causal"),
                module.training,
                tuple(module._forward_hooks),
                tuple(module._forward_pre_hooks),
                tuple((p.dtype, p.shape) for p in module._parameters.values() if p is not None),
            )
        )
    names = [attention_implementation(config) for config in attention_configs(loaded.base)]
    files = {type(module).__module__ for module in loaded.base.modules()}
    eager = {name: getattr(sys.modules.get(name), "eager_attention_forward", None) for name in files}
    everywhere = torch.nn.modules.module
    hooks = tuple(everywhere._global_forward_hooks), tuple(everywhere._global_forward_pre_hooks)
    return modules, hooks, names, [ALL_ATTENTION_FUNCTIONS.get(name) for name in names], eager


def has_foreign_attention(base: PreTrainedModel) -> bool:
    """Whether the model attends by a function that is not transformers' own."""
    names = {attention_implementation(config) for config in attention_configs(base)}
    functions = (ALL_ATTENTION_FUNCTIONS.get(name) for name in names)
    return any(one is not None and not one.__module__.startswith("transformers.") for one in functions)


def refuse_maskless_attention(base: PreTrainedModel) -> None:
    """Refuse an attention implementation for which no mask function is registered: transformers then makes no mask, and
    what the implementation attends to is known to nobody else."""
    for name in {attention_implementation(config) for config in attention_configs(base)}:
        if name not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            raise NormscopeError(
                f"The attention implementation {name!r} has no mask function: what it attends to cannot be seen. "
                "Register one with transformers.AttentionMaskInterface, or load the model with "
                "attn_implementation='eager'."
            )


def _plain_pass(loaded: LoadedModel, given: ProofInput) -> tuple[dict[str, list[tuple[nn.Module, Tensor]]], Any, bool]:
    """A plain pass: side -> every layer call with what it put out; what the model returned; whether it called the base
    model as a whole."""
    refuse_autocast(loaded.base.device)
    thread = threading.get_ident()
    rewrites = loaded.prompt is not None  # the model as given is known to give its base other inputs
    found: dict[str, list[tuple[nn.Module, Tensor]]] = {stack.side: [] for stack in loaded.stacks}
    handles = []
    changed: list[str] = []
    entered = [loaded.given is loaded.base or rewrites]

    def enter(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if threading.get_ident() == thread:
            entered[0] = True
            named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | dict(kwargs)
            changed.extend(key for key, one in given.inputs.items() if _inputs_differ(one, named.get(key)))

    def listen(side: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                y = output[0] if isinstance(output, tuple) else output
                found[side].append((module, y.clone()))  # others may change it in place

        return hook

    try:
        for stack in loaded.stacks:
            for layer in layer_modules(loaded.base, stack):
                handles.append(layer.register_forward_hook(listen(stack.side)))
        if loaded.given is not loaded.base:
            handles.append(loaded.base.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        with torch.no_grad(), without_compilation(loaded.given):
            made = loaded.given(**given.inputs)
        if changed and not rewrites:
            raise NormscopeError(
                f"{type(loaded.given).__name__} gives its layers other {', '.join(changed)} than it was given: a hook "
                "or wrapper changes them. Undo that, or analyse what it makes of the input."
            )
        return found, made, entered[0]
    except NormscopeError:
        raise
    except Exception as error:  # a model raises what it likes
        tuples = getattr(loaded.base.config, "return_dict", True) is False
        hint = " Set model.config.return_dict = True." if tuples else ""
        raise NormscopeError(f"The model's own forward pass failed: {error}.{hint}") from error
    finally:
        for handle in handles:
            handle.remove()


class _Comparison:
    """Compares a watched pass with the plain one, layer by layer."""

    def __init__(
        self, loaded: LoadedModel, given: ProofInput, alone: Mapping[str, list[tuple[nn.Module, Tensor]]]
    ) -> None:
        self.loaded, self.given, self.alone = loaded, given, alone
        self.worst = 0.0
        self.heads: dict[str, list[int]] = {stack.side: [] for stack in loaded.stacks}

    def on_layer(self, stack: Stack) -> Any:
        steps = layer_steps(stack.blocks)
        real = self.given.real[stack.side]
        elsewhere = self.given.real[self.loaded.stacks[0].side]

        def compare(record: LayerRecord) -> None:
            calls = self.alone[stack.side]
            if record.index >= len(calls):
                self._refuse(f"at layer call {record.index}, which the model alone does not make", float("nan"))
            module, output = calls[record.index]
            for step, made, actual in replay_layer(record, steps):
                own = made.shape[:2] == real.shape
                error = self._difference(made, actual, real if own else elsewhere)
                if not error <= CLOSE:
                    raise NormscopeError(
                        f"{self._name(module)}, layer {record.index} (counted from 0), is not what its family says: "
                        f"what {_step_name(step)} reads or outputs differs by {error:.1e} of its length from what was "
                        "expected. A hook changes values there, a module is wrapped or replaced, or the family is "
                        "described wrongly. Undo the change, or describe the model as it is with "
                        "normscope.register_family."
                    )
            last: Any = record.parts[-1]
            error = self._difference(output.to(last.output.dtype), last.output, real)
            if not error <= CLOSE:
                if not bool(torch.isfinite(output[real]).all()):
                    self.worst = nan
                    return
                self._refuse(f"in {self._name(module)}, layer {record.index} (counted from 0)", error)
            part = next(one for one in record.parts if isinstance(one, AttentionRecord))
            self.heads[stack.side].append(part.weights.shape[1])

        return compare

    def compare_heads(self, made: Any, watched: Any) -> None:
        for side, heads in self.heads.items():
            if not isnan(self.worst) and len(heads) != len(self.alone[side]):
                self._refuse(
                    f"after layer call {len(heads)}: the model alone makes {len(self.alone[side])}", float("nan")
                )
        for one, other in (
            () if isnan(self.worst) else zip(_output_tensors(made), _output_tensors(watched), strict=False)
        ):
            everywhere = self.given.real[self.loaded.stacks[-1].side]
            if everywhere.shape != one.shape[:-1]:  # of a pooled vector, or of all tokens of a text without padding
                everywhere = torch.ones(one.shape[:-1], dtype=torch.bool, device=one.device)
            error = self._difference(other, one, everywhere) if one.shape == other.shape else float("inf")
            if not error <= CLOSE:
                self._refuse("behind the last layer", error)

    def _difference(self, found: Tensor, actual: Tensor, real: Tensor) -> float:
        error = _largest_difference(found, actual, real)
        self.worst = self.worst if isnan(self.worst) else max(self.worst, error)
        return error

    def _name(self, layer: nn.Module) -> str:
        return next((name for name, one in self.loaded.base.named_modules() if one is layer), type(layer).__name__)

    def _refuse(self, place: str, error: float) -> None:
        size = f" by {error:.1e} of the length of its vectors" if isfinite(error) else ""
        raise NormscopeError(
            f"{type(self.loaded.given).__name__} does not compute what normscope sees of it: watched, its pass begins "
            f"to differ from its own{size} {place}. Is its attention patched, or does a hook or wrapper change values? "
            "Remove that, load the model with attn_implementation='eager', and try again."
        )


def _step_name(step: Step) -> str:
    part = step.part
    path = getattr(part, "path", None) or getattr(part, "output", None) or getattr(part, "out", None)
    path = path or getattr(part, "module", None)
    return "the residual sum" if path is None else str(path)


def _largest_difference(found: Tensor, actual: Tensor, real: Tensor) -> float:
    """The largest ``||found - actual|| / ||actual||`` of a vector; one that almost vanishes beside the others is
    compared with those."""
    if torch.equal(found, actual):
        return 0.0  # NaN is not equal to itself
    if not bool(real.all()):  # to choose tokens takes longer than to compare them
        found, actual = found[real], actual[real]
    length = torch.linalg.vector_norm(actual, dim=-1)
    floor = (1e-3 * length.amax()).clamp_min(1e-30)
    return float((torch.linalg.vector_norm(found - actual, dim=-1) / torch.maximum(length, floor)).amax())


def _inputs_differ(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return False
    return not isinstance(other, Tensor) or one.shape != other.shape or not torch.equal(one, other)


def _output_tensors(made: Any) -> list[Tensor]:
    """What a model returns: its logits or last states."""
    given = made.to_tuple() if hasattr(made, "to_tuple") else made if isinstance(made, tuple) else (made,)
    return [one for one in given[:1] if isinstance(one, Tensor) and one.is_floating_point() and one.dim() > 1]
