"""Scope names: the papers' names, spelled in the order in which a layer's components are met.

Walking a layer component by component spells the names; a post-LN layer gives
`ATTN-W ATTN-N ATTNRES-W ATTNRES-N ATTNRESLN-N ATTNRESLNFF-N ATTNRESLNFFRES-N ATTNRESLNFFRESLN-N`.
A `-W` scope reads attention weights, an `-N` scope the norms of contribution vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from normscope.errors import NormscopeError, nearest
from normscope.models.spec import Attention, Block, FeedForward, Norm


@dataclass(frozen=True)
class Step:
    """One component of a layer and the scopes that are read after it. `part` None is the residual connection."""

    part: Attention | FeedForward | Norm | None
    norms: str | None  # name of the `-N` scope after this component
    weights: str | None = None  # name of the `-W` scope after this component
    alias: str | None = None  # architecture-independent name of `norms`
    opens: bool = False  # the first component of its block: the residual connection starts before it


def steps_of(blocks: Sequence[Block]) -> tuple[Step, ...]:
    """The components of a layer in its own order."""
    steps: list[Step] = []
    path = ""
    for block in blocks:
        (branch,) = block.branches  # parallel branches come with the families that have them
        attends = isinstance(branch.op, Attention)
        opens = len(steps)
        if branch.pre:
            path += "LN"
            # Attention starts afresh from its values, so the norm before it is no scope of its own.
            steps.append(Step(branch.pre, None if attends else f"{path}-N"))
        path += "ATTN" if attends else "FF"
        steps.append(
            Step(branch.op, f"{path}-N", "ATTN-W" if attends else None, alias="attention" if attends else "ff")
        )
        if branch.post:
            path += "LN"
            steps.append(Step(branch.post, f"{path}-N"))
        path += "RES"
        alias = "attention-residual" if attends else "ff-residual"
        steps.append(Step(None, f"{path}-N", f"{path}-W" if attends else None, alias))
        if block.after:
            path += "LN"
            steps.append(Step(block.after, f"{path}-N"))
        steps[opens] = Step(**{**vars(steps[opens]), "opens": True})
    return tuple(steps)


def names_of(blocks: Sequence[Block]) -> tuple[str, ...]:
    """All scope names of a layer, weights before norms at each component."""
    return tuple(name for step in steps_of(blocks) for name in (step.weights, step.norms) if name)


def aliases_of(blocks: Sequence[Block]) -> dict[str, str]:
    """alias -> scope name: `weights attention attention-residual attention-block ff ff-residual layer`.

    `attention-block` is the end of the block that attends (in a pre-LN layer its residual, in a post-LN layer its
    norm), `layer` the end of the layer.
    """
    steps = steps_of(blocks)
    table = {step.alias: step.norms for step in steps if step.alias and step.norms}
    table["weights"] = next(step.weights for step in steps if step.weights)
    last = max(n for n, step in enumerate(steps) if step.alias == "attention-residual")
    after = last + 1 < len(steps) and isinstance(steps[last + 1].part, Norm) and not steps[last + 1].opens
    table["attention-block"] = steps[last + after].norms or ""
    table["layer"] = steps[-1].norms or ""
    return table


def resolve(wanted: Iterable[str] | str | None, blocks: Sequence[Block]) -> tuple[str, ...]:
    """The scopes meant by `wanted` (names in any case, or aliases), in the layer's order; None means all of them."""
    names = names_of(blocks)
    if wanted is None:
        return names
    aliases = aliases_of(blocks)
    chosen = set()
    if not isinstance(wanted, Iterable):
        raise NormscopeError(f"A scope is a name such as 'ATTNRESLN-N', not {type(wanted).__name__} {wanted!r}.")
    for entry in [wanted] if isinstance(wanted, str) else wanted:
        if not isinstance(entry, str):
            raise NormscopeError(f"A scope is a name such as 'ATTNRESLN-N', not {type(entry).__name__} {entry!r}.")
        name = aliases.get(entry.strip().lower(), entry.strip().upper())
        if name not in names:
            raise NormscopeError(
                f"Unknown scope {entry!r}.{nearest(entry, [*names, *aliases])} "
                f"This model has: {', '.join(names)}; aliases: {', '.join(sorted(aliases))}."
            )
        chosen.add(name)
    if not chosen:
        raise NormscopeError(f"No scope was asked for. This model has: {', '.join(names)}.")
    return tuple(name for name in names if name in chosen)
