"""`python -m docs.make_families`: write docs/families.md from the family specs and from tiny models of each family.

Only the prose is written by hand. Layers, scopes and aliases come from `normscope.models` and
`normscope.models.scopes`, the errors from analyses of the tests' tiny models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import transformers

from normscope import Analyzer
from normscope.models import audio, causal, encoder_decoders, encoders, further_causal, hybrids, towers, vision
from normscope.models.registry import REFUSED, family_of
from normscope.models.scopes import scope_aliases, scope_names
from normscope.models.spec import Attention, Block, Experts, Family, FeedForward, Norm
from tests.helpers import tiny, zoo

PAGE = Path(__file__).parent / "families.md"
VERSION = "Made with transformers "  # start of the line with the version
GROUPS = {
    "Text encoders": encoders.FAMILIES,
    "Causal language models": (*causal.FAMILIES, *further_causal.FAMILIES),
    "Linear attention and state spaces": hybrids.FAMILIES,
    "Encoder-decoders": encoder_decoders.FAMILIES,
    "Vision": vision.FAMILIES,
    "Halves of models that compare pictures with texts": towers.FAMILIES,
    "Speech": audio.FAMILIES,
}
ALIASES = {
    "weights": "attention weights, mean over heads",
    "attention": "self-attention only: weights times transformed vectors, heads summed before the norm is taken",
    "cross-attention": "cross-attention only",
    "attention-residual": "after the residual connection of the last attention",
    "attention-block": "the end of the last block with attention, including the norm after it, if any",
    "ff": "after the feed-forward network, before its residual connection",
    "ff-residual": "after the residual connection of the feed-forward network",
    "layer": "the end of the layer",
}
INTRODUCTION = """\
# Model families

<!-- Written by `make families`; edit docs/make_families.py instead. -->

{version}

A family is a set of model types with the same kind of layers. The tables list

- the **model types** (`config.model_type`) of the family, and the setting that selects a variant;
- its **layer**, component by component, and the kinds of its norms and feed-forward network. [Layers](#layers) lists
  the scopes and aliases of each layer;
- what is **special** about it;
- its **completeness error** in float32 and float64: the distance between the sum of contributions and remainder and the
  vector that the model itself computed, relative to its length. It is the largest over all scopes and layers of a tiny
  model with random weights, rounded up to a power of ten. If both errors are similar, transformers computes a part of
  the layer (softmax or norms) in float32 for every dtype; the decomposition itself is exact.

Components: ATTN is self-attention, MIX self-attention in some layers and a recurrence (linear attention, a state space)
in the others, or in all, XATTN cross-attention, FF the feed-forward network, LN a norm of any kind, SCALE a
learned factor for each dimension (LayerScale), RES the residual connection. `[ATTN | FF]` are parallel: both read the
input of the block, and their outputs are added. A model with a task head counts as its base model.
If your model's family is not listed, [add it](guides/your-own-family.md).
"""
LAYERS = """\
## Layers

A scope is a point in the layer up to which contributions are followed; it is named after the components up to that
point. `-W` scopes read attention weights, `-N` scopes the norms of contribution vectors. An alias names the
corresponding scope in every layer, so use aliases to compare models:

{aliases}"""
REFUSALS = """\
## Refused models and settings

Known model types that cannot be decomposed:

{types}
Settings for which a family's layers cannot be decomposed:

{settings}
Any other setting that differs from its default is also refused, unless its effect on the layer has been checked.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION.format(version=f"{VERSION}{transformers.__version__}.")]
    models = _models()
    for title, families in GROUPS.items():
        parts += [f"## {title}\n", _families(families, models)]
    parts.append(LAYERS.format(aliases=_table(("alias", "what it means"), _coded(ALIASES.items()))))
    parts += _layers()
    types = _table(("model type", "reason"), _coded(REFUSED.items()))
    parts.append(REFUSALS.format(types=types, settings=_table(("families", "setting", "reason"), _settings())))
    return "\n".join(parts)


def _models() -> dict[str, str]:
    """Family name -> the name of a tiny model of it."""
    found: dict[str, str] = {}
    for name in (*tiny.FAMILIES, *tiny.HYBRIDS):
        found.setdefault(family_of(tiny.tiny(name)).name, name)
    for family in (family for some in GROUPS.values() for family in some):
        found.setdefault(family.name, family.model_types[0])
    return found


def _settings() -> Iterator[tuple[str, str, str]]:
    """The refused settings, each with the families that refuse it."""
    found: dict[tuple[str, str], list[str]] = {}
    for families in GROUPS.values():
        for family in families:
            for refusal in family.refusals:
                setting = f"`{refusal.attribute}` other than `{refusal.allowed!r}`"
                found.setdefault((setting, refusal.reason), []).append(family.name)
    return ((", ".join(users), setting, reason) for (setting, reason), users in found.items())


def _families(families: Sequence[Family], models: dict[str, str]) -> str:
    head = ("family", "model types", "layer", "norms", "feed-forward", "special", "float32", "float64")
    return _table(head, (_family(family, models[family.name]) for family in families))


