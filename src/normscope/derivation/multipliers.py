"""Multipliers of branches and of the stream: their names in the layer, and one description of them for all layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.models.modules import layer_attribute
from normscope.models.spec import Block, Multiplier

CLOSE = 1e-5  # relative difference of equal multipliers: fitted ones are rounded to six digits


def named_multiplier(layer: nn.Module, value: float) -> str | float | None:
    """The path of the layer's number or parameter that equals a factor, or the factor itself; None for 1."""
    if abs(value - 1) < 1e-6:
        return None
    found = (path for path, number in single_numbers(layer) if math.isclose(number, value, rel_tol=CLOSE))
    return next(found, value)


def single_numbers(layer: nn.Module) -> Iterator[tuple[str, float]]:
    """Paths and values of all attributes, parameters and buffers of a layer that are a single number."""
    for path, module in layer.named_modules():
        if isinstance(module, nn.Dropout):
            continue
        held = {**module._parameters, **module._buffers}
        for name, one in (vars(module) | held).items():
            if isinstance(one, float) or (isinstance(one, Tensor) and one.numel() == 1 and one.is_floating_point()):
                yield f"{path}.{name}" if path else name, float(torch.as_tensor(one).detach())


def unify_multipliers(described: Sequence[tuple[Block, ...]], layers: Sequence[nn.Module]) -> list[tuple[Block, ...]]:
    """The blocks of every layer, with multipliers that differ between layers told in one way for all: by a path that is
    right in each, or by one number for every layer."""
    tables = [list(_multipliers(blocks)) for blocks in described]
    if len({len(table) for table in tables}) > 1:
        return list(described)
    columns = [_unified(column, layers) for column in zip(*tables, strict=True)]
    return [
        _with_multipliers(blocks, iter(row)) for blocks, row in zip(described, zip(*columns, strict=True), strict=True)
    ]


def _multipliers(blocks: Sequence[Block]) -> Iterator[Multiplier | None]:
    for block in blocks:
        yield block.skip
        yield from (branch.scale for branch in block.branches)


def _with_multipliers(blocks: Sequence[Block], row: Iterator[Any]) -> tuple[Block, ...]:
    changed = []
    for block in blocks:
        skip = next(row)
        branches = tuple(replace(branch, scale=next(row)) for branch in block.branches)
        changed.append(replace(block, branches=branches, skip=skip))
    return tuple(changed)


def _unified(values: Sequence[Any], layers: Sequence[nn.Module]) -> Sequence[Any]:
    """One multiplier in each layer, the same for all if each of them is a single number."""
    numbers = [_number(layer, value) for layer, value in zip(layers, values, strict=True)]
    if len(set(values)) == 1 or any(math.isnan(number) for number in numbers):
        return values
    for path in (value for value in values if isinstance(value, str)):
        pairs = zip(layers, numbers, strict=True)
        if all(math.isclose(_number(layer, path), number, rel_tol=CLOSE) for layer, number in pairs):
            return [path] * len(values)
    return [tuple(numbers)] * len(values)


def _number(layer: nn.Module, value: str | float | None) -> float:
    """What a multiplier is in a layer; NaN if it is not a single number."""
    if not isinstance(value, str):
        return 1.0 if value is None else value
    try:
        return float(torch.as_tensor(layer_attribute(layer, value)).detach())
    except (NormscopeError, TypeError, ValueError, RuntimeError):
        return math.nan
