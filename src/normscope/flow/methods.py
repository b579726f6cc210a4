"""The table of methods for `Analyzer.flow`: the functions of each, its options, and the models that it refuses."""

from __future__ import annotations

from normscope.errors import NormscopeError
from normscope.flow.alti import run_alti
from normscope.flow.alti_logit import run_alti_logit
from normscope.flow.decompx import PUBLISHED, SPLITS, run_decompx_maps, run_decompx_scores
from normscope.flow.exact import run_exact_maps, run_exact_scores
from normscope.flow.globenc import SCOPES, run_globenc
from normscope.flow.gradients import gradient_x_input, integrated_gradients
from normscope.flow.interface import Method
from normscope.flow.rollout import run_raw_rollout, run_rollout
from normscope.flow.value_zeroing import run_value_zeroing
from normscope.models.loaded import LoadedModel
from normscope.models.modules import has_recurrence
from normscope.models.scopes import resolve_scopes, scope_aliases, scope_names


def _method_refuses_two_sided(loaded: LoadedModel, option: str = "") -> str:
    reason = "cross-attention is not in its definition; use exact, decompx, alti+ or rollout:layer"
    return reason if loaded.two_sided else ""


def _method_refuses_one_sided(loaded: LoadedModel, option: str = "") -> str:
    return "" if loaded.two_sided else "it is for a decoder that reads an encoder; use alti"


def _method_refuses_decompx(loaded: LoadedModel, option: str) -> str:
    post_norm = all(block.after for stack in loaded.stacks for block in stack.blocks)
    if option != PUBLISHED or (post_norm and not loaded.two_sided):
        return ""
    return "the published code is for encoders with post-LN layers; use decompx"


def _method_refuses_pre_norm(loaded: LoadedModel, option: str = "") -> str:
    if all(block.after for stack in loaded.stacks for block in stack.blocks):
        return _method_refuses_two_sided(loaded)
    return "it follows vectors through the norm after the feed-forward, which only post-LN layers have"


def _method_refuses_post_norm(loaded: LoadedModel, option: str = "") -> str:
    if any(block.after for stack in loaded.stacks for block in stack.blocks):
        return "its last state must be the sum of all block outputs, and post-LN layers normalise that sum"
    if any(block.skip is not None for stack in loaded.stacks for block in stack.blocks):
        return "its last state must be the sum of all block outputs, and these layers multiply the stream"
    return _method_refuses_two_sided(loaded)


def _method_refuses_rollout(loaded: LoadedModel, option: str) -> str:
    for stack in loaded.stacks if has_recurrence(loaded.stacks[-1]) else ():
        if scope_aliases(stack.blocks).get(option or "weights", option.upper()) == "MIX-W":
            return "the weights of recurrences may be negative and their rows do not sum to one; use rollout:layer"
    return _method_refuses_scope(loaded, option) if option else _method_refuses_two_sided(loaded)


def _method_refuses_scope(loaded: LoadedModel, option: str) -> str:
    if not option:
        raise NormscopeError("rollout-raw needs a scope after a colon, such as rollout-raw:layer.")
    resolve_scopes([option], *(stack.blocks for stack in loaded.stacks))
    for stack in loaded.stacks if loaded.two_sided else ():
        names = scope_names(stack.blocks)
        name = scope_aliases(stack.blocks).get(option, option.upper())
        if name not in names or ("XATTN-N" in names and names.index(name) <= names.index("XATTN-N")):
            return "both sides need that scope, and in the decoder it must be after cross-attention; use rollout:layer"
    return ""


def _method_refuses_steps(loaded: LoadedModel, option: str) -> str:
    if not option.isdecimal() or not 1 <= int(option) <= 1000:
        raise NormscopeError(
            f"Unknown method 'integrated_gradients:{option}'. The option is the number of steps, 1 to 1000."
        )
    return ""


METHODS: dict[str, Method] = {
    "exact": Method(run_exact_maps, run_exact_scores),
    "decompx": Method(
        run_decompx_maps,
        run_decompx_scores,
        options=(*SPLITS, PUBLISHED, "none"),
        refusal=_method_refuses_decompx,
    ),
    "rollout": Method(
        run_rollout, free_option=True, refusal=_method_refuses_rollout
    ),  # :scope, with rows that sum to one
    "rollout-raw": Method(run_raw_rollout, free_option=True, refusal=_method_refuses_scope),  # :scope
    "globenc": Method(run_globenc, options=("n_enc", *SCOPES, "n_fixedres", "w_res"), refusal=_method_refuses_pre_norm),
    "alti": Method(run_alti, refusal=_method_refuses_two_sided),
    "alti+": Method(run_alti, refusal=_method_refuses_one_sided),
    "alti_logit": Method(None, run_alti_logit, options=("all", "attention"), refusal=_method_refuses_post_norm),
    "value_zeroing": Method(run_value_zeroing, refusal=_method_refuses_two_sided),
    "gradient_x_input": Method(None, gradient_x_input, frozen=False),
    "integrated_gradients": Method(
        None, integrated_gradients, options=("50",), free_option=True, frozen=False, refusal=_method_refuses_steps
    ),
}
