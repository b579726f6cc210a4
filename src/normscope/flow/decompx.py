"""DecompX (Modarressi et al. 2023): vectors through all layers and the head, every bias split over the tokens.

A constant b that a component adds to the vectors ``x_i<-k`` is given to the tokens k by weights: "absdot"
``|b . x_i<-k|``, "abssim" the cosine instead, "norm" ``||x_i<-k||``, "equal" the same to all that have come so far.
Attention's constant ``b_V W_O + b_O`` is split when the residual connection has been added, b_1 before the activation,
which is held at ``g(a) / a``. So ``sum_k x_i<-k`` is the model's own vector, and scores sum to the logit. A split needs
all tokens of one output at once, and outputs do not meet but in attention: a layer's values are made in the small space
of its heads, then some rows at a time go through all of the layer and take the place of the old ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from normscope.flow.attending import spans
from normscope.flow.exact import missed, sources
from normscope.flow.freeze import FrozenModel
from normscope.flow.frozen import FrozenAttention, FrozenBlock, FrozenFeedForward, FrozenLayer, FrozenPool, Map
from normscope.flow.result import Scores
from normscope.flow.targets import Aim, scored

Split = Literal["absdot", "abssim", "norm", "equal"]
SPLITS = get_args(Split)


def maps(model: FrozenModel, split: Split) -> tuple[Tensor, Tensor]:
    """(layers, rows, columns): ``||x^l_i<-k||`` after every layer of the last side, and (layers,) the completeness.

    Columns are the last side's tokens, then the encoder's; masked tokens are left out.
    """
    last = model.stacks[-1]
    columns = torch.cat([stack.real for stack in (last, *model.stacks[:-1])])
    norms, errors = [], []
    for X, actual in zip(states(model, split), last.states[1:], strict=True):
        norms.append(X.norm(dim=-1)[last.real][:, columns])
        errors.append(missed(X.sum(1)[last.real], actual[last.real]))
    return torch.stack(norms), torch.tensor(errors, dtype=torch.float64)


def scores(model: FrozenModel, aim: Aim, split: Split) -> Scores:
    """The target by input token, through the head: nothing is left for a remainder."""
    assert model.logits is not None
    last = model.stacks[-1]
    *_, X = states(model, split)  # all of them one tensor
    chain = (*last.tail, *model.head)
    if not any(isinstance(one, FrozenPool) for one in chain):  # the one token that the target is read at is enough
        rows = slice(aim.row, aim.row + 1)
        X, chain = X[rows], tuple(one.at(rows) for one in chain)
    X = _chain(chain, X, split)
    columns = torch.cat([stack.real for stack in (last, *model.stacks[:-1])])
    return scored(aim, model.logits, (X[0] @ aim.direction(model.logits)[aim.row])[columns], 0.0)


def states(model: FrozenModel, split: Split) -> Iterator[Tensor]:
    """(n, sources, d) of the last side after every layer: one tensor, which the next layer overwrites."""
    counts = [len(stack.states[0]) for stack in model.stacks]
    encoder: Tensor | None = None
    for stack in model.stacks:
        last = stack is model.stacks[-1]
        X = sources(stack.states[0], 0 if last else counts[-1], sum(counts), remainder=False)
        for layer in stack.layers:
            _layer(layer, X, encoder, split)
            if last:
                yield X
        if not last:
            for rows in spans(len(X), X[0].numel() * X.element_size()):
                X[rows] = _chain([one.at(rows) for one in stack.tail], X[rows], split)
            encoder = X


def _layer(layer: FrozenLayer, X: Tensor, encoder: Tensor | None, split: Split) -> None:
    values: dict[int, Tensor] = {}
    for block in layer.blocks:
        for chain in block.branches:
            for number, one in enumerate(chain):
                if isinstance(one, FrozenAttention):
                    values[id(one)] = _values(one, chain[:number], encoder if one.cross else X, split)
    widest = max([X.shape[2], *(w.shape[1] for one in _feed_forwards(layer) for u in one.units for w in u.weights)])
    for rows in spans(len(X), X.shape[1] * widest * X.element_size()):
        x = X[rows]
        for block in layer.blocks:
            x = _block(block, rows, x, values, split)
        X[rows] = x


def _values(one: FrozenAttention, before: tuple[Map, ...], read: Tensor | None, split: Split) -> Tensor:
    """(H, j, sources * d_h), of all tokens; a norm before the attention is that of its own side only."""
    assert read is not None
    made = read.new_empty(len(one.value), len(read), read.shape[1] * one.value.shape[2])
    for rows in spans(len(read), read[0].numel() * read.element_size()):
        x = read[rows] if one.cross else _chain([part.at(rows) for part in before], read[rows], split)
        made[:, rows] = one.values(x)
    return made


def _block(block: FrozenBlock, rows: slice, x: Tensor, values: dict[int, Tensor], split: Split) -> Tensor:
    total, late = x, None
    for chain in block.branches:
        state = x
        for number, one in enumerate(part.at(rows) for part in chain):
            if not isinstance(one, FrozenAttention):
                state = _through(one, state, split)
                continue
            state = one.mix(values[id(chain[number])])
            if number == len(chain) - 1:
                late = one.constant
            else:
                state = give(state, one.constant, split)
        total = state.add_(total)
    total = give(total, late, split)
    return total if block.after is None else _through(block.after.at(rows), total, split)


def _chain(chain: tuple[Map, ...] | list[Map], X: Tensor, split: Split) -> Tensor:
    for one in chain:
        X = _through(one, X, split)
    return X


def _through(one: Map, X: Tensor, split: Split) -> Tensor:
    if isinstance(one, FrozenFeedForward):
        return _feed_forward(one, X, split)
    return give(one.forward(X, None), one.constant, split)


def _feed_forward(one: FrozenFeedForward, X: Tensor, split: Split) -> Tensor:
    """``(c * (p_k + w_k b_1)) W_2``, its second summand as ``w_k`` times one vector of each output."""
    assert one.constant is not None
    out, rest = torch.zeros_like(X), one.constant
    for unit, biases in zip(one.units, one.biases, strict=True):
        rows = slice(None) if unit.chosen is None else unit.chosen[0]
        gated, early = [], []
        for weight, c, bias in zip(unit.weights, unit.coefficients, biases, strict=True):
            hidden = X[rows] @ weight
            if bias is not None:
                constant = (c[0] * bias) @ unit.out
                rest = rest - constant
                early.append((weights(hidden, bias, split)[..., None], constant[rows, None]))
            gated.append(hidden.mul_(c[0][rows][:, None]))
        made = sum(gated[1:], gated[0]) @ unit.out
        for share, constant in early:
            made.addcmul_(share, constant)
        out[rows] += made
    return give(out, rest, split)


def give(X: Tensor, constant: Tensor | None, split: Split) -> Tensor:
    """``x_k + w_k b``, in place."""
    if constant is None:
        return X
    share = weights(X, constant, split)
    return X.addcmul_(share[..., None], constant if constant.dim() == 1 else constant[:, None])


def weights(X: Tensor, b: Tensor, split: Split) -> Tensor:
    """(n, sources) w, which sum to one for each output; a vector of zeros gets nothing. b is (d,) or (n, d)."""
    if split in ("absdot", "abssim"):
        found = (X @ b if b.dim() == 1 else torch.bmm(X, b[:, :, None])[:, :, 0]).abs_()
        if split == "abssim":  # the norm of b is the same for all
            found /= X.norm(dim=-1).clamp_min(torch.finfo(X.dtype).tiny)
    else:
        found = X.norm(dim=-1)
        if split == "equal":
            found = (found != 0).to(X.dtype)
    return found / found.sum(-1, keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)


def _feed_forwards(layer: FrozenLayer) -> Iterator[FrozenFeedForward]:
    for block in layer.blocks:
        for chain in block.branches:
            yield from (one for one in chain if isinstance(one, FrozenFeedForward))
