"""The supported model families, their lookup, and refusal with a reason."""

from __future__ import annotations

from math import prod
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from normscope.errors import NormscopeError
from normscope.models.bert import FAMILIES
from normscope.models.spec import Family

__all__ = ["FAMILIES", "Family", "depth_of", "family_of", "max_positions", "padding_id"]


def family_of(model: Any) -> Family:
    """The family of a Hugging Face model (base or with a task head), or a refusal that says why there is none."""
    if not isinstance(model, PreTrainedModel):
        raise NormscopeError(
            f"Expected a Hugging Face model (transformers.PreTrainedModel), got {type(model).__name__}. "
            "Load one with AutoModel.from_pretrained(...) or Analyzer.from_pretrained(...)."
        )
    config: Any = model.base_model.config
    for family in FAMILIES:
        if config.model_type in family.model_types:
            _refuse_unless_known(family, config)
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise NormscopeError(
        f"{type(model).__name__} is of the family {config.model_type!r}, which normscope does not know. "
        f"Known families: {known}."
    )


def depth_of(family: Family, config: PreTrainedConfig) -> int:
    """How many layers the model runs (calls, where one layer module is shared)."""
    return prod(int(getattr(config, name)) for name in family.depth)


def padding_id(base: PreTrainedModel) -> int:
    """The id that pads a batch: the one the embeddings count positions by, where they do (MPNet fixes its own)."""
    own = getattr(getattr(base, "embeddings", None), "padding_idx", None)
    return int(base.config.pad_token_id or 0) if own is None else int(own)


def max_positions(family: Family, base: PreTrainedModel) -> int:
    """The longest input the model has positions for."""
    reserved = padding_id(base) + 1 if family.reserved_positions == "padding" else 0
    return int(getattr(base.config, family.positions)) - reserved


def _refuse_unless_known(family: Family, config: PreTrainedConfig) -> None:
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
