"""The target of a flow: one or several scalars, each a sum of directions read in the logits or in the last states.

A logit z_y is the direction e_y in its row of the logits, a contrast ``e_y - e_o``, the logit above the mean
``e_y - 1/V``. A log-probability is not linear: with the probabilities p held, its direction is ``e_y - p``, and

    ``log p_y = <e_y - p, z> + sum_k p_k log p_k``,

so that what is attributed is the logit above its expectation, and the negative entropy belongs to no token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from normscope.errors import NormscopeError
from normscope.flow.attention_blocks import attention_block_row_slices
from normscope.flow.maps import BackwardState, FrozenModel, FrozenPool, backward_block, backward_chain, start_backward
from normscope.flow.result import ScoreMatrix, Scores

Place = Literal["logits", "last layer", "end"]  # the end: after the norms that follow the last layer
Baseline = Literal["none", "logit", "mean", "probabilities"]  # what is subtracted from a logit


@dataclass(frozen=True)
class Target:
    """Scalars ``sum_r sign_r <direction_r, y_r>``, where y_r is a row of the logits or of the states."""

    descriptions: tuple[str, ...]  # one for each scalar
    rows: Tensor  # (reads,): the row that is read
    owners: Tensor  # (reads,), ascending: the scalar that a read belongs to
    signs: Tensor  # (reads,): 1 or -1
    indices: Tensor | None = None  # (reads,): the logit
    baseline: Baseline = "none"
    others: Tensor | None = None  # (reads,): the logit to subtract, for the baseline "logit"
    vectors: Tensor | None = None  # (reads, d): directions in the states instead of logits
    place: Place = "logits"
    each: bool = False  # every scalar by itself, as a matrix

    @property
    def contrast(self) -> bool:
        """Whether logits are subtracted from one another."""
        return self.baseline in ("logit", "mean") or bool((self.signs < 0).any())

    def first(self, count: int) -> Target:
        """The first scalars only."""
        reads = self.owners < count
        return replace(
            self,
            descriptions=self.descriptions[:count],
            rows=self.rows[reads],
            owners=self.owners[reads],
            signs=self.signs[reads],
            indices=None if self.indices is None else self.indices[reads],
            others=None if self.others is None else self.others[reads],
            vectors=None if self.vectors is None else self.vectors[reads],
        )

    def outputs(self, model: FrozenModel) -> Tensor:
        """(rows, width): what is read, as the model computed it."""
        if self.place == "logits":
            assert model.logits is not None
            return model.logits
        last = model.stacks[-1]
        return last.end_states if self.place == "end" else last.states[-1]

    def directions(self, y: Tensor, reads: slice = slice(None)) -> Tensor:
        """(reads, width): the direction of each read in its row of `outputs`, with its sign."""
        signs = self.signs[reads, None].to(y)
        if self.vectors is not None:
            return signs * self.vectors[reads].to(y)
        assert self.indices is not None
        rows = y[self.rows[reads]]
        made = torch.zeros_like(rows)
        if self.baseline == "probabilities":
            made = -rows.softmax(-1)
        elif self.baseline == "mean":
            made -= 1 / rows.shape[1]
        made.scatter_add_(1, self.indices[reads, None], torch.ones_like(signs))
        if self.others is not None:
            made.scatter_add_(1, self.others[reads, None], -torch.ones_like(signs))
        return signs * made

    def direction(self, y: Tensor) -> Tensor:
        """(rows, width): the sum of the directions of a single scalar, each in its row."""
        made = torch.zeros_like(y)
        for reads in read_blocks(self, y):
            made.index_put_((self.rows[reads],), self.directions(y, reads), accumulate=True)
        return made

    def values(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """(targets,), float64: the scalars as the model computed them, and what of them no direction holds."""
        found = y.new_zeros(2, len(self.descriptions), dtype=torch.float64)
        for reads in read_blocks(self, y):
            rows, signs = y[self.rows[reads]].double(), self.signs[reads].double()
            constant = torch.zeros_like(signs)
            if self.baseline == "probabilities":
                assert self.indices is not None
                rows = rows.log_softmax(-1)
                value = rows.gather(1, self.indices[reads, None])[:, 0]
                constant = (rows.exp() * rows).sum(-1)
            elif self.indices is not None:
                value = rows.gather(1, self.indices[reads, None])[:, 0]
                if self.others is not None:
                    value = value - rows.gather(1, self.others[reads, None])[:, 0]
                elif self.baseline == "mean":
                    value = value - rows.mean(-1)
            else:
                assert self.vectors is not None
                value = (rows * self.vectors[reads].double()).sum(-1)
            found.index_add_(1, self.owners[reads], torch.stack([value, constant]) * signs)
        return found[0], found[1]


def read_blocks(target: Target, y: Tensor, begin: int = 0, end: int | None = None) -> list[slice]:
    """The reads begin .. end in blocks whose directions in y fit into memory."""
    end = len(target.rows) if end is None else end
    blocks = attention_block_row_slices(end - begin, y.shape[-1] * 8)
    return [slice(begin + one.start, begin + one.stop) for one in blocks]


def start_at_target(model: FrozenModel, target: Target, first: int, count: int) -> BackwardState:
    """The directions (count, n, d) of the scalars first .. first + count - 1 in the last layer's states.

    The maps after the last layer treat every token alone, unless the head pools: they are applied to the rows that are
    read only.
    """
    last, y = model.stacks[-1], target.outputs(model)
    begin, end = (int(torch.searchsorted(target.owners, n)) for n in (first, first + count))
    chain = {"logits": (*last.tail, *model.head), "end": last.tail, "last layer": ()}[target.place]
    pooled = any(isinstance(one, FrozenPool) for one in chain)
    made = last.states[-1].new_zeros(count, *(y.shape if pooled else last.states[-1].shape))
    constants = made.new_zeros(count, dtype=torch.float64)
    for reads in read_blocks(target, y, begin, end):
        G, rows, owners = target.directions(y, reads), target.rows[reads], target.owners[reads] - first
        if not pooled:
            for one in reversed([one.for_rows(rows) for one in chain]):
                if one.constant is not None:
                    constants.index_add_(0, owners, (G * one.constant).sum(-1, dtype=torch.float64))
                G, _ = one.adjoint(G)
        made.index_put_((owners, rows), G, accumulate=True)
    state = BackwardState(made, constants)
    if pooled:
        state = start_backward(made)
        backward_chain(model.head, state)
        backward_block(last.end, state)
    return state


def build_target_scores(target: Target, model: FrozenModel, found: Tensor, remainder: float | None = None) -> Scores:
    """The scores of a single scalar. `remainder` is what the method leaves over of the directions; without it, the
    scores do not decompose the target, and their remainder and completeness are nan."""
    values, constants = target.values(target.outputs(model))
    left = values.new_full((1,), torch.nan) if remainder is None else constants + remainder
    error = _target_completeness(values, found[None], left)
    return Scores(
        target.descriptions[0], float(values[0]), found, float(left[0]), float(error[0]), contrast=target.contrast
    )


def build_target_matrix(target: Target, model: FrozenModel, found: Tensor, remainders: Tensor) -> ScoreMatrix:
    """The scores (targets, columns) of every scalar; `remainders` are what the method leaves over of the directions."""
    values, constants = target.values(target.outputs(model))
    left = constants + remainders
    return ScoreMatrix(
        target.descriptions, values, found, left, _target_completeness(values, found, left), target.contrast
    )


def _target_completeness(values: Tensor, found: Tensor, remainders: Tensor) -> Tensor:
    """(targets,): ``|sum of scores + remainder - value| / max(|value|, sum of |scores|)``"""
    total = found.double()
    size = torch.maximum(values.abs(), total.abs().sum(-1)).clamp_min(1e-30)
    return (total.sum(-1) + remainders - values).abs() / size


def target_row_of_map(target: Target, model: FrozenModel, map: Tensor) -> Tensor:
    """(columns,): the row of a map (rows, columns) at the target's token; the mean of the rows that a head pools."""
    real = model.stacks[-1].real
    pool = next((one for one in model.head if isinstance(one, FrozenPool)), None)
    if pool is not None:
        weights = pool.weights.sum(0)[real]
        return (weights / weights.sum()).to(map.device) @ map
    row = int(target.rows[0])
    if not bool(real[row]):
        raise NormscopeError(
            f"The token at position {row} is masked and has no row in the map. Choose another position."
        )
    return map[int(real[:row].sum())]


def refuse_target_of_method(target: Target, method: str, decomposes: bool) -> None:
    """Refuse a target that only the exact decomposition explains."""
    if method.partition(":")[0] == "exact":
        return
    if target.place != "logits":
        raise NormscopeError(f"The method {method!r} explains logits, not states: use method='exact'.")
    if target.each:
        raise NormscopeError(f"each=True needs method='exact'; {method!r} explains one target at a time.")
    if not decomposes and len(target.rows) > 1:
        raise NormscopeError(
            f"The method {method!r} has a map with one row for each token, and no scores for a sum of logits: use "
            "method='exact', or explain one token."
        )