def _family(family: Family, name: str) -> tuple[str, ...]:
    types = ", ".join(f"`{kind}`" for kind in family.model_types)
    setting = ", ".join(f"`{key}={value!r}`" for key, value in family.when.items())
    layers = [f"[{_escaped(_order(stack.blocks))}](#{_anchor(stack.blocks)})" for stack in family.stacks]
    if len(layers) > 1:
        layers = [f"{stack.side}: {layer}" for stack, layer in zip(family.stacks, layers, strict=True)]
    every = [block for stack in family.stacks for block in stack.blocks]
    return (
        family.name,
        f"{types} with {setting}" if setting else types,
        "; ".join(layers),
        _norms(every),
        _feed_forward(every),
        family.note,
        *(_rounded(_error(family, name, dtype)) for dtype in (torch.float32, torch.float64)),
    )


def _error(family: Family, name: str, dtype: torch.dtype) -> float:
    """The largest completeness error of one short input to the tiny model."""
    if name in (*tiny.FAMILIES, *tiny.HYBRIDS):
        model = tiny.tiny(name, dtype=dtype)
        given = tiny.inputs(name, model)
    else:
        model = zoo.tiny_model(name, dtype=dtype, **family.when)
        given = zoo.inputs_for(model)
    result = Analyzer(model).analyze(given)
    sides = (result.encoder, result.decoder) if hasattr(result, "encoder") else (result,)
    worst = max(float(error.max()) for side in sides for error in side.completeness.values())
    return max(worst, torch.finfo(dtype).eps)  # smaller errors are coincidence


def _rounded(error: float) -> str:
    """Rounded up to a power of ten."""
    return f"1e{math.ceil(math.log10(error)):03d}"


def _layers() -> Iterator[str]:
    """Each kind of layer: its order, its families, and its scopes with their aliases."""
    found: dict[str, tuple[Sequence[Block], list[str]]] = {}
    for families in GROUPS.values():
        for family in families:
            for stack in family.stacks:
                side = f" ({stack.side})" if len(family.stacks) > 1 else ""
                found.setdefault(_anchor(stack.blocks), (stack.blocks, []))[1].append(family.name + side)
    for blocks, users in found.values():
        aliases = scope_aliases(blocks)
        rows = (
            (f"`{scope}`", ", ".join(f"`{alias}`" for alias in ALIASES if aliases.get(alias) == scope))
            for scope in scope_names(blocks)
        )
        heading = f"### {_kind(blocks)}: {_escaped(_order(blocks))}"
        table = _table(("scope", "alias"), rows)
        yield f'<a id="{_anchor(blocks)}"></a>\n\n{heading}\n\n{", ".join(users)}.\n\n{table}'


def _order(blocks: Sequence[Block]) -> str:
    """The components in order: `LN ATTN RES LN FF RES`."""
    words = []
    for block in blocks:
        branches = []
        for branch in block.branches:
            name = branch.op.word if isinstance(branch.op, Attention) else "FF"
            parts = [branch.pre and "LN", name, branch.post and "LN", branch.scale and "SCALE"]
            branches.append(" ".join(part for part in parts if part))
        words.append(branches[0] if len(branches) == 1 else f"[{' | '.join(branches)}]")
        words.append("RES")
        if block.after:
            words.append("LN")
    return " ".join(words)


def _kind(blocks: Sequence[Block]) -> str:
    branches = [branch for block in blocks for branch in block.branches]
    if len(branches) > len(blocks):
        kind = "parallel"
    elif any(branch.post for branch in branches):
        kind = "sandwich"
    else:
        kind = "post-LN" if any(block.after for block in blocks) else "pre-LN"
    if any(branch.scale for branch in branches):
        kind += " with LayerScale"
    if any(isinstance(branch.op, Attention) and branch.op.cross for branch in branches):
        kind += " with cross-attention"
    return kind


def _anchor(blocks: Sequence[Block]) -> str:
    return "-".join(_order(blocks).lower().replace("[", "").replace("]", "").replace("|", "and").split())


def _escaped(order: str) -> str:
    """Escaped for a table and for the text of a link."""
    return order.replace("|", r"\|").replace("[", r"\[").replace("]", r"\]")


def _norms(blocks: Sequence[Block]) -> str:
    slots = [block.after for block in blocks]
    slots += [norm for block in blocks for branch in block.branches for norm in (branch.pre, branch.post)]
    return ", ".join(dict.fromkeys(_norm(norm) for norm in slots if norm))


def _norm(norm: Norm) -> str:
    name = {"layer": "LayerNorm", "rms": "RMSNorm"}[norm.kind]
    return f"{name}, gain {norm.offset:g} + weight" if norm.offset else name


def _feed_forward(blocks: Sequence[Block]) -> str:
    kinds = []
    for op in (branch.op for block in blocks for branch in block.branches):
        if isinstance(op, Experts):
            kinds.append("gated experts")
        elif isinstance(op, FeedForward):
            kinds.append("gated" if op.up else "plain")
    return ", ".join(dict.fromkeys(kinds))


def _coded(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    return ((f"`{key}`", value) for key, value in pairs)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
