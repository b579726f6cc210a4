"""The weights with which a recurrence mixes values, recovered from its queries, keys, decays and write strengths.

Gated DeltaNet, Mamba-2 and their kin keep a state S (d_k, d_v) for each head, and with the inputs of the recurrence
held, output i is a weighted sum of the values, with weights that may be negative:

    ``S_j = e^(g_j) (I - beta_j k_j k_j^T) S_(j-1) + beta_j k_j v_j^T``,  ``o_i = S_i^T q_i + D v_i = sum_j A_ij v_j``

without the part ``- beta_j k_j k_j^T`` if the recurrence has no delta rule. Rows of A are found by taking ``p = q_i``
backwards through the recurrence, CHUNK tokens at a time. Inside a chunk, with c the cumulative sum of g, e the last
token of the chunk up to i, and L the strictly lower triangular ``L_jl = beta_j (k_j . k_l) e^(c_j - c_l)``,

    ``A_i = [(p . k_j) e^(c_e - c_j)]_j (I + L)^-1 diag(beta)``,  ``p <- e^(c_e) p - sum_j A_ij e^(c_j) k_j``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from normscope.tracing.attention_rows import pick_rows
from normscope.tracing.recorded import row_blocks
from normscope.tracing.records import Rows

CHUNK = 64  # tokens
BLOCK_WEIGHTS = 2**25  # weights of some heads and all rows that are computed at a time


@dataclass(frozen=True)
class RecurrenceInputs:
    """What a recurrence made its weights of. b items, H heads, n tokens."""

    query: Tensor  # (b, H, n, d_k), with its scale
    key: Tensor  # (b, H, n, d_k)
    decay: Tensor  # (b, H, n): g, at most zero
    write: Tensor  # (b, H, n): beta
    skip: Tensor | None  # (H,): D
    delta: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(b, H, i, j)"""
        items, heads, length = self.decay.shape
        return items, heads, length, length

    def heads(self, some: slice) -> RecurrenceInputs:
        """The inputs of some heads."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found |= {name: found[name][:, some] for name in ("query", "key", "decay", "write")}
        return RecurrenceInputs(**found | {"skip": None if self.skip is None else self.skip[some]})

    def head_blocks(self) -> Iterator[tuple[slice, RecurrenceInputs]]:
        """Blocks of heads, with as many weights as are computed at a time."""
        items, heads, length, _ = self.shape
        for some in row_blocks(heads, BLOCK_WEIGHTS // (items * length * length)):
            yield some, self.heads(some)

    @cached_property
    def solutions(self) -> dict[int, Tensor]:
        """First token of a chunk -> ``(I + L)^-1`` (b, H, chunk, chunk), for those needed so far."""
        return {}

    def weights(self, rows: Rows) -> Tensor:
        """(b, H, R, j): the weights of some rows; without the last columns if no row of a slice reads them."""
        items, heads, length, _ = self.shape
        positions = torch.arange(length, device=self.key.device)[rows][None] if isinstance(rows, slice) else rows
        last = int(positions.max()) + 1 if positions.numel() else 0
        p = pick_rows(self.query, rows).clone()
        found = p.new_zeros(items, heads, p.shape[2], last if isinstance(rows, slice) else length)
        for start in reversed(range(0, last, CHUNK)):
            # The rows of a slice that come before the chunk have no weights in it.
            first = max(0, start - int(positions[0, 0])) if isinstance(rows, slice) else 0
            columns = slice(start, min(start + CHUNK, found.shape[3]))
            made, p[:, :, first:] = self._chunk_weights(start, positions[:, first:], p[:, :, first:])
            found[:, :, first:, columns] = made[..., : columns.stop - start]
        if self.skip is not None:
            index = positions[:, None, :, None].expand(items, heads, -1, 1)
            found.scatter_add_(3, index, self.skip[:, None, None].to(found).expand(index.shape))
        return found

    def _chunk_weights(self, start: int, positions: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """The weights (b, H, R, chunk) in the chunk that begins at `start`, and p before that chunk."""
        js = slice(start, start + CHUNK)
        key, write, decays = self.key[:, :, js], self.write[:, :, js], self.decay[:, :, js].cumsum(-1)
        size = key.shape[2]
        end = positions - start  # negative for rows before the chunk
        index = end.clamp(0, size - 1)[:, None].expand(*p.shape[:3])
        until = decays.gather(2, index)[..., None]  # (b, H, R, 1)
        read = torch.arange(size, device=p.device) <= end[:, None, :, None]
        ratio = (until - decays[:, :, None]).masked_fill_(~read, -torch.inf).exp_()
        made = (p @ key.transpose(2, 3)).mul_(ratio)
        before = p * until.exp()
        if self.delta:
            made = (made @ self._solution(start, key, write, decays)) * write[:, :, None]
            before -= made @ (key * decays.exp()[..., None])
        else:
            made = made * write[:, :, None]
        return made, torch.where(end[:, None, :, None] < 0, p, before)

    def _solution(self, start: int, key: Tensor, write: Tensor, decays: Tensor) -> Tensor:
        if start not in self.solutions:
            size = key.shape[2]
            upper = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
            ratio = (decays[..., None] - decays[:, :, None]).masked_fill_(upper, -torch.inf).exp_()
            system = (key * write[..., None]) @ key.transpose(2, 3) * ratio
            eye = torch.eye(size, dtype=key.dtype, device=key.device)
            self.solutions[start] = torch.linalg.solve_triangular(system, eye, upper=False, unitriangular=True)
        return self.solutions[start]
