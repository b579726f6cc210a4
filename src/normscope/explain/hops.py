"""Hops through a chain of thought: the share of the final answer that rests on the reasoning, traced to the prompt.

At hop 0 the final answer's scores s are those of its tokens added up. Its score ``w_j`` on a reasoning token j is then
the weight of that token's own target in the next direction,

    ``sum_j (w_j / d_j) g_j``, with ``d_j = sum_k |S_jk| + |b_j|``,

where S_jk are the scores of token j and b_j its remainder. Dividing by d_j, not by the token's value
``v_j = sum_k S_jk + b_j``, which may be close to zero, bounds what is passed on: no input receives more than w_j. What
cancels inside a token, ``w_j (1 - v_j / d_j)``, stays unexplained. After every hop,

    ``sum of scores + remainder + unexplained = value of the final answer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Hop:
    """The final answer by input token after a number of hops."""

    scores: Tensor  # (columns,), float64
    remainder: float  # from biases and frozen constants, of the final answer and of the reasoning passed through
    unexplained: float  # what cancels inside reasoning tokens
    on_reasoning: float  # the part of the scores that is on reasoning tokens, and moves at the next hop


def follow_hops(
    scores: Tensor,
    remainders: Tensor,
    final: Sequence[int],
    reasoning: Sequence[int],
    columns: Sequence[int],
    hops: int,
) -> tuple[Hop, ...]:
    """The final answer (rows `final`) after 0 .. hops hops; `columns` are those of the `reasoning` rows.

    Stops early when nothing is left on the reasoning, as a token is explained by earlier ones only.
    """
    S, b = scores.double(), remainders.double()
    inside, own, places = S[list(reasoning)], b[list(reasoning)], list(columns)
    size = inside.abs().sum(-1) + own.abs()
    shares = torch.where(size > 0, 1 / size.clamp_min(1e-300), 0)
    now, remainder, unexplained = S[list(final)].sum(0), b[list(final)].sum(), S.new_zeros(())
    found = []
    for hop in range(hops + 1):
        weights = now[places]
        found.append(Hop(now, float(remainder), float(unexplained), float(weights.sum())))
        if hop == hops or not bool(weights.any()):
            break
        carried = weights * shares
        passed = carried @ inside
        remainder = remainder + carried @ own
        unexplained = unexplained + (weights - carried * (inside.sum(-1) + own)).sum()
        now = now.clone()
        now[places] = 0
        now = now + passed
    return tuple(found)
