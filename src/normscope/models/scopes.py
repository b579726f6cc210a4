"""Scope names, as in the papers: each spells the components of a layer that it covers, in order.

A post-LN layer has the scopes
`ATTN-W ATTN-N ATTNRES-W ATTNRES-N ATTNRESLN-N ATTNRESLNFF-N ATTNRESLNFFRES-N ATTNRESLNFFRESLN-N`; a pre-LN layer has
`ATTN-W LNATTN-N LNATTNRES-W LNATTNRES-N LNATTNRESLN-N ...`. Cross-attention alone is `XATTN-W` and `XATTN-N`.
`-W` scopes consist of attention weights, `-N` scopes of norms of contribution vectors.

A stack with recurrences (linear attention, state spaces) has `MIX` in the place of `ATTN`, in all of its layers. The
weights `MIX-W` may be negative and need not sum to one, so that no `-W` scope includes the residual connection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeGuard

from normscope.errors import NormscopeError, did_you_mean
from normscope.models.spec import Attention, Block, Branch, Experts, FeedForward, Multiplier, Norm

Role = Literal["pre", "op", "post", "scale", "sum", "after"]


@dataclass(frozen=True)
class Step:
    """One component of a layer and the scopes that end with it."""

    role: Role
    part: Attention | FeedForward | Experts | Norm | Multiplier | None  # "sum": None
    norms: str | None = None  # name of the `-N` scope that ends here
    weights: str | None = None  # name of the `-W` scope that ends here
    alias: str | None = None  # architecture-independent name of `norms`
    starts: bool = False  # first component of its branch, which reads the input of the block
    reader: str | None = None  # "sum": path of the submodule that reads it; None: output of the layer
    skip: Multiplier | None = None  # "sum": what multiplies the input of the block


@lru_cache(maxsize=64)
def layer_steps(blocks: tuple[Block, ...]) -> tuple[Step, ...]:
    """The components of a layer, in order."""
    steps: list[Step] = []
    path = ""
    for number, block in enumerate(blocks):
        parallel = len(block.branches) > 1
        for branch in block.branches:
            path, branch_steps = _scope_branch_steps(branch, path, mixed=number > 0, parallel=parallel)
            steps += branch_steps
        path += "RES"
        words = [branch.op.word for branch in block.branches if isinstance(branch.op, Attention)]
        attends = bool(words)
        weights = f"{path}-W" if words == ["ATTN"] and not parallel else None
        alias = "attention-residual" if attends else "ff-residual"
        steps.append(
            Step("sum", None, f"{path}-N", weights, alias, reader=_scope_sum_reader(blocks, number), skip=block.skip)
        )
        if block.after:
            path += "LN"
            steps.append(Step("after", block.after, f"{path}-N"))
    return tuple(steps)


def _scope_sum_reader(blocks: tuple[Block, ...], number: int) -> str | None:
    """Path of the submodule that reads the sum of a block: the norm after it, or the start of the next block."""
    after = blocks[number].after
    if after is not None:
        return after.path
    if number + 1 == len(blocks):
        return None
    return next(path for branch in blocks[number + 1].branches if (path := branch.entry) is not None)


def _scope_branch_steps(branch: Branch, path: str, *, mixed: bool, parallel: bool) -> tuple[str, list[Step]]:
    """The extended path and the components of one branch. `mixed`: an earlier block has mixed tokens, so that the norm
    before the operation is a separate scope."""
    steps = []
    op = branch.op
    second = parallel and not isinstance(op, Attention)  # LNATTNFFRES: the second branch is not a separate scope
    if branch.pre:
        path += "" if second else "LN"
        steps.append(Step("pre", branch.pre, f"{path}-N" if mixed and not parallel else None))
    if isinstance(op, Attention):
        path += op.word
        name = "XATTN-N" if op.cross else f"{path}-N"
        steps.append(Step("op", op, name, f"{op.word}-W", "cross-attention" if op.cross else "attention"))
    else:
        path += "FF"
        steps.append(Step("op", op, None if second else f"{path}-N", alias=None if second else "ff"))
    if branch.post:
        path += "LN"
        steps.append(Step("post", branch.post, None if second else f"{path}-N"))
    if branch.scale is not None:
        steps.append(Step("scale", branch.scale))
    steps[0] = replace(steps[0], starts=True)
    return path, steps


@lru_cache(maxsize=64)
def scope_names(blocks: tuple[Block, ...]) -> tuple[str, ...]:
    """All scope names of a layer, for each component weights before norms."""
    return tuple(name for step in layer_steps(blocks) for name in (step.weights, step.norms) if name)


@lru_cache(maxsize=64)
def scope_aliases(blocks: tuple[Block, ...]) -> Mapping[str, str]:
    """alias -> scope name: `weights attention attention-residual attention-block ff ff-residual layer`, and
    `cross-attention` if the layer has it.

    `attention-block` is the end of the last block with attention (pre-LN: its residual sum, post-LN: its norm), `layer`
    the end of the layer. A parallel layer is a single block, so that all aliases of norms except `attention` mean its
    end.
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
    """True if a token contributes to its own output. Cross-attention reads encoder tokens only, so before its residual
    connection no such contribution exists and mixing is undefined."""
    return re.search("XATTN(LN)?-[WN]$", scope) is None


def _is_scope_list(value: object) -> TypeGuard[Iterable[object]]:
    return isinstance(value, Iterable) and not isinstance(value, str)


def check_scope_name(entry: object) -> str:
    """Return `entry` if it is a string; raise an error otherwise."""
    if not isinstance(entry, str):
        raise NormscopeError(f"A scope is a name such as 'ATTNRESLN-N', not {type(entry).__name__} {entry!r}.")
    return entry


def resolve_scopes(wanted: Iterable[str] | str | None, *stacks: tuple[Block, ...]) -> list[tuple[str, ...]]:
    """The scopes of each stack that `wanted` names, in layer order; None means all.

    Entries are aliases or names in any case. Each must name a scope of at least one stack.
    """
    names = [scope_names(blocks) for blocks in stacks]
    aliases = [scope_aliases(blocks) for blocks in stacks]
    if wanted is None:
        return names
    entries = [check_scope_name(entry) for entry in (wanted if _is_scope_list(wanted) else [wanted])]
    known = list(dict.fromkeys(name for some in names for name in some))
    short = list(dict.fromkeys(alias for some in aliases for alias in some))
    if not entries:
        raise NormscopeError(f"No scope was given. This model has: {', '.join(known)}.")
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
