"""Shared by the sections of the feed-forward paper: the scopes around the feed-forward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from normscope.analyzer import Analyzer
from normscope.models.scopes import layer_steps, scope_aliases
from normscope.papers.study import Setting

NAME = "ff"
REFERENCE = "BERT-base on Wikipedia"
SPEARMAN = "Spearman's correlation"
INTERVALS = "Bands: 95 % bootstrap intervals over sequences."
INCREASES = ("it increases in", "it decreases in")
EDITION = (
    "Tables and figures are numbered as in the preprint (arXiv 2302.00456, versions 1 and 2); ICLR numbering not "
    "checked."
)


@dataclass(frozen=True)
class FeedForwardLayout:
    """The scopes of a layer by their position relative to the feed-forward, under the model's names."""

    chain: tuple[str, ...]  # the attention weights, then all norm scopes in the order of the layer
    components: tuple[str, ...]  # the component each scope of the chain adds: ATTN-W, ATTN, RES1, LN1, FF, RES2, LN2
    residual: str  # after the attention's residual
    block: str  # before the feed-forward block; its residual is the bypass
    input: str  # before the feed-forward itself; in a pre-LN layer its norm comes after `block`
    ff: str
    added: str  # the output that is added to the residual; in a sandwich layer, after another norm
    ff_residual: str
    layer: str
    side: str

    @property
    def causal(self) -> bool:
        """Whether tokens attend only to earlier positions."""
        return self.side == "decoder"

    @property
    def after(self) -> tuple[str, ...]:
        """The scopes of the feed-forward block."""
        return self.chain[self.chain.index(self.block) + 1 :]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All pairs of scopes, in the order of the layer."""
        return [(a, b) for n, a in enumerate(self.chain) for b in self.chain[n + 1 :]]

    def component(self, scope: str) -> str:
        """The component that a scope adds."""
        return self.components[self.chain.index(scope)]

    def before(self, scope: str) -> str:
        """The scope before this one."""
        return self.chain[self.chain.index(scope) - 1]


def ff_layout(lens: Analyzer) -> FeedForwardLayout | None:
    """The scopes of the model's first side; None for parallel layers, where the feed-forward has no separate scope."""
    stack = lens.loaded.stacks[0]
    alias = scope_aliases(stack.blocks)
    if alias["ff"] in (alias["attention-block"], alias["layer"]):
        return None
    chain = (alias["weights"], *dict.fromkeys(step.norms for step in layer_steps(stack.blocks) if step.norms))
    return FeedForwardLayout(
        chain=chain,
        components=_layer_components(chain),
        residual=alias["attention-residual"],
        block=alias["attention-block"],
        input=chain[chain.index(alias["ff"]) - 1],
        ff=alias["ff"],
        added=chain[chain.index(alias["ff-residual"]) - 1],
        ff_residual=alias["ff-residual"],
        layer=alias["layer"],
        side=stack.side,
    )


def require_ff_layout(setting: Setting) -> FeedForwardLayout:
    """`ff_layout` of a model that is known to have one."""
    found = ff_layout(setting.lens)
    assert found is not None
    return found


def missing_ff_layout(setting: Setting) -> str | None:
    """Why no experiment of this paper can run on this model, or None."""
    family = setting.lens.family
    if family.input != "text":
        return f"This paper analyses text, but {family.name} does not read text."
    if ff_layout(setting.lens) is None:
        return f"The feed-forward of {family.name} runs in parallel with attention, so there is no map before it."
    return None


def missing_tokenizer(setting: Setting) -> str | None:
    """Why words cannot be identified, or None."""
    missing = missing_ff_layout(setting)
    return "Identifying words needs a tokenizer." if missing is None and setting.lens.tokenizer is None else missing


def missing_entities(setting: Setting) -> str | None:
    """Why named entities are not available, or None."""
    missing = missing_tokenizer(setting)
    if missing is None and not setting.has_entities:
        return "The corpus has no named entities; use CoNLL columns with IOB tags (--format conll)."
    if missing is None and not getattr(setting.lens.tokenizer, "is_fast", False):
        return "Locating entities needs a fast tokenizer, which reports the word of each token."
    return missing


def missing_last_norm(setting: Setting) -> str | None:
    """Why the layer does not end with a norm, as post-LN layers do, or None."""
    missing = missing_ff_layout(setting)
    if missing is None and layer_steps(setting.lens.loaded.stacks[0].blocks)[-1].role != "after":
        return f"Layers of {setting.lens.family.name} have no norm after the feed-forward's residual."
    return missing


def _layer_components(chain: Sequence[str]) -> tuple[str, ...]:
    """The component that each scope adds to the previous one, numbered: `LN1 ATTN`, `RES1`, `LN2`, `FF`, `RES2`."""
    found = [chain[0]]
    counts: dict[str, int] = {}
    before = ""
    for scope in chain[1:]:
        path = scope.removesuffix("-N")
        names = []
        for part in re.findall("LN|XATTN|ATTN|RES|FF", path.removeprefix(before)):
            counts[part] = counts.get(part, 0) + 1
            names.append(f"{part}{counts[part]}" if part in ("LN", "RES") else part)
        found.append(" ".join(names))
        before = path
    return tuple(found)
