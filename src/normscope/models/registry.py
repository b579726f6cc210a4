"""The registry of model families: lookup, registration of new ones, and refusal of unsupported models."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from normscope import plugins
from normscope.errors import NormscopeError
from normscope.models import audio, causal, encoder_decoders, encoders, further_causal, hybrids, towers, vision
from normscope.models.description import family_from_json
from normscope.models.earlier import families_in
from normscope.models.field_types import check_field_types
from normscope.models.scopes import scope_names
from normscope.models.spec import Attention, Block, Experts, Family, FeedForward
from normscope.models.versions import installed_version, sdpa_ignores

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = families_in(
    installed_version(),
    (
        *encoders.FAMILIES,
        *causal.FAMILIES,
        *further_causal.FAMILIES,
        *hybrids.FAMILIES,
        *encoder_decoders.FAMILIES,
        *vision.FAMILIES,
        *towers.FAMILIES,
        *audio.FAMILIES,
    ),
)
_registered: list[Family] = []
# Model types that are known not to be supported, and why.
BY_CHANNEL = (
    "its recurrence has a decay of its own for every channel, so that tokens are mixed with as many weights as a layer "
    "has channels, not heads"
)
SPLIT_LAYERS = "its layers have different components in different orders, so that they have no scopes in common"
HALVES = ("text_model", "vision_model", "audio_model")
SIDE_BY_SIDE = "its type is two models side by side, each with its own inputs, and neither attends to the other"
REFUSED = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "recurrent_gemma", "rwkv"), BY_CHANNEL),
    **dict.fromkeys(("nemotron_h", "olmo_hybrid"), SPLIT_LAYERS),
    "falcon_h1": "a layer mixes tokens by attention and by a recurrence at once, with scopes for one of them only",
    "minimax": "its residual connections begin after the norms",
    **dict.fromkeys(("clip", "siglip", "siglip2", "chinese_clip", "metaclip_2", "altclip", "xclip"), SIDE_BY_SIDE),
    **dict.fromkeys(("groupvit", "clap", "vision-text-dual-encoder"), SIDE_BY_SIDE),
}


def families() -> tuple[Family, ...]:
    """All families: registered ones, those of plugins (entry points `normscope.families`), and built-in ones."""
    return (*_registered, *_plugin_families(), *FAMILIES)


@cache
def _plugin_families() -> tuple[Family, ...]:
    return tuple(plugins.load_entry_points("normscope.families", check_family))


def is_built_in(family: Family) -> bool:
    """Whether a family is one of normscope's own, which its tests prove."""
    return any(family is known for known in FAMILIES)


def register_family(family: Family | str | Path) -> None:
    """Register a model family in this process. It takes precedence over built-in families of the same model type.

    Before a model of a registered family is analysed, the description is proved on it: maps, maps without value biases
    and the flow must close.

    A package can register families in every process with `normscope.families` entry points, each naming a Family.

    ``register_family(Family("Mine", ("my_model_type",), (Stack("decoder", "layers.*", blocks),), attributes))``

    Args:
        family: Description of the layers, as a Family, as JSON (see `normscope derive --json`), or the path of a JSON
            file. A registered family of the same name is replaced.

    Raises:
        NormscopeError: If `family` is not a Family, or its layers are not supported.
    """
    family = family if isinstance(family, Family) or not isinstance(family, str | Path) else family_from_json(family)
    check_family(family)
    _registered[:] = [known for known in _registered if known.name != family.name]
    _registered.insert(0, family)


def check_family(family: Any) -> None:
    """Raise an error unless `family` is a Family whose layers are supported."""
    if not isinstance(family, Family):
        raise NormscopeError(f"Expected a normscope.models.spec.Family, not {type(family).__name__}.")
    check_field_types(family, f"the family {family.name!r}")
    for stack in family.stacks:
        for blocks in (stack.blocks, *stack.variants):
            _check_blocks(family, blocks)
        if any(scope_names(blocks) != scope_names(stack.blocks) for blocks in stack.variants):
            raise NormscopeError(f"The layers of {family.name} have different components in different orders.")
    sides = [stack.side for stack in family.stacks]
    if sides not in (["encoder"], ["decoder"], ["encoder", "decoder"]):
        raise NormscopeError(
            f"The family {family.name} has the stacks {sides}; expected an encoder, a decoder, or both."
        )


