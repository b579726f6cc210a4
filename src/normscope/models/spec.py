"""The description of a model family and its layers as data.

A layer is a sequence of blocks, each ``y = after(skip * x + sum over branches of scale * post(op(pre(x))))``: `op` is
attention, cross-attention or feed-forward; `pre`, `post` and `after` are optional norms, and `scale` and `skip` are
optional multipliers, such as LayerScale. Post-LN layers use `after`, pre-LN layers `pre`, sandwich layers `pre` and
`post`; a parallel layer is one block with two branches. All paths are dotted module names relative to the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Side = Literal["encoder", "decoder"]
Multiplier = str | float | tuple[float, ...]  # the path of a parameter or number, a number, or one for every layer


@dataclass(frozen=True)
class Norm:
    """A LayerNorm or RMSNorm, whose gain is ``offset + weight`` (Gemma: offset 1). The module may be an nn.Identity.

    `probed`: the gain is another function of the module's parameters, found by calling it.
    """

    path: str
    kind: Literal["layer", "rms"] = "layer"
    offset: float = 0.0
    probed: bool = False


@dataclass(frozen=True)
class AttentionGate:
    """A factor on the mixed values of an attention, before its output projection: ``function(path's output + bias)``,
    held at what the forward pass made of it.

    `starts` are the columns of the projection at `path` at which the factors of each head begin: as many as the head is
    wide, or a single one for the whole head if `by_head`. With "interleaved" they are every other head's width, after
    as many other columns. `bias` is a parameter with one number for each head.
    """

    path: str
    function: Literal["sigmoid", "softplus", "tanh", "silu"]
    starts: tuple[int, ...] | Literal["interleaved"]
    by_head: bool = False
    bias: str | None = None


@dataclass(frozen=True)
class GatedNorm:
    """``gain * m / s(m) * g(z)`` of the mixed values m and a gate z, the two arguments of the module at `path`; with
    `gate_first`, ``gain * m * g(z) / s(m * g(z))``. Statistic and gate are held.

    s is the root mean square over the last dimension of m as the module reads it. g is `function`.
    """

    path: str
    function: Literal["silu", "sigmoid"] = "silu"
    gate_first: bool = False


@dataclass(frozen=True)
class Recurrence:
    """A recurrence that mixes values as attention does, with weights that it makes of queries, keys, decays and gates.

    `function` is the name of the function in the modelling file that computes it. Before it, the values pass the
    depthwise convolution over tokens at `filter`, of whose channels they are the first or the last, and a SiLU; after
    it the gated norm `norm`.
    """

    function: Literal["torch_chunk_gated_delta_rule", "mamba2_chunk_scan"]
    filter: str
    channels: Literal["first", "last"]
    norm: GatedNorm


@dataclass(frozen=True)
class ShortConvolution:
    """Token mixing by a short causal convolution: ``C * filter(B * x)``, where the value projection returns B, C and x
    side by side, and the gates B and C are held. `filter` is the path of the depthwise convolution over tokens."""

    filter: str


@dataclass(frozen=True)
class Attention:
    """Multi-head attention: `module` calls transformers' attention interface, `value` and `output` are W_V and W_O.

    `packing` says which outputs of `value` are values: all ("alone"), the last ones ("tail": query, key, value), those
    after as many others ("second"), the last ones of each head ("interleaved"), or those that begin at the given column
    for each value head. `groups` is the path of a number of groups into which `value` packs heads: queries and keys,
    then the values of some heads, then as many columns of a gate. If the
    attention does not use the interface, `probabilities` names the dropout module that reads the probabilities, and the
    value vectors are the output of `value`; or it is "matmul", and both are read off the product of the two. `cross`:
    attends to encoder tokens. `sinks`: part of each row's weight goes to no token.

    If values are made in two steps (multi-head latent attention), `latent` is the first projection and `latent_norm`
    the norm between it and `value`; the norm reads the first columns of the projection.

    Between `value` and the mixing there may be a parameter that is added, `value_shift`, a factor, `value_scale` (a
    number, or the path of a number or of a parameter with one for each head), or a norm of each head's values,
    `value_norm`. Between the mixing and `output` there may be a `gate`, or a norm of all heads side by side,
    `inner_norm`. `output_bias` is a parameter that is added to the output. `sink_scores` is a parameter with one score
    for each head that no key has: mixed values are multiplied by the share of the softmax that it leaves,
    ``sigmoid(logsumexp(scores) - sink)``.

    With a `recurrence`, tokens are mixed by that instead of by attention. In a stack of which some layers do so, the
    attention of the others is `hybrid`: scopes are named alike in all of them.
    """

    module: str
    value: str
    output: str
    packing: Literal["alone", "tail", "second", "interleaved"] | tuple[int, ...] = "alone"
    probabilities: str | None = None
    cross: bool = False
    sinks: bool = False
    latent: str | None = None
    latent_norm: Norm | None = None
    value_shift: str | None = None
    value_scale: str | float | None = None
    value_norm: Norm | None = None
    gate: AttentionGate | None = None
    inner_norm: Norm | None = None
    output_bias: str | None = None
    sink_scores: str | None = None
    groups: str | None = None
    recurrence: Recurrence | ShortConvolution | None = None
    hybrid: bool = False

    @property
    def word(self) -> str:
        """What scope names call it. The weights of MIX may be negative and need not sum to one."""
        if self.cross:
            return "XATTN"
        return "MIX" if self.hybrid or self.recurrence is not None else "ATTN"

    @property
    def entry(self) -> str:
        """Path of the submodule that reads the input of the attention."""
        return self.latent or self.value


@dataclass(frozen=True)
class FeedForward:
    """FF(x) = g(x W_1 + b_1) W_2 + b_2: `into` is W_1, `activation` g, `out` W_2.

    Gated: FF(x) = (g(x W_1 + b_1) * (x W_up + b_up)) W_2 + b_2, where `up` is W_up. If `up` and `into` are the same
    path, `packing` says which outputs are those of W_1: the first half and W_up the second ("halves"), the other way
    round ("swapped"), or every other one ("interleaved"). `activation` is a path, or `ACT2FN.name` for a function of
    transformers that the layer does not keep as a module. `inner_norm` is a norm of the hidden units before `out`.
    """

    into: str
    activation: str
    out: str
    up: str | None = None
    packing: Literal["halves", "swapped", "interleaved"] = "halves"
    inner_norm: Norm | None = None


@dataclass(frozen=True)
class Experts:
    """A mixture of gated feed-forwards, FF(x) = sum over the chosen e of r_e FF_e(x): `module` is called with the
    tokens, the indices of the chosen experts and their routing weights r_e, which are treated as constants.

    Parameters are stacked by expert, (experts, out, in), or (experts, in, out) if `transposed`. `into` packs W_1 and
    W_up as halves or, if `interleaved`, alternating. If the gate is not the product g(a) u but another function of a
    and u, `activation` names the method that computes it from the packed tensor, and `bend` the attribute that gives
    the position of its kinks. `shared` is a feed-forward beside the experts, for all tokens, multiplied by the sigmoid
    of `shared_gate` (a linear module with one output), which is held, if there is one. `scale` multiplies the sum over
    the experts. If every expert reads every token, multiplied by a score before the expert, `router` is the module that
    returns these scores, (tokens, experts).
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
    shared: FeedForward | None = None
    shared_gate: str | None = None
    scale: str | float | None = None
    router: str | None = None


@dataclass(frozen=True)
class Branch:
    """One branch of a block: an operation with its norms and scale."""

    op: Attention | FeedForward | Experts
    pre: Norm | None = None
    post: Norm | None = None
    scale: Multiplier | None = None  # of the output of the branch

    @property
    def entry(self) -> str | None:
        """Path of the submodule that reads the input of the branch; None if only cross-attention queries read it."""
        if self.pre is not None:
            return self.pre.path
        if isinstance(self.op, FeedForward):
            return self.op.into
        if isinstance(self.op, Experts):
            return self.op.router or self.op.module
        return None if self.op.cross else self.op.entry


@dataclass(frozen=True)
class Block:
    """``y = after(skip * x + sum over branches of scale * post(op(pre(x))))``."""

    branches: tuple[Branch, ...]
    after: Norm | None = None
    skip: Multiplier | None = None  # of x


@dataclass(frozen=True)
class Stack:
    """The layers of a model's encoder or decoder."""

    side: Side
    layers: str  # path of the layer modules in the base model; `*` matches any index
    blocks: tuple[Block, ...]
    variants: tuple[tuple[Block, ...], ...] = ()  # blocks of layers that have other submodules, in the same order
    in_place: bool = False  # layers change the outputs of submodules in place, so that copies are recorded


@dataclass(frozen=True)
class Refusal:
    """A config attribute that breaks the decomposition unless its value is `allowed`."""

    attribute: str
    allowed: Any
    reason: str


@dataclass(frozen=True)
class Family:
    """A model family: the path and components of its layers, and the configs that are supported."""

    name: str
    model_types: tuple[str, ...]
    stacks: tuple[Stack, ...]
    attributes: frozenset[str]  # config attributes without effect on the decomposition; others must be at their default
    when: Mapping[str, Any] = field(default_factory=dict)  # config values that select this variant
    input: Literal["text", "image", "audio"] = "text"
    positions: str | None = "max_position_embeddings"  # config attribute with the maximum length; None: unlimited
    computed_positions: bool = False  # rotary or ALiBi: inputs may exceed `positions`
    reserved_positions: Literal["none", "padding"] = (
        "none"  # "padding": RoBERTa's position ids start after pad_token_id
    )
    refusals: tuple[Refusal, ...] = ()
    note: str = ""
    derived: bool = False  # found by `normscope.derive`, not written by hand

    def stack(self, side: str) -> Stack:
        """The stack of the given side."""
        return next(stack for stack in self.stacks if stack.side == side)
