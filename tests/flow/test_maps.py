"""Frozen maps: many directions at a time, and maps restricted to some tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normscope.flow.maps import (
    BackwardState,
    FrozenModel,
    backward_block,
    backward_chain,
    backward_layer,
    start_backward,
)
from tests.helpers.compare import relative
from tests.helpers.flow_cases import CASES, open_case


def carry_back(model: FrozenModel, G: Tensor) -> list[BackwardState]:
    """The directions G in the logits, carried to the input of every side."""
    found = []
    state = start_backward(G)
    backward_chain(model.head, state)
    for stack in reversed(model.stacks):
        if found:
            assert state.encoder is not None
            state = BackwardState(state.encoder, state.constants)
        backward_block(stack.end, state)
        for layer in reversed(stack.layers):
            backward_layer(layer, state)
        found.append(BackwardState(state.direction, state.constants))
    return found


@pytest.mark.parametrize(("name", "head"), CASES)
def test_many_directions_at_once(name: str, head: str) -> None:
    _, _, _, model = open_case(name, head)
    assert model.logits is not None
    G = torch.randn(2, 3, *model.logits.shape, dtype=model.logits.dtype, generator=torch.Generator().manual_seed(0))
    together = carry_back(model, G)
    for a in range(2):
        for b in range(3):
            for one, all_of_them in zip(carry_back(model, G[a, b]), together, strict=True):
                assert relative(all_of_them.direction[a, b], one.direction) <= 1e-9
                assert all_of_them.constants[a, b] == pytest.approx(float(one.constants), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("name", "head"), CASES)
def test_maps_of_some_positions(name: str, head: str) -> None:
    """Positions may repeat: two targets may be read at the same token."""
    _, _, _, model = open_case(name, head)
    last = model.stacks[-1]
    rows = torch.tensor([len(last.states[0]) - 1, 0, 0])
    for layer in last.layers:
        for block in layer.blocks:
            for one in (*(one for chain in block.branches for one in chain), *last.tail):
                encoder = None if len(model.stacks) == 1 else model.stacks[0].states[-1][:, None]
                width = last.states[0].shape[-1]
                X = torch.randn(len(last.states[0]), 2, width, dtype=last.states[0].dtype)
                if hasattr(one, "weights"):  # attention restricted to some outputs still reads all tokens
                    whole, some = one.forward(X, encoder), one.for_rows(rows).forward(X, encoder)
                else:
                    whole, some = one.forward(X, encoder), one.for_rows(rows).forward(X[rows], encoder)
                assert relative(some, whole[rows]) <= 1e-9
