"""What the sections of the feed-forward paper have in common: the scopes they read, which run, what was published."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normscope.models.scopes import aliases_of, steps_of
from normscope.view.labels import ranges

if TYPE_CHECKING:
    from normscope.analyzer import Analyzer
    from normscope.papers.experiments import Setting

PAPER = "ff"
REFERENCE = "BERT-base on Wikipedia"


@dataclass(frozen=True)
class Layout:
    """The scopes of a layer by their place around the feed-forward, under the model's own names."""

    chain: tuple[str, ...]  # the attention weights, then every scope of norms in the layer's order
    components: tuple[str, ...]  # what is new in each of the chain: ATTN-W, ATTN, RES1, LN1, FF, RES2, LN2
    residual: str  # after the attention's residual
    block: str  # before the feed-forward block: what its residual passes by
    input: str  # before the feed-forward itself; in a pre-LN layer its norm comes after `block`
    ff: str
    added: str  # what the residual adds: the feed-forward's output, in a sandwich layer after another norm
    ff_residual: str
    layer: str
    side: str

    @property
    def after(self) -> tuple[str, ...]:
        """The scopes after the feed-forward block's beginning."""
        return self.chain[self.chain.index(self.block) + 1 :]

    def component(self, scope: str) -> str:
        return self.components[self.chain.index(scope)]

    def before(self, scope: str) -> str:
        """The scope before this one."""
        return self.chain[self.chain.index(scope) - 1]


def layout(lens: Analyzer) -> Layout | None:
    """The scopes of the first side of a model; None where the feed-forward has none of its own (parallel layers)."""
    stack = lens.stacks[0]
    alias = aliases_of(stack.blocks)
    if alias["ff"] in (alias["attention-block"], alias["layer"]):
        return None
    chain = (alias["weights"], *dict.fromkeys(step.norms for step in steps_of(stack.blocks) if step.norms))
    place = {scope: n for n, scope in enumerate(chain)}
    return Layout(
        chain=chain,
        components=_components(chain),
        residual=alias["attention-residual"],
        block=alias["attention-block"],
        input=chain[place[alias["ff"]] - 1],
        ff=alias["ff"],
        added=chain[place[alias["ff-residual"]] - 1],
        ff_residual=alias["ff-residual"],
        layer=alias["layer"],
        side=stack.side,
    )


def known_layout(setting: Setting) -> Layout:
    """As `layout`, of a model that was found to have one."""
    found = layout(setting.lens)
    assert found is not None
    return found


def ends_with_norm(lens: Analyzer) -> bool:
    """Whether a norm follows the feed-forward's residual, as in post-LN layers."""
    return steps_of(lens.stacks[0].blocks)[-1].role == "after"


def missing(setting: Setting) -> str | None:
    """Why no experiment of this paper can be done with this model."""
    lens = setting.lens
    if lens.family.input != "text":
        return f"It reads text, but {lens.family.name} does not."
    if layout(lens) is None:
        return f"The feed-forward of {lens.family.name} runs beside the attention: there is no map before it."
    return None


def masked_run(setting: Setting) -> str:
    """The name of the run that the paper masks; what is no masked language model reads the text as it is."""
    return "masked" if setting.masks else "plain"


def described_input(setting: Setting) -> str:
    if setting.masks:
        return "12 % of the tokens of each sequence are masked, as in the paper."
    return "The text is read as it is, since this model knows no masked tokens; the paper masks 12 % of them."


def listed(layers: Sequence[int]) -> str:
    """ "layers 3-7, 9-11" of numbers in order, "layer 6" of one, "no layer" of none."""
    return f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}" if layers else "no layer"


def _components(chain: Sequence[str]) -> tuple[str, ...]:
    """What each scope of the chain adds to the one before, numbered: `LN1 ATTN`, `RES1`, `LN2`, `FF`, `RES2`."""
    found = [chain[0]]
    counts: dict[str, int] = {}
    before = ""
    for scope in chain[1:]:
        path = scope.removesuffix("-N")
        parts = re.findall("LN|XATTN|ATTN|RES|FF", path.removeprefix(before))
        names = []
        for part in parts:
            counts[part] = counts.get(part, 0) + 1
            names.append(f"{part}{counts[part]}" if part in ("LN", "RES") else part)
        found.append(" ".join(names))
        before = path
    return tuple(found)
