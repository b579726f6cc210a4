"""Prove a description on the model itself: sums close under three decompositions, which test different parts of it.

Completeness of the maps alone accepts a wrong value projection, packing or norm, since values are read off the
attention. `value_bias="remainder"` and the flow use the projection and the norm before it, so all three must close, on
two inputs, alone and padded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from normscope.derivation.family import describe_model
from normscope.engine.request import Options, requests_for
from normscope.engine.run import Workspace, run_batch
from normscope.errors import NormscopeError, NormscopeWarning
from normscope.flow.resolve import TargetRequest
from normscope.flow.run import run_flow
from normscope.inputs.encode import encode
from normscope.inputs.item import Item
from normscope.inputs.samples import random_inputs
from normscope.models.loaded import LoadedModel, check_processor, check_tokenizer, load_model
from normscope.models.registry import is_built_in, refuse_unknown_type
from normscope.models.spec import Family
from normscope.models.versions import installed_version, is_tested
from normscope.tracing.proof import compare_proof_passes, proof_input, prove

CLOSE = 1e-5  # largest completeness error
LENGTHS = (9, 5)  # tokens of the two inputs, which are also padded to the same length
NO_REMAINDER = "value_bias='remainder' is not supported"  # for some biases, which the flow checks too


def derive(model: PreTrainedModel) -> Family:
    """Describe a model by watching one short pass, and prove the description on it.

    Works for any type of text model in transformers whose layers consist of attention, feed-forwards (experts too),
    norms and residual connections, whether or not normscope knows the type.

    Args:
        model: A transformers model in evaluation mode.

    Returns:
        The family, for `normscope.register_family` or to look at.

    Raises:
        NormscopeError: If something in a layer is not explained, naming it, or if the description does not hold.
    """
    return _load_in_turn(model, None, None, known=False, prove_loaded=_prove_fully).family


def load_proved(model: Any, tokenizer: Any, dtype: torch.dtype | None, derive: bool) -> LoadedModel:
    """Load a model with its family, and prove that it computes what the family says.

    A derived or registered description is proved by its sums too. So is a built-in one in a version of transformers
    that the tests were not run with; if it does not hold there, the model is derived instead.
    """
    tested = is_tested(installed_version())

    def prove_loaded(loaded: LoadedModel) -> None:
        if tested and is_built_in(loaded.family):
            prove(loaded)
        else:
            announce(loaded, _prove_fully(loaded))

    if not derive:
        loaded = load_model(model, tokenizer, dtype, refuse_unknown_type)
        _check_readers(loaded)
        prove_loaded(loaded)
        return loaded
    try:
        return _load_in_turn(model, tokenizer, dtype, known=True, prove_loaded=prove_loaded)
    except NormscopeError as error:
        if tested:
            raise
        try:
            return _load_in_turn(model, tokenizer, dtype, known=False, prove_loaded=prove_loaded)
        except NormscopeError:
            raise error from None


def _load_in_turn(
    model: Any, tokenizer: Any, dtype: torch.dtype | None, known: bool, prove_loaded: Callable[[LoadedModel], Any]
) -> LoadedModel:
    """Load and prove a model. If it is derived and the proof fails, perhaps layers with the same modules use them
    differently: then every layer is described by itself."""
    loaded = load_model(model, tokenizer, dtype, describe_model, known)
    _check_readers(loaded)
    try:
        prove_loaded(loaded)
        return loaded
    except NormscopeError as error:
        if not loaded.family.derived:
            raise
        again = load_model(loaded.given, tokenizer, dtype, partial(describe_model, every_layer=True), known)
        if again.family == loaded.family:
            raise NormscopeError(
                f"{type(loaded.model).__name__} cannot be described, since what was found by watching it does not hold "
                f"on the model itself: {error}"
            ) from error
        prove_loaded(again)
        return again


def _check_readers(loaded: LoadedModel) -> None:
    """Check the tokenizer and the processor of a model."""
    if loaded.family.input == "text" or loaded.two_sided:
        check_tokenizer(loaded.tokenizer, loaded.limits.vocabulary)
        check_processor(loaded)


def _prove_fully(loaded: LoadedModel) -> float:
    """Prove the records and the description of a model; returns the latter's largest error."""
    prove(loaded)
    return prove_description(loaded)


def prove_description(loaded: LoadedModel) -> float:
    """The largest completeness error of maps, with and without value biases, and flows; raises an error above CLOSE."""
    items = [encode(loaded, given)[0] for given in random_inputs(loaded, LENGTHS)]
    for batch in ([items[0]], items):  # longer than the input of `prove`, and padded
        compare_proof_passes(loaded, proof_input(loaded, batch))
    workspace, worst = Workspace(None), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NormscopeWarning)
        for batch in ([items[0]], [items[1]], items):
            for value_bias in ("token", "remainder"):
                worst = max(worst, _maps_error(loaded, batch, value_bias, workspace))
        for item in items:
            found = run_flow(loaded, item, "exact", TargetRequest(), "ig", workspace)
            found.maps  # noqa: B018  # computed on demand
            worst = max(worst, _refuse_open(loaded, "flow", found.completeness))
    return worst


def announce(loaded: LoadedModel, error: float) -> None:
    """Warn in one line that the family of a model was derived."""
    if loaded.family.derived:
        warnings.warn(
            f"normscope has no family for {type(loaded.model).__name__}: its layers were described by watching it, and "
            f"the description was proved on it (completeness {error:.0e}; `normscope derive` shows it).",
            NormscopeWarning,
            stacklevel=6,
        )


def _maps_error(loaded: LoadedModel, items: list[Item], value_bias: Any, workspace: Workspace) -> float:
    try:
        requests = requests_for(loaded, Options(value_bias=value_bias))
        results = run_batch(loaded, items, requests, workspace)
    except NormscopeError as error:
        if str(error).startswith(NO_REMAINDER):
            return 0.0
        raise
    errors = [
        _refuse_open(loaded, f"{scope}, value_bias={value_bias!r}", one)
        for result in results
        for side in (result.sides.values() if hasattr(result, "sides") else (result,))
        for scope, one in side.completeness.items()
    ]
    return max(errors)


def _refuse_open(loaded: LoadedModel, what: str, errors: Tensor | None) -> float:
    error = 0.0 if errors is None else float(errors.nan_to_num(float("inf")).max())
    if not error <= CLOSE:
        raise NormscopeError(
            f"The description {loaded.family.name!r} does not describe this model: contributions do not add up "
            f"({what}: error {error:.1e}, at most {CLOSE:.0e})."
        )
    return error
