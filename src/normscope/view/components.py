"""The components of a layer in the order of computation, from which the viewer draws the layer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from normscope.analysis import Analysis
from normscope.models.registry import families
from normscope.models.scopes import Step, layer_steps, scope_aliases
from normscope.models.spec import Attention, Block

COMPONENT_LABELS = {
    "attention": "ATTN",
    "cross-attention": "XATTN",
    "ff": "FF",
    "norm": "LN",
    "residual": "+RES",
    "scale": "×",
}
COMPONENT_KINDS = {
    "ATTN": "attention",
    "MIX": "attention",
    "XATTN": "cross-attention",
    "FF": "ff",
    "LN": "norm",
    "RES": "residual",
}


def layer_components(analysis: Analysis) -> list[dict[str, Any]]:
    """One entry per component: its kind and label, the indices of its block and branch, and the scopes of this analysis
    that end at it."""
    blocks = find_component_blocks(analysis)
    made = _components_from_scope_names(analysis) if blocks is None else _components_from_blocks(blocks)
    present = set(analysis.scopes)
    return [
        {
            "kind": kind,
            "label": COMPONENT_LABELS[kind],
            "block": block,
            "branch": branch,
            "norms": norms if norms in present else None,
            "weights": weights if weights in present else None,
        }
        for kind, block, branch, norms, weights in made
    ]


def find_component_blocks(analysis: Analysis) -> tuple[Block, ...] | None:
    """The blocks of the analysed layer, from the known family with this name, side and scopes; None if unknown."""
    name, side = analysis.info.get("family"), analysis.rows[0].side
    stacks = [stack for family in families() if family.name == name for stack in family.stacks if stack.side == side]
    return next((stack.blocks for stack in stacks if scope_aliases(stack.blocks) == dict(analysis.aliases)), None)


Component = tuple[str, int, int, str | None, str | None]  # kind, block, branch, scope of norms, scope of weights


def _components_from_blocks(blocks: tuple[Block, ...]) -> Iterable[Component]:
    steps = iter(layer_steps(blocks))
    for number, block in enumerate(blocks):
        for place, branch in enumerate(block.branches):
            for _ in filter(None, (branch.pre, branch.op, branch.post, branch.scale)):
                step = next(steps)
                yield _component_kind(step), number, place, step.norms, step.weights
        for _ in range(1 + (block.after is not None)):  # the residual, and the norm after it
            step = next(steps)
            yield _component_kind(step), number, 0, step.norms, step.weights


def _component_kind(step: Step) -> str:
    if step.role == "op":
        if isinstance(step.part, Attention):
            return "cross-attention" if step.part.cross else "attention"
        return "ff"
    return {"sum": "residual", "scale": "scale"}.get(step.role, "norm")


def _components_from_scope_names(analysis: Analysis) -> Iterable[Component]:
    """The components of an unknown family, from the names of its scopes."""
    block = 0
    path = ""
    names = analysis.scopes
    longest = max([*names, *analysis.aliases.values()], key=len)
    for part in re.findall("X?ATTN|MIX|RES|LN|FF", longest):
        path += part
        if path.endswith(("RESLNATTN", "RESLNXATTN", "RESLNFF", "RESATTN", "RESXATTN", "RESFF")):
            block += 1
        weights = f"{part}-W" if part in ("XATTN", "ATTN", "MIX") else f"{path}-W"
        yield COMPONENT_KINDS[part], block, 0, "XATTN-N" if part == "XATTN" else f"{path}-N", weights
