"""Records of the computation of one layer, as plain tensors: built by `tracing`, read by `decompose`.

b items, n tokens, H heads, d model width; i indexes output tokens, j input tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.models.scopes import Step

Rows = slice | Tensor  # the same rows of all items, or the positions (b, R) of those of each


@dataclass(frozen=True)
class AttentionRows:
    """The probabilities of one attention in one pass, for some rows at a time."""

    shape: tuple[int, int, int, int]  # (b, H, i, j)
    compute: Callable[[Rows], Tensor]  # (b, H, R, j); without the last columns if a slice of rows attends to none
    device: torch.device
    sums: Tensor | None = None  # (b, H, i): the sum of each row; None: one
    misfit: Tensor | None = None  # the largest difference found so far, relative to rounding; None: exact
    together: int = 1  # rows that are cheaper to compute together

    def refuse_misfit(self) -> None:
        """Raise an error if the rows computed so far are not those that the attention function used."""
        if self.misfit is not None and not float(self.misfit) <= 1:
            raise NormscopeError(
                "The attention probabilities recomputed from queries and keys do not give the output of the model's "
                "attention function. Load the model with attn_implementation='eager'."
            )


@dataclass(frozen=True)
class FilterRecord:
    """A causal convolution over tokens, ``slope_j * sum_t taps_t * entry_(j-t) * values_(j-t) + constant_j``."""

    taps: Tensor  # (K, H, d_h): the tap t multiplies the values of the token t places before
    slope: Tensor  # (b, H, j, d_h): g(c) / c of an activation g of what the convolution returned, or ones
    constant: Tensor | None  # (b, H, j, d_h): the slope times biases, which depend on no token
    entry: Tensor | None = None  # (b, H, j, d_h): a gate on the values, held
    shares: Tensor | None = None  # (K H,): with which each tap and head enters maps of weights; None: the mean of tap 0


@dataclass(frozen=True)
class AttentionRecord:
    """``output_i = row_scale_i sum_j sum_h weights_hij (gate_hi * values_hj) matrix_h + bias``.

    With a `filter`, the weights are those of the values that it makes of `values`.
    """

    weights: Tensor  # (b, H, i, j) probabilities, stored as (b, j, H, i); the decomposition may overwrite them
    values: Tensor  # (b, H, j, d_h), including the value bias; fewer heads if several share one
    value_bias: Tensor | None  # (heads of the values, d_h): the part that depends on no token, b_V and W_V beta
    matrix: Tensor  # (H, d_h, d): W_O, the rows of each head
    bias: Tensor | None  # (d,) or (b, i, d): b_O
    output: Tensor  # (b, i, d) as computed by the model
    cross: bool = False  # j indexes encoder tokens
    sinks: bool = False  # part of each row's weight goes to no token
    latent: NormRecord | None = None  # between the two projections that make the values
    value_norm: NormRecord | None = None  # of each head's values; `inverse` is (b, heads of the values, j)
    gate: Tensor | None = None  # (b, i, H, d_h): multiplies the mixed values, held
    inner: NormRecord | None = None  # of the mixed values, all heads side by side; part of `matrix` and `bias`
    row_scale: Tensor | None = None  # (b, i): its 1 / s_i, which multiplies what `matrix` makes of the values
    rows: AttentionRows | None = None  # recomputes the weights, which then have no rows
    mixed: Tensor | None = None  # (b, i, H d_h): what W_O reads, if `rows` is given
    filter: FilterRecord | None = None
    shares: Tensor | None = None  # (H,): with which the heads enter maps of weights; None: their mean
    weight_error: Tensor | None = None  # (b, i): of weights that need not sum to one, see `build_recurrence`


@dataclass(frozen=True)
class ResidualRecord:
    """The sum of a residual connection, ``skip * x`` plus the outputs of the branches."""

    output: Tensor  # (b, i, d) as computed by the model
    skip: Tensor | None = None  # (d,)


@dataclass(frozen=True)
class ScaleRecord:
    """LayerScale or a multiplier: ``gain * x``."""

    gain: Tensor  # (d,)


@dataclass(frozen=True)
class NormRecord:
    """``output = gain * (x - mean x) / s + shift``; kind "rms" does not subtract the mean."""

    kind: Literal["layer", "rms"]
    inverse: Tensor  # (b, i): 1 / s_i in the forward pass
    gain: Tensor  # (d,)
    shift: Tensor | None  # (d,)
    output: Tensor  # (b, i, d)


@dataclass(frozen=True)
class Projection:
    """``hidden = x weight + bias``."""

    weight: Tensor  # (d, d_ff)
    bias: Tensor | None
    hidden: Tensor  # (b, i, d_ff)


@dataclass(frozen=True)
class Unit:
    """``g(into) out + out_bias``, or gated ``(g(into) * up) out + out_bias``, times `routing` if it is an expert."""

    into: Projection
    up: Projection | None
    activation: Callable[[Tensor], Tensor]
    activation_name: str | None  # None: no known closed form, integrate numerically
    out: Tensor  # (d_ff, d)
    out_bias: Tensor | None
    routing: Tensor | None = None  # (b, i), zero if the expert was not chosen
    joint: Callable[[Tensor, Tensor], Tensor] | None = None  # replaces g(into) * up
    bend: float | None = None  # position of the kinks of `joint`, in either argument
    inverse: Tensor | None = None  # (b, i): 1 / s_i of a norm before `out`, whose gain and shift `out` includes
    scaled_input: bool = False  # `routing` multiplies the input instead of the output


@dataclass(frozen=True)
class FeedForwardRecord:
    """The sum over units: one, or several in a mixture of experts."""

    units: tuple[Unit, ...]
    output: Tensor  # (b, i, d)
    inner: NormRecord | None = None  # of the hidden units, before W_2


Record = AttentionRecord | ResidualRecord | ScaleRecord | NormRecord | FeedForwardRecord


@dataclass(frozen=True)
class ProofRecord:
    """Inputs and outputs of submodules, by path, which a proof needs to connect the parts of a layer."""

    read: Mapping[str, Tensor]  # (b, n, ...): inputs of linear submodules
    plain: frozenset[str]  # unmodified linear submodules, whose outputs need no proof
    values: Mapping[str, Tensor]  # (b, heads of the values, n, d_h): outputs of modified value projections
    encoder: Tensor | None  # (b, n_encoder, d): encoder states passed to the layer


@dataclass(frozen=True)
class LayerRecord:
    """The input of one layer and the records of its components."""

    index: int
    input: Tensor  # (b, n, d)
    parts: tuple[Record, ...]  # one for each requested step of the layer
    steps: tuple[Step, ...]  # these steps, as the layer itself has them
    proof: ProofRecord | None = None  # only while a model is proved
