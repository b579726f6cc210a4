"""What a layer of a model family is made of, as data.

A layer is a sequence of blocks, each ``y = after(x + sum over branches of post(op(pre(x))))``: `op` is attention or
feed-forward; `pre`, `post` and `after` are norms or nothing. Post-LN layers fill `after`, pre-LN layers `pre`,
sandwich layers `pre` and `post`; a parallel layer is one block with two branches. All paths are dotted module names
inside the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Norm:
    """A normalisation module. `kind` says what it divides by and whether it subtracts the mean."""

    path: str
    kind: Literal["layer", "rms"] = "layer"


@dataclass(frozen=True)
class Attention:
    """Multi-head attention: `module` calls transformers' attention interface, `value` and `output` are W_V and W_O.

    A family outside the interface names in `probabilities` the dropout module whose input is the probabilities;
    its value vectors are then read from the output of `value`.
    """

    module: str
    value: str
    output: str
    probabilities: str | None = None


@dataclass(frozen=True)
class FeedForward:
    """FF(x) = g(x W_1 + b_1) W_2 + b_2: `into` is W_1, `activation` g, `out` W_2."""

    into: str
    activation: str
    out: str


@dataclass(frozen=True)
class Branch:
    op: Attention | FeedForward
    pre: Norm | None = None
    post: Norm | None = None


@dataclass(frozen=True)
class Block:
    branches: tuple[Branch, ...]
    after: Norm | None = None


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
    layers: str  # pattern of the layer modules inside the base model; `*` stands for any one index
    blocks: tuple[Block, ...]
    attributes: frozenset[str]  # config attributes known to leave the algebra alone; any other must be at its default
    depth: tuple[str, ...] = ("num_hidden_layers",)  # the number of layer calls is the product of these attributes
    positions: str = "max_position_embeddings"
    reserved_positions: Literal["none", "padding"] = (
        "none"  # "padding": RoBERTa's position ids start after pad_token_id
    )
    refusals: tuple[Refusal, ...] = ()
    note: str = ""
