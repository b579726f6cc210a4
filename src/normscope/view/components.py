"""The components of a layer, in its own order: what a viewer draws the layer from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from normscope.analysis import Analysis
from normscope.models.registry import families
from normscope.models.scopes import Step, layer_steps, scope_aliases
from normscope.models.spec import Attention, Block

LABELS = {"attention": "ATTN", "cross-attention": "XATTN", "ff": "FF", "norm": "LN", "residual": "+RES", "scale": "×"}
SPELLED = {"ATTN": "attention", "XATTN": "cross-attention", "FF": "ff", "LN": "norm", "RES": "residual"}


def components_of(analysis: Analysis) -> list[dict[str, Any]]:
    """One entry for every component: kind, label, place among the layer's blocks and their branches, and the scopes of
    this analysis that are read after it."""
    blocks = blocks_of(analysis)
    made = _spelled(analysis) if blocks is None else _described(blocks)
    present = set(analysis.scopes)
    return [
        {
            "kind": kind,
            "label": LABELS[kind],
            "block": block,
            "branch": branch,
            "norms": norms if norms in present else None,
            "weights": weights if weights in present else None,
        }
        for kind, block, branch, norms, weights in made
    ]


def blocks_of(analysis: Analysis) -> tuple[Block, ...] | None:
    """The layer that the analysis is of: that of a known family with its name, side and scopes."""
    name, side = analysis.info.get("family"), analysis.rows[0].side
    stacks = [stack for family in families() if family.name == name for stack in family.stacks if stack.side == side]
    return next((stack.blocks for stack in stacks if scope_aliases(stack.blocks) == dict(analysis.aliases)), None)


Component = tuple[str, int, int, str | None, str | None]  # kind, block, branch, scope of norms, scope of weights


def _described(blocks: tuple[Block, ...]) -> Iterable[Component]:
    steps = iter(layer_steps(blocks))
    for number, block in enumerate(blocks):
        for place, branch in enumerate(block.branches):
            for _ in filter(None, (branch.pre, branch.op, branch.post, branch.scale)):
                step = next(steps)
                yield _kind(step), number, place, step.norms, step.weights
        for _ in range(1 + (block.after is not None)):  # the residual, and the norm after it
            step = next(steps)
            yield _kind(step), number, 0, step.norms, step.weights


def _kind(step: Step) -> str:
    if step.role == "op":
        if isinstance(step.part, Attention):
            return "cross-attention" if step.part.cross else "attention"
        return "ff"
    return {"sum": "residual", "scale": "scale"}.get(step.role, "norm")


def _spelled(analysis: Analysis) -> Iterable[Component]:
    """From the names of the scopes alone, where the family is not known here."""
    block = 0
    path = ""
    names = analysis.scopes
    longest = max([*names, *analysis.aliases.values()], key=len)
    for part in re.findall("X?ATTN|RES|LN|FF", longest):
        path += part
        if path.endswith(("RESLNATTN", "RESLNXATTN", "RESLNFF", "RESATTN", "RESXATTN", "RESFF")):
            block += 1
        weights = "XATTN-W" if part == "XATTN" else "ATTN-W" if part == "ATTN" else f"{path}-W"
        yield SPELLED[part], block, 0, "XATTN-N" if part == "XATTN" else f"{path}-N", weights
