"""Run a forward pass and record every layer.

Attention probabilities come from a stand-in for the model's attention function (`model_state`), everything else
from forward hooks. If only some rows of the probabilities are needed, or if they can be recomputed later, the model's
own attention function runs (`attention_rows`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from normscope.errors import NormscopeError
from normscope.inputs.encode import forward_inputs
from normscope.inputs.item import Item
from normscope.models.loaded import LoadedModel
from normscope.models.modules import (
    has_foreign_hooks,
    has_recurrence,
    is_plain_linear,
    last_path,
    layer_blocks,
    layer_modules,
    layer_submodule,
    paths_by_row,
    product_paths,
    refuse_autocast,
    watched_paths,
    without_compilation,
)
from normscope.models.scopes import Step, layer_steps
from normscope.models.spec import Norm
from normscope.tracing.attention_rows import AttentionCall, attend_in_blocks
from normscope.tracing.build import LayerCall, ProbabilitySpace, RecordRequest
from normscope.tracing.model_state import (
    active_trace,
    attention_stand_in,
    is_stand_in_missing,
    model_lock,
    uses_known_attention,
)
from normscope.tracing.products import attention_hooks, copy_tensors, product_watch
from normscope.tracing.recorded import gather_rows
from normscope.tracing.recurrence_calls import read_recurrence, recurrence_stand_ins

SCORES = 2**20  # attention scores computed at a time


def trace(
    loaded: LoadedModel,
    items: Sequence[Item],
    requests: Sequence[RecordRequest],
    *,
    head: bool = False,
    to_the_end: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """One recorded forward pass over a batch; `head` includes the model's head, `options` are arguments of the model
    besides its inputs. See `watched_pass`."""
    model = module_to_call(loaded, head)
    inputs = {**forward_inputs(loaded, items), **(options or {})}
    return watched_pass(loaded.base, inputs, requests, loaded.dtype, model, to_the_end)


def module_to_call(loaded: LoadedModel, head: bool) -> nn.Module:
    """The module to call for a pass: the model as the user passed it if it has a soft prompt, or if hooks before the
    base model may depend on how it is called."""
    if loaded.prompt is not None or loaded.base._forward_pre_hooks:
        return loaded.given
    return loaded.model if head else loaded.base


def watched_pass(
    base: PreTrainedModel,
    inputs: Mapping[str, Any],
    requests: Sequence[RecordRequest],
    dtype: torch.dtype,
    model: nn.Module | None = None,
    to_the_end: bool = False,
) -> Any:
    """One forward pass that passes each requested record to its `on_layer`; raises an error if any is missing.

    Stops after the last requested record. With `to_the_end` the pass completes and the output of `model` (the model
    with its head or adapters; default: `base`) is returned. If the model has foreign hooks, the pass always completes.
    """
    refuse_autocast(base.device)
    with model_lock(base), torch.no_grad(), without_compilation(base):
        in_blocks = uses_known_attention(base) and all(request.in_blocks for request in requests)
        recorder = Recorder(dtype, () if to_the_end or has_foreign_hooks(base) else requests, in_blocks)
        output, products = None, any(product_paths(request.steps) for request in requests)
        recurrent = any(has_recurrence(request.stack) for request in requests)
        with (
            attention_stand_in(base, recorder) as handles,
            recurrence_stand_ins(base) if recurrent else nullcontext(),
            product_watch(recorder) if products else nullcontext(),
        ):
            for request in requests:
                for layer in layer_modules(base, request.stack):
                    recorder.attach(layer, request, handles)
            try:
                output = (model or base)(**inputs)
            except _StopPassError:
                pass
            except Exception as error:  # models may raise anything
                if isinstance(error, NormscopeError) or not recorder.in_model or is_stand_in_missing(error):
                    raise
                raise NormscopeError(f"The model's own forward pass failed: {error}") from error
        for request in requests:
            recorder.refuse_unrecorded(request)
        return output


class _StopPassError(Exception):
    """Stops a forward pass after the last requested record."""


class Recorder:
    """Collects the inputs and outputs of the current layer call, and delivers its record once the requested steps are
    complete, while the tensors are still in the CPU caches."""

    def __init__(self, dtype: torch.dtype, until: Sequence[RecordRequest], in_blocks: bool = False) -> None:
        """The pass stops when the requests in `until` are complete; if empty, it runs to the end. `in_blocks`: the
        model's own attention function runs, and no attention keeps all its probabilities."""
        self.dtype = dtype
        self.in_blocks = in_blocks
        self.records_left = sum(len(request.layers or ()) for request in until)
        self.thread = threading.get_ident()
        self.call_counts: dict[str, int] = {}  # side -> layer calls so far
        self.recorded: dict[str, set[int]] = {}  # side -> layers whose records were delivered
        self.current_call: LayerCall | None = None  # the layer call in progress
        self.space = ProbabilitySpace(dtype)
        self.hooked: set[tuple[str, nn.Module]] = set()
        self.plain_linear: dict[int, frozenset[str]] = {}  # id of a layer -> paths of its unmodified linear submodules
        self.attending: str | None = None  # path of the running attention, if its products are watched
        self.in_model = True  # False while a record is processed, so that its errors are not taken for the model's

    def attach(self, layer: nn.Module, request: RecordRequest, handles: list[Any]) -> None:
        """Hook a layer. Each handle is appended to `handles` immediately, so that it is removed even after an error."""
        steps = layer_steps(layer_blocks(layer, request.stack))[: len(request.steps)]
        last = last_path(steps)
        modules = {
            path: layer_submodule(layer, path) for path in watched_paths(steps, request.constants or request.for_proof)
        }
        by_row = paths_by_row(steps) if request.positions is not None and not request.constants else set()
        if request.for_proof:
            self.plain_linear[id(layer)] = frozenset(path for path in modules if is_plain_linear(modules[path]))
        handles.append(layer.register_forward_pre_hook(self._layer_start_hook(request, steps), with_kwargs=True))
        for path in product_paths(steps):
            handles += attention_hooks(self, layer_submodule(layer, path), path)
        for path, module in modules.items():
            if (path, module) in self.hooked:  # layers may share a module
                continue
            self.hooked.add((path, module))
            hook = self._submodule_hook(path, request.stack.in_place, path in by_row)
            handles.append(module.register_forward_hook(hook))
            if path == last:
                handles.append(module.register_forward_hook(self._last_submodule_hook(len(modules))))
        handles.append(layer.register_forward_hook(self._on_layer_end))

    def refuse_unrecorded(self, request: RecordRequest) -> None:
        """Raise an error if a requested layer was not called."""
        side = request.stack.side
        calls, found = self.call_counts.get(side, 0), self.recorded.get(side, set())
        missing = sorted(set(request.layers or ()) - found)
        if missing or not found:
            raise NormscopeError(
                f"The forward pass called {calls} layers at {request.stack.layers}, but not the requested layer "
                f"{', '.join(map(str, missing)) or 0} (counted from 0). The model skips layers, or was changed after "
                "the Analyzer was created. Create a new Analyzer."
            )

    def is_active(self) -> bool:
        """True in the thread of the trace, while the model runs."""
        return threading.get_ident() == self.thread and getattr(active_trace, "recorder", None) is self

    def call_to_record(self) -> LayerCall | None:
        """The layer call in progress if its record is requested and not yet delivered."""
        call = self.current_call
        if not self.is_active() or call is None or call.recorded:
            return None
        return call if call.request.layers is None or call.index in call.request.layers else None

    def _layer_start_hook(
        self, request: RecordRequest, steps: tuple[Step, ...]
    ) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self.is_active():
                return
            stack, index = request.stack, self.call_counts.get(request.stack.side, 0)
            if request.calls is not None and not any(module is one for one in request.calls[index : index + 1]):
                raise NormscopeError(
                    f"Layer call {index} (counted from 0) at {stack.layers} is another module than when the Analyzer "
                    "was created: the model was changed, or its calls depend on the input. Create a new Analyzer."
                )
            x = args[0] if args else kwargs["hidden_states"]
            if x.shape[-2] != request.real.shape[1]:
                raise NormscopeError(
                    f"Layer {index} (counted from 0) at {stack.layers} reads {x.shape[-2]} tokens, but the input has "
                    f"{request.real.shape[1]}. The model adds or drops tokens, which its family does not support."
                )
            if index == 0:
                check_finite(x, request.real, "The embeddings before the first layer contain")
            encoder = kwargs.get("encoder_hidden_states")
            if encoder is None:
                encoder = next((one for one in args[1:] if is_encoder_output(one)), None)
            plain = self.plain_linear.get(id(module), frozenset())
            self.current_call = LayerCall(index, module, x, encoder, request, self.dtype, plain, self.space, steps)

        return hook

    def _submodule_hook(self, path: str, copy: bool, by_row: bool) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call = self.call_to_record()
            if call is not None:
                inputs, outputs = call.seen.setdefault(path, ([], []))
                inputs.append(copy_tensors(args) if copy else args)
                outputs.append(copy_tensors(output) if copy else output)
                if by_row:
                    call.keep_rows(path)

        return hook

    def _last_submodule_hook(self, count: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        """Hook that delivers the record after the last requested submodule, once all `count` submodules were called."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            call = self.call_to_record()
            if call is not None and len(call.seen) == count:
                self._deliver_record(call, call.unflatten(output))

        return hook

    def _on_layer_end(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.is_active():
            return
        call, requested = self.current_call, self.call_to_record() is not None
        assert call is not None
        y = output[0] if isinstance(output, tuple | list) else output
        if requested:
            check_last_norm(call, y)
            self._deliver_record(call, y)
        else:
            check_finite(y, call.request.real, f"Layer {call.index} (counted from 0) outputs")
        self.call_counts[call.request.stack.side] = call.index + 1
        self.current_call = None

    def _deliver_record(self, call: LayerCall, y: Tensor) -> None:
        """Build the record of a layer whose output so far is y, for `on_layer`."""
        check_finite(y, call.request.real, f"Layer {call.index} (counted from 0) outputs")
        active_trace.recorder, self.in_model = None, False  # `on_layer` may call modules
        try:
            record = call.record(y)
            self.recorded.setdefault(call.request.stack.side, set()).add(call.index)
            call.recorded = True
            for kept in (call.seen, call.attention, call.attention_rows, call.products, call.recurrences):
                kept.clear()
            call.request.on_layer(record)
            self.in_model = True
        finally:
            active_trace.recorder = self
        self.records_left -= 1
        if self.records_left == 0:
            raise _StopPassError

    def keep_recurrence(self, name: str, given: Mapping[str, Any], made: Any) -> None:
        """Keep what the function of a recurrence was given and returned."""
        call = self.call_to_record()
        if call is not None:
            call.recurrences.append((name, read_recurrence(name, given, made, self.dtype)))

    def attend(
        self,
        eager: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Eager attention of the model's family, some heads at a time so that the scores stay in cache. A different
        softmax would round differently and change later layers by about 1e-6."""
        call = self.call_to_record()
        if call is None:
            return eager(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]
        items, heads, rows = query.shape[:3]
        columns, shared = key.shape[2], heads // key.shape[1]  # query heads per key and value head
        by_head = any(isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] == heads for x in (mask, *kwargs.values()))
        by_head = by_head or any(one.numel() == heads for one in module.parameters(recurse=False))  # such as sinks
        step = heads if by_head else shared * max(1, SCORES // (items * rows * columns * shared))
        kept = self.space.take(bool(call.attention), (items, heads, columns, rows), query.device)
        outputs = []
        for head in range(0, heads, step):
            some, few = slice(head, head + step), slice(head // shared, (head + step) // shared)
            given = module, query[:, some], key[:, few], value[:, few], mask
            output, weights = call.attend(eager, given, kwargs)
            kept[:, :, some].copy_(weights.permute(0, 3, 1, 2))
            outputs.append(output)
        probabilities = kept.permute(0, 2, 3, 1)
        call.attention[id(module)] = (probabilities, value)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), probabilities

    def attend_in_blocks(
        self,
        function: Callable[..., Any],
        eager: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, None]:
        """The model's own attention `function`, whose probabilities are recorded for the requested rows only."""
        call = self.call_to_record()
        given = AttentionCall(eager, module, query, key, value, mask, kwargs)
        output, rows = attend_in_blocks(function, given, None if call is None else call.request.real)
        if call is not None:
            assert rows is not None
            call.attention_rows[id(module)] = rows, value, output
        return output, None


def check_last_norm(call: LayerCall, y: Tensor) -> None:
    """Raise an error if the output of a layer differs from that of its final norm, because a hook changes it."""
    request = call.request
    last = call.steps[-1].part
    whole = len(call.steps) == len(layer_steps(request.stack.blocks))
    if not whole or not isinstance(last, Norm) or last.path not in call.seen or request.for_proof:
        return  # a proof compares the output with that of a plain pass
    norm_output, y = call.row_output(last.path), call.rows_of(y)
    real = request.real if request.positions is None else gather_rows(request.real, request.positions)
    if norm_output.data_ptr() != y.data_ptr() and not torch.allclose(norm_output[real], y[real], 1e-5, 1e-6):
        raise NormscopeError(
            f"Layer {call.index} (counted from 0) does not output what {last.path}, its last component, outputs: a "
            "hook or wrapper changes it. Remove the hook or wrapper."
        )


def check_finite(x: Tensor, real: Tensor, subject: str) -> None:
    """Raise an error if a token that is not padding has NaN or infinite values; `subject` starts its message."""
    # If the sum is finite, all elements are. Padding may make it infinite, so then each token is checked.
    if not isfinite(x.sum().item()) and not bool(torch.isfinite(x[real]).all()):
        raise NormscopeError(f"{subject} NaN or infinite values. Check the weights and dtype of the model.")


def is_encoder_output(value: Any) -> bool:
    """True for a float tensor of 3 dimensions: among the later arguments of a layer, only encoder states are one."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3
