"""Shell completion of option values.

Completion must be fast, so torch is never imported: names from modules that need it are repeated here, and a test
compares the lists."""

from __future__ import annotations

from collections.abc import Iterable

METHODS = (
    "exact",
    "decompx",
    "rollout",
    "rollout-raw",
    "globenc",
    "alti",
    "alti+",
    "alti_logit",
    "value_zeroing",
    "gradient_x_input",
    "integrated_gradients",
)
GATES = ("ig", "frozen", "tangent", "shapley", "shapley-exact", "shapley-sampled", "shapley-gaussian")
FLOW_GATES = GATES[:3]  # linear in the input
VALUE_BIASES = ("token", "remainder")
MEASURES = ("mixing", "similarity", "category_sums", "value_norms", "vector_norms")


def complete_model(incomplete: str) -> list[str]:
    return _complete_names_starting_with(incomplete, ["default"])


def complete_device(incomplete: str) -> list[str]:
    return _complete_names_starting_with(incomplete, ["cpu", "cuda", "mps"])


def complete_method(incomplete: str) -> list[str]:
    return _complete_names_starting_with(incomplete, METHODS)


def complete_gate(incomplete: str) -> list[str]:
    return _complete_names_starting_with(incomplete, GATES)


def complete_flow_gate(incomplete: str) -> list[str]:
    return _complete_names_starting_with(incomplete, FLOW_GATES)


def complete_value_bias(incomplete: str) -> list[str]:
    return _complete_names_starting_with(incomplete, VALUE_BIASES)


def complete_measures(incomplete: str) -> list[str]:
    """Complete the last of several comma-separated names."""
    before, comma, last = incomplete.rpartition(",")
    chosen = before.split(",")
    names = [name for name in (*MEASURES, *(() if comma else ("list",))) if name not in chosen]
    return [f"{before}{comma}{name}" for name in _complete_names_starting_with(last, names)]


def complete_format(incomplete: str) -> list[str]:
    from normscope.corpus.readers.formats import FORMATS

    return _complete_names_starting_with(incomplete, FORMATS)


def complete_family(incomplete: str) -> list[str]:
    from normscope.models.registry import families

    return _complete_names_in_any_case(
        incomplete, (name for one in families() for name in (one.name, *one.model_types))
    )


def complete_scope(incomplete: str) -> list[str]:
    """Aliases first, since every model has them."""
    from normscope.models.registry import families
    from normscope.models.scopes import scope_aliases, scope_names

    stacks = [stack.blocks for family in families() for stack in family.stacks]
    aliases = [alias for blocks in stacks for alias in scope_aliases(blocks)]
    return _complete_names_in_any_case(
        incomplete, [*aliases, *(name for blocks in stacks for name in scope_names(blocks))]
    )


def _complete_names_starting_with(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _complete_names_in_any_case(incomplete: str, names: Iterable[str]) -> list[str]:
    """Case-insensitive names in the case that was typed; shells drop completions in another case."""
    forms = ([form for form in (name, name.lower(), name.upper()) if form.startswith(incomplete)] for name in names)
    return list(dict.fromkeys(some[0] for some in forms if some))
