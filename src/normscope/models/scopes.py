"""Scope names: the papers' names, spelled in the order in which a layer's components are met.

Walking a layer component by component spells the names; a post-LN layer gives
`ATTN-W ATTN-N ATTNRES-W ATTNRES-N ATTNRESLN-N ATTNRESLNFF-N ATTNRESLNFFRES-N ATTNRESLNFFRESLN-N`, a pre-LN layer
`ATTN-W LNATTN-N LNATTNRES-W LNATTNRES-N LNATTNRESLN-N ...`. Cross-attention alone is `XATTN-W` and `XATTN-N`.
A `-W` scope reads attention weights, an `-N` scope the norms of contribution vectors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeGuard

from normscope.errors import NormscopeError, did_you_mean
from normscope.models.spec import Attention, Block, Branch, Experts, FeedForward, Norm

Role = Literal["pre", "op", "post", "scale", "sum", "after"]


@dataclass(frozen=True)
class Step:
    """One component of a layer and the scopes that are read after it."""

    role: Role
    part: Attention | FeedForward | Experts | Norm | str | None  # "scale": a parameter's path; "sum": None
    norms: str | None = None  # name of the `-N` scope after this component
    weights: str | None = None  # name of the `-W` scope after this component
    alias: str | None = None  # architecture-independent name of `norms`
    starts: bool = False  # the first component of its branch: it reads what entered the block
    reader: str | None = None  # "sum": path of the submodule that reads it; None: the layer puts it out


@lru_cache(maxsize=64)
def layer_steps(blocks: tuple[Block, ...]) -> tuple[Step, ...]:
    """The components of a layer in its own order."""
    steps: list[Step] = []
    path = ""
    for number, block in enumerate(blocks):
        parallel = len(block.branches) > 1
        for branch in block.branches:
            path, made = _branch_steps(branch, path, mixed=number > 0, parallel=parallel)
            steps += made
        path += "RES"
        attends = any(isinstance(branch.op, Attention) for branch in block.branches)
        crosses = any(isinstance(branch.op, Attention) and branch.op.cross for branch in block.branches)
        weights = f"{path}-W" if attends and not crosses and not parallel else None
        alias = "attention-residual" if attends else "ff-residual"
        steps.append(Step("sum", None, f"{path}-N", weights, alias, reader=_sum_reader(blocks, number)))
        if block.after:
            path += "LN"
            steps.append(Step("after", block.after, f"{path}-N"))
    return tuple(steps)


def _sum_reader(blocks: tuple[Block, ...], number: int) -> str | None:
    """The submodule that reads the sum of a block: the norm after it, or what the next block begins with."""
    after = blocks[number].after
    if after is not None:
        return after.path
    if number + 1 == len(blocks):
        return None
    return next(path for branch in blocks[number + 1].branches if (path := branch.entry) is not None)


def _branch_steps(branch: Branch, path: str, *, mixed: bool, parallel: bool) -> tuple[str, list[Step]]:
    """The components of one branch. `mixed`: tokens have been mixed before this block, so that a norm before the
    branch's operation is a scope of its own (attention itself starts afresh from its values)."""
    steps = []
    op = branch.op
    second = parallel and not isinstance(op, Attention)  # LNATTNFFRES: the second branch is no scope of its own
    if branch.pre:
        path += "" if second else "LN"
        steps.append(Step("pre", branch.pre, f"{path}-N" if mixed and not parallel else None))
    if isinstance(op, Attention):
        path += "XATTN" if op.cross else "ATTN"
        name = "XATTN-N" if op.cross else f"{path}-N"
        weights = "XATTN-W" if op.cross else "ATTN-W"
        steps.append(Step("op", op, name, weights, "cross-attention" if op.cross else "attention"))
    else:
        path += "FF"
        steps.append(Step("op", op, None if second else f"{path}-N", alias=None if second else "ff"))
    if branch.post:
        path += "LN"
        steps.append(Step("post", branch.post, f"{path}-N"))
    if branch.scale:
        steps.append(Step("scale", branch.scale))
    steps[0] = replace(steps[0], starts=True)
    return path, steps


@lru_cache(maxsize=64)
def scope_names(blocks: tuple[Block, ...]) -> tuple[str, ...]:
    """All scope names of a layer, weights before norms at each component."""
    return tuple(name for step in layer_steps(blocks) for name in (step.weights, step.norms) if name)


@lru_cache(maxsize=64)
def scope_aliases(blocks: tuple[Block, ...]) -> Mapping[str, str]:
    """alias -> scope name: `weights attention attention-residual attention-block ff ff-residual layer`, and
    `cross-attention` where there is one.

    `attention-block` is the end of the last block that attends (in a pre-LN layer its residual, in a post-LN layer its
    norm), `layer` the end of the layer. A parallel layer has one block: its end is all of these but `attention`.
    """
    steps = layer_steps(blocks)
    table = {step.alias: step.norms for step in steps if step.alias and step.norms}
    table["weights"] = next(step.weights for step in steps if step.weights)
    last = max(n for n, step in enumerate(steps) if step.alias == "attention-residual")
    after = last + 1 < len(steps) and steps[last + 1].role == "after"
    table["attention-block"] = steps[last + after].norms or ""
    table["layer"] = steps[-1].norms or ""
    for alias in ("ff", "ff-residual"):
        table.setdefault(alias, table["layer"])
    return table


@lru_cache(maxsize=256)
def scope_keeps_own_token(scope: str) -> bool:
    """Whether a token can be part of its own output. Cross-attention reads the encoder's tokens only, so that before
    its residual connection there is no own token, and nothing that could be called mixing."""
    return re.search("XATTN(LN)?-[WN]$", scope) is None


def _is_list(given: object) -> TypeGuard[Iterable[object]]:
    return isinstance(given, Iterable) and not isinstance(given, str)


def check_scope_name(entry: object) -> str:
    """A scope as given, checked to be a string."""
    if not isinstance(entry, str):
        raise NormscopeError(f"A scope is a name such as 'ATTNRESLN-N', not {type(entry).__name__} {entry!r}.")
    return entry


def resolve_scopes(wanted: Iterable[str] | str | None, *stacks: tuple[Block, ...]) -> list[tuple[str, ...]]:
    """The scopes meant by `wanted` (names in any case, or aliases) in each stack, in the layer's order; None means all
    of them. Every entry must name a scope of one stack at least."""
    names = [scope_names(blocks) for blocks in stacks]
    aliases = [scope_aliases(blocks) for blocks in stacks]
    if wanted is None:
        return names
    entries = [check_scope_name(entry) for entry in (wanted if _is_list(wanted) else [wanted])]
    known = list(dict.fromkeys(name for some in names for name in some))
    short = list(dict.fromkeys(alias for some in aliases for alias in some))
    if not entries:
        raise NormscopeError(f"No scope was asked for. This model has: {', '.join(known)}.")
    chosen: list[set[str]] = [set() for _ in stacks]
    for entry in entries:
        meant = [some.get(entry.strip().lower(), entry.strip().upper()) for some in aliases]
        found = [n for n, name in enumerate(meant) if name in names[n]]
        for n in found:
            chosen[n].add(meant[n])
        if not found:
            raise NormscopeError(
                f"Unknown scope {entry!r}.{did_you_mean(entry, [*known, *short])} "
                f"This model has: {', '.join(known)}; aliases: {', '.join(sorted(short))}."
            )
    return [tuple(name for name in names[n] if name in chosen[n]) for n in range(len(stacks))]
