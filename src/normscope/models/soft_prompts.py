"""Soft prompts of peft: learned virtual tokens.

Prompt tuning and P-tuning prepend vectors to the embeddings; these tokens are rows and columns of every map. Prefix
tuning prepends keys and values in every attention; these are columns without rows, since they have no queries. In both
cases the peft model itself runs the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from normscope.errors import NormscopeError

TOKEN_METHODS = ("PROMPT_TUNING", "P_TUNING", "CPT")
KEY_METHODS = ("PREFIX_TUNING",)


@dataclass(frozen=True)
class SoftPrompt:
    """`count` virtual tokens, which are full tokens or only keys and values."""

    kind: Literal["tokens", "keys"]
    count: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"[prompt {n + 1}]" for n in range(self.count))


def active_soft_prompt(model: Any) -> SoftPrompt | None:
    """The active soft prompt of a peft model, or None."""
    config = getattr(model, "active_peft_config", None)
    if config is None or getattr(model, "_adapters_disabled", False):
        return None
    if getattr(config, "is_adaption_prompt", False):
        raise NormscopeError(
            "A peft model with adaption prompts cannot be analysed: they are attended to with a separate softmax and "
            "gate, which no family describes. Use model.disable_adapter(), or prefix tuning."
        )
    if not getattr(config, "is_prompt_learning", False):
        return None
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if method in TOKEN_METHODS:
        return SoftPrompt("tokens", int(config.num_virtual_tokens))
    if method in KEY_METHODS:
        return SoftPrompt("keys", int(config.num_virtual_tokens))
    raise NormscopeError(
        f"A peft model with {method.lower()} cannot be analysed: its virtual tokens do not depend on the text alone. "
        "Supported are prompt tuning, P-tuning, CPT, prefix tuning, and adapters of the weights."
    )
