"""Rollout (Abnar & Zuidema 2020): the maps of single layers multiplied along the depth of a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normscope.engine.request import Options, requests_for
from normscope.engine.run import run_batch
from normscope.flow.interface import FlowMaps, MethodRun
from normscope.measures.first_token import normalise_rows


def rollout(maps: Tensor, encoder: Tensor | None = None) -> Tensor:
    """(layers, n, columns): ``R_1 = M_1, R_l = M_l R_(l-1)``.

    If a decoder's maps have the encoder's columns after their own, these lead through the `encoder`'s own map (m, m):
    ``R_l = M_l[own] R_(l-1) + [0, M_l[cross] encoder]``, starting from ``R_0 = [1, 0]``.
    """
    rows, columns = maps.shape[1:]
    reached = torch.eye(rows, columns, dtype=maps.dtype, device=maps.device)
    found = []
    for one in maps:
        reached = one[:, :rows] @ reached
        if encoder is not None:
            reached[:, rows:] += one[:, rows:] @ encoder
        found.append(reached)
    return torch.stack(found)


def roll_out_sides(sides: list[Tensor]) -> FlowMaps:
    """The rollout of the last side's maps, through the encoder's if there are two sides."""
    return rollout(sides[-1], rollout(sides[0])[-1] if len(sides) == 2 else None), None


def rollout_half_residual(weights: Tensor) -> Tensor:
    """``0.5 A + 0.5 I``, A the mean of the heads."""
    return 0.5 * weights + 0.5 * torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)


def scope_maps_for_rollout(run: MethodRun, scope: str) -> list[Tensor]:
    """The maps of one scope between tokens, as `Analyzer.analyze` computes them, for each side."""
    item = replace(run.item, sources=None)
    requests = requests_for(run.loaded, Options(scopes=[scope]))
    found: Any = run_batch(run.loaded, [item], requests, run.workspace)[0]
    return [one[scope] for one in ((found.encoder, found.decoder) if run.loaded.two_sided else (found,))]


def run_rollout(run: MethodRun) -> FlowMaps:
    """Attention rollout, or that of any scope with rows that sum to one."""
    if run.option:
        return roll_out_sides([normalise_rows(one) for one in scope_maps_for_rollout(run, run.option)])
    return roll_out_sides([rollout_half_residual(one) for one in scope_maps_for_rollout(run, "weights")])


def run_raw_rollout(run: MethodRun) -> FlowMaps:
    """The rollout of a scope's maps without normalization."""
    return roll_out_sides(scope_maps_for_rollout(run, run.option))
