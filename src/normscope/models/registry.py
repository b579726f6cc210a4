"""The supported model families, their lookup, registration of new ones, and refusal with a reason."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from normscope import plugins
from normscope.errors import NormscopeError
from normscope.models import causal, encoder_decoders, encoders, vision
from normscope.models.spec import Attention, Experts, Family, FeedForward, Stack

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = (*encoders.FAMILIES, *causal.FAMILIES, *encoder_decoders.FAMILIES, *vision.FAMILIES)
_registered: list[Family] = []
# Families that are known and cannot be decomposed.
REFUSED = {
    "falcon": "it does not compute its attention through transformers' attention interface",
    "bloom": "it does not compute its attention through transformers' attention interface",
    "mamba": "it has no attention",
    "rwkv": "it has no attention",
}


def families() -> tuple[Family, ...]:
    """All families: those that were registered, those of other packages (entry points `normscope.families`), and the
    built-in ones."""
    return (*_registered, *_plugin_families(), *FAMILIES)


@cache
def _plugin_families() -> tuple[Family, ...]:
    return tuple(plugins.load_entry_points("normscope.families", check_family))


def register_family(family: Family) -> None:
    """Make a family of your own known in this process; it takes precedence over a built-in one of the same model type.

    A package makes its families known to every process with an entry point `normscope.families` that names a Family.

    ``register_family(Family("Mine", ("my_model_type",), (Stack("decoder", "layers.*", blocks),), attributes))``

    Args:
        family: What the layers are made of. One of the same name is replaced.

    Raises:
        NormscopeError: If such layers are not supported.
    """
    check_family(family)
    _registered[:] = [known for known in _registered if known.name != family.name]
    _registered.insert(0, family)


def check_family(family: Any) -> None:
    """Refuse what is not a family, or one whose layers are not supported."""
    if not isinstance(family, Family):
        raise NormscopeError(f"Expected a normscope.models.spec.Family, not {type(family).__name__}.")
    for stack in family.stacks:
        _check_stack(family, stack)
    sides = [stack.side for stack in family.stacks]
    if sides not in (["encoder"], ["decoder"], ["encoder", "decoder"]):
        raise NormscopeError(f"The family {family.name} has the stacks {sides}; expected encoder, decoder, or both.")


def _check_stack(family: Family, stack: Stack) -> None:
    ops = [[branch.op for branch in block.branches] for block in stack.blocks]
    if not ops or not isinstance(ops[0][0], Attention) or ops[0][0].cross:
        raise NormscopeError(f"A layer of {family.name} must begin with an attention over its own tokens.")
    flat = [op for block in ops for op in block]
    if sum(isinstance(op, Attention) and not op.cross for op in flat) > 1:
        raise NormscopeError(
            f"A layer of {family.name} attends to its own tokens twice; such layers are not supported."
        )
    for number, block in enumerate(stack.blocks[1:]):
        if stack.blocks[number].after is None and not any(branch.entry for branch in block.branches):
            raise NormscopeError(
                f"In a layer of {family.name} a cross-attention reads a residual sum without a norm between; that is "
                "not supported."
            )
    feeding = [n for n, block in enumerate(ops) if n > 0 and any(isinstance(op, FeedForward | Experts) for op in block)]
    if feeding and feeding != [len(ops) - 1]:
        raise NormscopeError(f"In a layer of {family.name} something follows the feed-forward; that is not supported.")


def family_of(model: Any) -> Family:
    """The family of a Hugging Face model (base or with a task head), or a refusal that says why there is none."""
    from transformers import PreTrainedModel  # here: the command line lists families without waiting for it

    if not isinstance(model, PreTrainedModel):
        raise NormscopeError(
            f"Expected a Hugging Face model (transformers.PreTrainedModel), got {type(model).__name__}. "
            "Load one with AutoModel.from_pretrained(...) or Analyzer.from_pretrained(...)."
        )
    config: Any = model.base_model.config
    for family in families():
        if config.model_type in family.model_types and _config_matches(family, config):
            _refuse_unchecked_config(family, config)
            return family
    if config.model_type in REFUSED:
        raise NormscopeError(f"{type(model).__name__} cannot be decomposed: {REFUSED[config.model_type]}.")
    known = ", ".join(sorted({name for family in families() for name in family.model_types}))
    raise NormscopeError(
        f"{type(model).__name__} is of the family {config.model_type!r}, which normscope does not know. "
        f"Known families: {known}. For one of your own, see normscope.register_family."
    )


def _config_matches(family: Family, config: PreTrainedConfig) -> bool:
    return all(getattr(config, name, None) == value for name, value in family.when.items())


def _refuse_unchecked_config(family: Family, config: PreTrainedConfig) -> None:
    """Refuse a config whose attributes break the algebra, or that no one has checked (they differ from the default)."""
    for refusal in family.refusals:
        value = getattr(config, refusal.attribute, refusal.allowed)
        if value != refusal.allowed:
            raise NormscopeError(
                f"This {family.name} model cannot be decomposed: its config has {refusal.attribute}={value!r}; "
                f"{refusal.reason}."
            )
    defaults = type(config)().to_dict()
    for name, value in config.to_dict().items():
        if name in defaults and name not in family.attributes and value != defaults[name]:
            raise NormscopeError(
                f"This {family.name} model cannot be decomposed: its config has {name}={value!r} (default "
                f"{defaults[name]!r}), and what that does to a layer has not been checked."
            )
