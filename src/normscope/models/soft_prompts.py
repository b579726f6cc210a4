"""Soft prompts of peft: virtual tokens that are learned and that no text has.

Prompt tuning and P-tuning put vectors in front of the embeddings: tokens as any other, rows and columns of every map.
Prefix tuning puts keys and values in front of those of every attention: columns without rows, since nothing is asked
there. Both are run by the peft model itself, so that nothing of it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from normscope.errors import NormscopeError

TOKENS = ("PROMPT_TUNING", "P_TUNING", "CPT")
KEYS = ("PREFIX_TUNING",)


@dataclass(frozen=True)
class SoftPrompt:
    """So many virtual tokens, which are tokens or only keys and values."""

    kind: Literal["tokens", "keys"]
    count: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"[prompt {n + 1}]" for n in range(self.count))


def active_soft_prompt(model: Any) -> SoftPrompt | None:
    """The soft prompt that is active in a peft model; None where there is none."""
    config = getattr(model, "active_peft_config", None)
    if config is None or getattr(model, "_adapters_disabled", False):
        return None
    if getattr(config, "is_adaption_prompt", False):
        raise NormscopeError(
            "A model with adaption prompts of peft cannot be analysed: they are attended to beside the tokens, by a "
            "softmax and a gate of their own, which no family describes. Use model.disable_adapter(), or prefix tuning."
        )
    if not getattr(config, "is_prompt_learning", False):
        return None
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if method in TOKENS:
        return SoftPrompt("tokens", int(config.num_virtual_tokens))
    if method in KEYS:
        return SoftPrompt("keys", int(config.num_virtual_tokens))
    raise NormscopeError(
        f"A model with {method.lower()} of peft cannot be analysed: what its virtual tokens are depends on more than "
        "the text. Known: prompt tuning, P-tuning, CPT, prefix tuning, and adapters of the weights."
    )
