"""What a layer of a model family is made of, as data.

A layer is a sequence of blocks, each ``y = after(x + sum over branches of scale * post(op(pre(x))))``: `op` is
attention, cross-attention or feed-forward; `pre`, `post` and `after` are norms or nothing, `scale` a LayerScale or
multiplier or nothing. Post-LN layers fill `after`, pre-LN layers `pre`, sandwich layers `pre` and `post`; a parallel
layer is one block with two branches. All paths are dotted module names inside the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Side = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class Norm:
    """A normalisation module. `kind` says what it divides by and whether it subtracts the mean; its gain is
    ``offset + weight`` (Gemma: 1). An nn.Identity in its place changes nothing."""

    path: str
    kind: Literal["layer", "rms"] = "layer"
    offset: float = 0.0


@dataclass(frozen=True)
class Attention:
    """Multi-head attention: `module` calls transformers' attention interface, `value` and `output` are W_V and W_O.

    `packing` says where the value rows are in `value`: all of it, its tail (query, key, value in this order), or
    interleaved (query, key and value of each head in turn). A family outside the interface names in `probabilities`
    the dropout module whose input is the probabilities; its value vectors are then the output of `value`.
    `cross` attention reads the encoder's tokens. With `sinks` a part of each row's weight goes to no token.
    """

    module: str
    value: str
    output: str
    packing: Literal["alone", "tail", "interleaved"] = "alone"
    probabilities: str | None = None
    cross: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class FeedForward:
    """FF(x) = g(x W_1 + b_1) W_2 + b_2: `into` is W_1, `activation` g, `out` W_2.

    Gated: FF(x) = (g(x W_1 + b_1) * (x W_up + b_up)) W_2 + b_2, `up` is W_up; the same path as `into` says that one
    projection holds both, first what is activated.
    """

    into: str
    activation: str
    out: str
    up: str | None = None


@dataclass(frozen=True)
class Experts:
    """A mixture of gated feed-forwards, FF(x) = sum over the chosen e of r_e FF_e(x): `module` is called with the
    tokens, the indices of the chosen experts and their routing weights r_e, which are frozen.

    Its parameters are stacked by expert, (experts, out, in), or (experts, in, out) when `transposed`; `into` holds what
    is activated and what it gates, as halves or, when `interleaved`, in turn. Where the gate is no product g(a) u but
    another function of the two, `activation` names the method that computes it from both as they are packed, and
    `bend` the attribute that says where it has kinks.
    """

    module: str
    activation: str
    into: str = "gate_up_proj"
    into_bias: str | None = None
    out: str = "down_proj"
    out_bias: str | None = None
    transposed: bool = False
    interleaved: bool = False
    bend: str | None = None


@dataclass(frozen=True)
class Branch:
    """One way through a block: an operation with the norms and the scale around it."""

    op: Attention | FeedForward | Experts
    pre: Norm | None = None
    post: Norm | None = None
    scale: str | None = None  # path of a parameter that multiplies what the branch adds

    @property
    def entry(self) -> str | None:
        """The submodule that reads what enters the branch; None where only a cross-attention's queries do."""
        if self.pre is not None:
            return self.pre.path
        if isinstance(self.op, FeedForward):
            return self.op.into
        if isinstance(self.op, Experts):
            return self.op.module
        return None if self.op.cross else self.op.value


@dataclass(frozen=True)
class Block:
    """``y = after(x + sum over branches of scale * post(op(pre(x))))``."""

    branches: tuple[Branch, ...]
    after: Norm | None = None


@dataclass(frozen=True)
class Stack:
    """The layers of one side of a model."""

    side: Side
    layers: str  # pattern of the layer modules inside the base model; `*` stands for any one index
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Refusal:
    """A config attribute that breaks the algebra unless it has the value `allowed`."""

    attribute: str
    allowed: Any
    reason: str


@dataclass(frozen=True)
class Family:
    """One model family: where its layers are, what they are made of, which configs cannot be decomposed."""

    name: str
    model_types: tuple[str, ...]
    stacks: tuple[Stack, ...]
    attributes: frozenset[str]  # config attributes known to leave the algebra alone; any other must be at its default
    when: Mapping[str, Any] = field(default_factory=dict)  # config attributes that tell this variant from its kin
    input: Literal["text", "image", "audio"] = "text"
    positions: str | None = "max_position_embeddings"  # None: as long as one likes
    computed_positions: bool = False  # rotary or ALiBi: they go on behind the last that the config counts
    reserved_positions: Literal["none", "padding"] = (
        "none"  # "padding": RoBERTa's position ids start after pad_token_id
    )
    refusals: tuple[Refusal, ...] = ()
    note: str = ""

    def stack(self, side: str) -> Stack:
        """The stack of a side."""
        return next(stack for stack in self.stacks if stack.side == side)