def _check_blocks(family: Family, blocks: tuple[Block, ...]) -> None:
    ops = [[branch.op for branch in block.branches] for block in blocks]
    if not ops or not all(ops) or not isinstance(ops[0][0], Attention) or ops[0][0].cross:
        raise NormscopeError(f"A layer of {family.name} must begin with self-attention.")
    flat = [op for block in ops for op in block]
    if sum(isinstance(op, Attention) and not op.cross for op in flat) > 1:
        raise NormscopeError(f"A layer of {family.name} has more than one self-attention, which is not supported.")
    for number, block in enumerate(blocks[1:]):
        if blocks[number].after is None and not any(branch.entry for branch in block.branches):
            raise NormscopeError(
                f"In a layer of {family.name}, cross-attention reads a residual sum without a norm in between, which "
                "is not supported."
            )
    feed_forwards = [n for n, block in enumerate(ops) if any(isinstance(op, FeedForward | Experts) for op in block)]
    if feed_forwards and feed_forwards != [len(ops) - 1]:
        raise NormscopeError(f"In a layer of {family.name}, a block follows the feed-forward, which is not supported.")


def find_family(model: Any) -> Family | None:
    """The family of a Hugging Face model, with or without a head; None if its type is unknown. Raises an error if it
    is known not to be supported."""
    from transformers import PreTrainedModel  # slow; not needed to list the families

    if not isinstance(model, PreTrainedModel):
        raise NormscopeError(
            f"Expected a Hugging Face model (transformers.PreTrainedModel), got {type(model).__name__}. "
            "Load one with AutoModel.from_pretrained(...) or Analyzer.from_pretrained(...)."
        )
    config: Any = model.base_model.config
    for family in families():
        if config.model_type in family.model_types and _config_matches(family, config):
            _refuse_unchecked_config(family, config)
            _refuse_incomplete_sdpa(family, config)
            return family
    if config.model_type in REFUSED:
        reason = REFUSED[config.model_type]
        advice = f" {_advise_half(model)}" if reason == SIDE_BY_SIDE else ""
        raise NormscopeError(f"{type(model).__name__} cannot be decomposed: {reason}.{advice}")
    return None


def _advise_half(model: Any) -> str:
    """What to pass instead of a model that is two models side by side, or has a head for one of them."""
    halves = [name for name in HALVES if hasattr(model.base_model, name)]
    return f"Pass one alone: {' or '.join(f'model.{name}' for name in halves)}."


def family_of(model: Any) -> Family:
    """The family of a Hugging Face model; raises an error if its type is unknown or not supported."""
    return find_family(model) or refuse_unknown_type(model)


def refuse_unknown_type(model: Any) -> NoReturn:
    """Raise the error for a model type without a family."""
    known = ", ".join(sorted({name for family in families() for name in family.model_types}))
    raise NormscopeError(
        f"{type(model).__name__} has the model type {model.base_model.config.model_type!r}, which normscope does not "
        f"know. Known families: {known}. To add another, use normscope.derive or normscope.register_family."
    )


def _config_matches(family: Family, config: PreTrainedConfig) -> bool:
    return all(getattr(config, name, None) == value for name, value in family.when.items())


def _refuse_incomplete_sdpa(family: Family, config: PreTrainedConfig) -> None:
    """Refuse a model whose sdpa attention ignores a setting of its config."""
    installed = installed_version()
    name = sdpa_ignores(config, installed)
    if name and getattr(config, "_attn_implementation", None) == "sdpa":
        raise NormscopeError(
            f"With transformers {installed}, the sdpa attention of {family.name} ignores {name}. Load the model with "
            "attn_implementation='eager', or upgrade transformers."
        )


def _refuse_unchecked_config(family: Family, config: PreTrainedConfig) -> None:
    """Refuse a config with an attribute that breaks the decomposition, or an unchecked one not at its default."""
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
                f"{defaults[name]!r}), and the effect of this on a layer has not been checked. If it has none, add "
                f"{name!r} to the attributes of the family."
            )
