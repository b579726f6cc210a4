"""The proof: before it is analysed, a model runs on a short input twice, without and with recording.

Both passes must agree in the output of every layer and of the head, and every component recomputed from its record must
agree with the model. The proof holds until the model is changed: `model_fingerprint` is compared before each
run, and the proof is repeated if it differs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from normscope.errors import NormscopeError
from normscope.inputs.encode import encode, forward_inputs, real_tokens
from normscope.inputs.item import Item
from normscope.inputs.samples import random_inputs
from normscope.models.loaded import LayerCalls, LoadedModel
from normscope.models.modules import layer_modules, refuse_autocast, without_compilation
from normscope.models.scopes import Step, layer_steps
from normscope.models.spec import Side, Stack
from normscope.tracing.build import RecordRequest
from normscope.tracing.model_state import (
    attention_configs,
    attention_implementation,
    is_proved,
    model_fingerprint,
    model_lock,
    proved_models,
    store_calls,
)
from normscope.tracing.records import AttentionRecord, LayerRecord
from normscope.tracing.replay import replay_layer
from normscope.tracing.trace import watched_pass

CLOSE = 1e-4  # largest relative difference of equal vectors; rounding errors are well below
SHORT_LENGTH = 4  # tokens of the proof input
MASKED_LENGTH = 40  # tokens of the masked proof input for attention functions from outside transformers


@dataclass(frozen=True)
class ProofInput:
    """The input of both passes."""

    inputs: Mapping[str, Any]
    real: Mapping[Side, Tensor]  # (b, n): True for tokens that are not padding


def prove(loaded: LoadedModel) -> None:
    """Raise an error if the records of a model differ from what it computes; otherwise store its layer calls in
    `loaded`. A model that has not changed since its last proof is not run again."""
    with model_lock(loaded.base):
        if is_proved(loaded):
            return
        forget_proof(loaded)
        calls = _run_proof(loaded)  # before the fingerprint: transformers may add hooks when the model runs
        proved_models[loaded.base] = ((loaded.stacks, model_fingerprint(loaded)), calls)
        store_calls(loaded, calls)


def forget_proof(loaded: LoadedModel) -> None:
    """Discard the proof of a model, so that the next `prove` repeats it."""
    with model_lock(loaded.base):
        proved_models.pop(loaded.base, None)


def _run_proof(loaded: LoadedModel) -> LayerCalls:
    if loaded.family.input == "text" and has_foreign_attention(loaded.base):  # it must respect masks and windows too
        compare_proof_passes(loaded, _random_proof_input(loaded, MASKED_LENGTH, holes=True))
    calls, worst = compare_proof_passes(loaded, _random_proof_input(loaded, SHORT_LENGTH))
    if isnan(worst):
        raise NormscopeError("The model returns NaN or infinite values for a short input. Check its weights and dtype.")
    return calls


def _random_proof_input(loaded: LoadedModel, length: int, *, holes: bool = False) -> ProofInput:
    encoding = random_inputs(loaded, [length])[0]
    if holes:
        encoding["attention_mask"] = (torch.arange(len(encoding["input_ids"])) % 5 != 2).long()
    return proof_input(loaded, encode(loaded, encoding))


def proof_input(loaded: LoadedModel, items: Sequence[Item]) -> ProofInput:
    """The batch of `items` as input of a proof."""
    real = {stack.side: real_tokens(items, stack.side, loaded.base.device) for stack in loaded.stacks}
    return ProofInput(forward_inputs(loaded, items), real)


def compare_proof_passes(loaded: LoadedModel, given: ProofInput) -> tuple[LayerCalls, float]:
    """The layer calls of a recorded pass, and its largest relative difference from a plain pass (NaN if the plain pass
    returns values that are not finite). Raises an error at the first difference above CLOSE."""
    base, prompt = loaded.base, loaded.prompt
    prove_attention_has_mask(base)
    with model_lock(base):
        plain, output, entered = _plain_proof_pass(loaded, given)
        comparison = _PassComparison(loaded, given, plain)
        requests = [
            RecordRequest(
                stack,
                layer_steps(stack.blocks),
                None,
                comparison.layer_comparer(stack),
                given.real[stack.side],
                for_proof=True,
                virtual=prompt.count if prompt is not None and prompt.kind == "keys" else 0,
            )
            for stack in loaded.stacks
        ]
        # Some heads call only the decoder inside the base model, but analyses call all of it.
        model = (loaded.model if prompt is None else loaded.given) if entered else base
        watched = watched_pass(base, given.inputs, requests, loaded.dtype, model, to_the_end=True)
        comparison.compare_outputs(output, watched if entered else None)
        heads = {side: tuple(some) for side, some in comparison.heads.items()}
        modules = {side: tuple(call for call, _ in some) for side, some in plain.items()}
        return LayerCalls(modules, heads), comparison.worst


def has_foreign_attention(base: PreTrainedModel) -> bool:
    """True if the model uses an attention function from outside transformers."""
    names = {attention_implementation(config) for config in attention_configs(base)}
    functions = (ALL_ATTENTION_FUNCTIONS.get(name) for name in names)
    return any(one is not None and not one.__module__.startswith("transformers.") for one in functions)


def prove_attention_has_mask(base: PreTrainedModel) -> None:
    """Raise an error for an attention implementation without a registered mask function: transformers then builds no
    mask, and the tokens it attends to are unknown."""
    for name in {attention_implementation(config) for config in attention_configs(base)}:
        if name not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
            raise NormscopeError(
                f"The attention implementation {name!r} has no mask function, so the tokens it attends to are unknown. "
                "Register one with transformers.AttentionMaskInterface, or load the model with "
                "attn_implementation='eager'."
            )


def _plain_proof_pass(
    loaded: LoadedModel, given: ProofInput
) -> tuple[dict[str, list[tuple[nn.Module, Tensor]]], Any, bool]:
    """Run the model without recording: side -> the module and output of every layer call; the output of the model; True
    if the base model itself was called."""
    refuse_autocast(loaded.base.device)
    thread = threading.get_ident()
    rewrites = loaded.prompt is not None  # a soft prompt changes the inputs of the base model
    found: dict[str, list[tuple[nn.Module, Tensor]]] = {stack.side: [] for stack in loaded.stacks}
    handles = []
    changed: list[str] = []
    entered = [loaded.given is loaded.base or rewrites]

    def check_inputs(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if threading.get_ident() == thread:
            entered[0] = True
            named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | dict(kwargs)
            changed.extend(key for key, one in given.inputs.items() if _proof_inputs_differ(one, named.get(key)))

    def output_hook(side: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                y = output[0] if isinstance(output, tuple | list) else output
                found[side].append((module, y.clone()))  # it may be changed in place later

        return hook

    try:
        for stack in loaded.stacks:
            for layer in layer_modules(loaded.base, stack):
                handles.append(layer.register_forward_hook(output_hook(stack.side)))
        if loaded.given is not loaded.base:
            handles.append(loaded.base.register_forward_pre_hook(check_inputs, prepend=True, with_kwargs=True))
        with torch.no_grad(), without_compilation(loaded.given):
            output = loaded.given(**given.inputs)
        if changed and not rewrites:
            raise NormscopeError(
                f"{type(loaded.given).__name__} gives its layers other {', '.join(changed)} than it was given: a hook "
                "or wrapper changes them. Remove the hook or wrapper, or apply it to the input and analyse the result."
            )
        return found, output, entered[0]
    except NormscopeError:
        raise
    except Exception as error:  # models may raise anything
        tuples = getattr(loaded.base.config, "return_dict", True) is False
        hint = " Set model.config.return_dict = True." if tuples else ""
        raise NormscopeError(f"The model's own forward pass failed: {error}.{hint}") from error
    finally:
        for handle in handles:
            handle.remove()


class _PassComparison:
    """Compares a recorded pass with a plain one, layer by layer."""

    def __init__(
        self, loaded: LoadedModel, given: ProofInput, plain: Mapping[str, list[tuple[nn.Module, Tensor]]]
    ) -> None:
        self.loaded, self.given, self.plain = loaded, given, plain
        self.worst = 0.0
        self.heads: dict[str, list[int]] = {stack.side: [] for stack in loaded.stacks}

    def layer_comparer(self, stack: Stack) -> Callable[[LayerRecord], None]:
        """The `on_layer` callback that compares each record of a stack with the plain pass."""
        real = self.given.real[stack.side]
        encoder_real = self.given.real[self.loaded.stacks[0].side]

        def compare(record: LayerRecord) -> None:
            calls = self.plain[stack.side]
            if record.index >= len(calls):
                self._refuse_pass(f"at layer call {record.index}, which a plain pass does not make", nan)
            module, output = calls[record.index]
            for step, expected, actual in replay_layer(record):
                own = expected.shape[:2] == real.shape
                error = self._measure_difference(expected, actual, real if own else encoder_real)
                if not error <= CLOSE:
                    raise NormscopeError(
                        f"{self._module_path(module)}, layer {record.index} (counted from 0), does not match its "
                        f"family: the input or output of {_proof_step_name(step)} has a relative difference of "
                        f"{error:.1e} from the expected one. A hook changes values there, a module is wrapped or "
                        "replaced, or the family is described incorrectly. Undo the change, or describe the modified "
                        "model with normscope.register_family."
                    )
            last: Any = record.parts[-1]
            error = self._measure_difference(output.to(last.output.dtype), last.output, real)
            if not error <= CLOSE:
                if not bool(torch.isfinite(output[real]).all()):
                    self.worst = nan
                    return
                self._refuse_pass(f"in {self._module_path(module)}, layer {record.index} (counted from 0)", error)
            part = next(one for one in record.parts if isinstance(one, AttentionRecord))
            self.heads[stack.side].append(part.weights.shape[1])

        return compare

    def compare_outputs(self, plain: Any, watched: Any) -> None:
        """Raise an error if the passes differ in the number of layer calls or in the output of the model."""
        for side, heads in self.heads.items():
            if not isnan(self.worst) and len(heads) != len(self.plain[side]):
                self._refuse_pass(f"after layer call {len(heads)}: a plain pass makes {len(self.plain[side])}", nan)
        for one, other in (
            () if isnan(self.worst) else zip(_proof_output_tensors(plain), _proof_output_tensors(watched), strict=False)
        ):
            real = self.given.real[self.loaded.stacks[-1].side]
            if real.shape != one.shape[:-1]:  # pooled, or without padding: compare all vectors
                real = torch.ones(one.shape[:-1], dtype=torch.bool, device=one.device)
            error = self._measure_difference(other, one, real) if one.shape == other.shape else inf
            if not error <= CLOSE:
                self._refuse_pass("after the last layer", error)

    def _measure_difference(self, found: Tensor, actual: Tensor, real: Tensor) -> float:
        error = _largest_proof_difference(found, actual, real)
        self.worst = self.worst if isnan(self.worst) else max(self.worst, error)
        return error

    def _module_path(self, layer: nn.Module) -> str:
        return next((name for name, one in self.loaded.base.named_modules() if one is layer), type(layer).__name__)

    def _refuse_pass(self, place: str, error: float) -> None:
        size = f", with a relative difference of {error:.1e}" if isfinite(error) else ""
        raise NormscopeError(
            f"{type(self.loaded.given).__name__} computes something else when it is recorded: the pass begins to "
            f"differ {place}{size}. Its attention may be patched, or a hook or wrapper may change values. Remove it, "
            "or load the model with attn_implementation='eager'."
        )


def _proof_step_name(step: Step) -> str:
    part = step.part
    path = getattr(part, "path", None) or getattr(part, "output", None) or getattr(part, "out", None)
    path = path or getattr(part, "module", None)
    return "the residual sum" if path is None else str(path)


def _largest_proof_difference(found: Tensor, actual: Tensor, real: Tensor) -> float:
    """The largest ``||found - actual|| / ||actual||`` over vectors; for vectors below 1e-3 of the longest one, relative
    to that bound."""
    if torch.equal(found, actual):
        return 0.0  # NaN is not equal to itself
    if not bool(real.all()):  # selecting tokens is slower than comparing them
        found, actual = found[real], actual[real]
    length = torch.linalg.vector_norm(actual, dim=-1)
    floor = (1e-3 * length.amax()).clamp_min(1e-30)
    return float((torch.linalg.vector_norm(found - actual, dim=-1) / torch.maximum(length, floor)).amax())


def _proof_inputs_differ(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return False
    return not isinstance(other, Tensor) or one.shape != other.shape or not torch.equal(one, other)


def _proof_output_tensors(output: Any) -> list[Tensor]:
    """The logits or last hidden states that a model returned, as a list of at most one tensor."""
    parts = output.to_tuple() if hasattr(output, "to_tuple") else output if isinstance(output, tuple) else (output,)
    return [one for one in parts[:1] if isinstance(one, Tensor) and one.is_floating_point() and one.dim() > 1]
