"""The methods that `Analyzer.flow` knows, by name: what each computes, its options, and the models it is not for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from normscope.engine.request import Options, requests_for
from normscope.engine.run import Workspace
from normscope.engine.run import run_batch as run_requests
from normscope.errors import NormscopeError, did_you_mean
from normscope.flow import alti, alti_logit, decompx, exact, globenc, gradients, value_zeroing
from normscope.flow.freeze import FrozenModel
from normscope.flow.result import Scores
from normscope.flow.rollout import half_residual, rollout
from normscope.flow.targets import Aim
from normscope.inputs.item import Item
from normscope.measures.first_token import normalised
from normscope.models.loaded import LoadedModel
from normscope.models.scopes import resolve_scopes, scope_aliases, scope_names

Maps = tuple[Tensor, Tensor | None]  # (layers, rows, columns), and the completeness of vectors that were decomposed


@dataclass(frozen=True)
class Run:
    """What a method works on."""

    loaded: LoadedModel
    workspace: Workspace
    item: Item
    model: FrozenModel
    option: str  # what stands behind the colon of "name:option"


@dataclass(frozen=True)
class Method:
    """One way to tell what comes from where: maps, or scores of a target, or both."""

    maps: Callable[[Run], Maps] | None = None
    scores: Callable[[Run, Aim], Scores] | None = None  # None: the row of the map that the target is read from
    options: tuple[str, ...] = ("",)  # those there are, the default first
    free: bool = False  # any other option may be given too
    refuses: Callable[[LoadedModel, str], str] = lambda loaded, option: ""  # why a model or an option is not for it


def _one_sided(loaded: LoadedModel, option: str = "") -> str:
    reason = "cross-attention is not in its definition; use exact, decompx, alti+ or rollout:layer"
    return reason if loaded.two_sided else ""


def _two_sided(loaded: LoadedModel, option: str = "") -> str:
    return "" if loaded.two_sided else "it is for a decoder that reads an encoder; use alti"


def _post_norm(loaded: LoadedModel, option: str = "") -> str:
    if all(block.after for stack in loaded.stacks for block in stack.blocks):
        return _one_sided(loaded)
    return "it follows vectors through the norm after the feed-forward, which only post-LN layers have"


def _pre_norm(loaded: LoadedModel, option: str = "") -> str:
    if any(block.after for stack in loaded.stacks for block in stack.blocks):
        return "it needs a last state that is the sum of what all blocks add, and post-LN layers normalise that sum"
    return _one_sided(loaded)


def _rollout_refuses(loaded: LoadedModel, option: str) -> str:
    return _scope_refuses(loaded, option) if option else _one_sided(loaded)


def _scope_refuses(loaded: LoadedModel, option: str) -> str:
    if not option:
        raise NormscopeError("Which scope is to be rolled out? Say it behind a colon, such as rollout-raw:layer.")
    resolve_scopes([option], *(stack.blocks for stack in loaded.stacks))
    for stack in loaded.stacks if loaded.two_sided else ():
        names = scope_names(stack.blocks)
        name = scope_aliases(stack.blocks).get(option, option.upper())
        if name not in names or ("XATTN-N" in names and names.index(name) <= names.index("XATTN-N")):
            return "both sides need that scope, the decoder behind its cross-attention; use rollout:layer"
    return ""


def _steps_refuse(loaded: LoadedModel, option: str) -> str:
    if not option.isdecimal() or not 1 <= int(option) <= 1000:
        raise NormscopeError(
            f"integrated_gradients:{option} is not known: the option is the number of steps, 1 to 1000."
        )
    return ""


def _exact_maps(run: Run) -> Maps:
    return exact.maps(run.model)


def _exact_scores(run: Run, aim: Aim) -> Scores:
    return exact.scores(run.model, aim)


def _scope_maps(run: Run, scope: str) -> list[Tensor]:
    """The maps of one scope, of each side."""
    requests = requests_for(run.loaded, Options(scopes=[scope]))
    found: Any = run_requests(run.loaded, [run.item], requests, run.workspace)[0]
    return [one[scope] for one in ((found.encoder, found.decoder) if run.loaded.two_sided else (found,))]


def _rolled(sides: list[Tensor]) -> Maps:
    return rollout(sides[-1], rollout(sides[0])[-1] if len(sides) == 2 else None), None


def _rollout(run: Run) -> Maps:
    if run.option:
        return _rolled([normalised(one) for one in _scope_maps(run, run.option)])
    return _rolled([half_residual(one) for one in _scope_maps(run, "weights")])


def _rollout_raw(run: Run) -> Maps:
    return _rolled(_scope_maps(run, run.option))


def _globenc(run: Run) -> Maps:
    if run.option in globenc.SCOPES:
        return _rolled(_scope_maps(run, globenc.SCOPES[run.option]))
    if run.option == "n_fixedres":
        return _rolled([half_residual(normalised(one)) for one in _scope_maps(run, "ATTN-N")])
    (stack,) = run.model.stacks
    norms, ratios = globenc.encoder_norms(stack)
    if run.option == "w_res":
        return _rolled([globenc.weighted_residual(_scope_maps(run, "ATTN-W")[0], ratios[:, stack.real].cpu())])
    return _rolled([norms[:, stack.real][:, :, stack.real]])


def _decompx_maps(run: Run) -> Maps:
    return exact.maps(run.model) if run.option == "none" else decompx.maps(run.model, run.option)  # type: ignore[arg-type]


def _decompx_scores(run: Run, aim: Aim) -> Scores:
    if run.option == "none":
        return exact.scores(run.model, aim)
    return decompx.scores(run.model, aim, run.option)  # type: ignore[arg-type]


def _alti(run: Run) -> Maps:
    return alti.maps(*reversed(run.model.stacks)), None


def _alti_logit(run: Run, aim: Aim) -> Scores:
    return alti_logit.scores(run.model, aim, attention_only=run.option == "attention")


def _gradient(run: Run, aim: Aim) -> Scores:
    return gradients.gradient_x_input(run.loaded, run.item, run.model, aim)


def _integrated(run: Run, aim: Aim) -> Scores:
    return gradients.integrated_gradients(run.loaded, run.item, run.model, aim, int(run.option))


def _value_zeroing(run: Run) -> Maps:
    return _rolled([value_zeroing.layer_maps(run.loaded, run.item, run.model)])


METHODS: dict[str, Method] = {
    "exact": Method(_exact_maps, _exact_scores),
    "decompx": Method(_decompx_maps, _decompx_scores, options=(*decompx.SPLITS, "none")),
    "rollout": Method(_rollout, free=True, refuses=_rollout_refuses),  # :scope, with rows that sum to one
    "rollout-raw": Method(_rollout_raw, free=True, refuses=_scope_refuses),
    "globenc": Method(_globenc, options=("n_enc", *globenc.SCOPES, "n_fixedres", "w_res"), refuses=_post_norm),
    "alti": Method(_alti, refuses=_one_sided),
    "alti+": Method(_alti, refuses=_two_sided),
    "alti_logit": Method(None, _alti_logit, options=("all", "attention"), refuses=_pre_norm),
    "value_zeroing": Method(_value_zeroing, refuses=_one_sided),
    "gradient_x_input": Method(None, _gradient),
    "integrated_gradients": Method(None, _integrated, options=("50",), free=True, refuses=_steps_refuse),  # :steps
}


def chosen(loaded: LoadedModel, method: Any) -> tuple[Method, str]:
    """A method as given, "name" or "name:option", checked against the model."""
    name, _, option = str(method).partition(":")
    if name not in METHODS:
        raise NormscopeError(f"Unknown method {method!r}.{did_you_mean(name, METHODS)} Known: {', '.join(METHODS)}.")
    found = METHODS[name]
    option = option.strip().lower() or found.options[0]
    if option not in found.options and not found.free:
        known = ", ".join(f"{name}:{one}" if one else name for one in found.options)
        raise NormscopeError(f"Unknown method {method!r}. Known: {known}.")
    reason = found.refuses(loaded, option)
    if reason:
        raise NormscopeError(f"The method {method!r} is not for {loaded.family.name}: {reason}.")
    return found, option
