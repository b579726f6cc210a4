"""The outputs of a projection that are values, and its parameters for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normscope.errors import NormscopeError
from normscope.models.modules import layer_attribute, layer_submodule, linear_map
from normscope.models.spec import Attention

Packing = str | tuple[int, ...]  # of spec.Attention


def value_constant(module: nn.Module, packing: Packing, heads: int, width: int, shift: Tensor | None) -> Tensor | None:
    """(heads, width): the part of a value vector that depends on no token, b_V plus W_V times the shift of the norm
    before it."""
    weight, bias = linear_map(module)
    constant = bias
    if shift is not None:
        projected = weight @ shift.to(weight.dtype)
        constant = projected if bias is None else projected + bias
    return None if constant is None else value_rows(constant, packing, heads, width)


def packing_at(layer: nn.Module, part: Attention, heads: int, width: int) -> Packing:
    """The packing of the values of an attention, with the columns at which they begin if its heads are in groups."""
    if part.groups is None:
        return part.packing
    size, groups = linear_map(layer_submodule(layer, part.value))[0].shape[0], int(layer_attribute(layer, part.groups))
    each, step = heads // groups, size // groups
    return tuple(g * step + step - 2 * each * width + s * width for g in range(groups) for s in range(each))


def value_rows(x: Tensor, packing: Packing, heads: int, width: int) -> Tensor:
    """(..., heads, width): the value vectors in the output of a projection; a view unless `packing` lists columns."""
    columns = value_columns(packing, heads, width, x.shape[-1])
    if packing == "interleaved":
        return x.view(*x.shape[:-1], heads, -1)[..., -width:]
    if isinstance(packing, tuple):
        return x[..., columns.to(x.device)].view(*x.shape[:-1], heads, width)
    if packing == "second":
        return x[..., heads * width : 2 * heads * width].reshape(*x.shape[:-1], heads, width)
    return x[..., -heads * width :].reshape(*x.shape[:-1], heads, width)


def value_columns(packing: Packing, heads: int, width: int, size: int) -> Tensor:
    """(heads * width,): the outputs of a projection of `size` outputs that are values."""
    usual = {
        "alone": (0, width, size == heads * width),
        "tail": (size - heads * width, width, size >= heads * width > 0),
        "second": (heads * width, width, size >= 2 * heads * width),
        "interleaved": (size // heads - width, size // heads, size % heads == 0 and size > heads * width),
    }
    if isinstance(packing, tuple):
        starts, fits = torch.tensor(packing), len(packing) == heads and max(packing) + width <= size
    else:
        first, step, fits = usual[packing]
        starts = first + step * torch.arange(heads)
    if not fits:
        raise NormscopeError(
            f"The value projection has {size} outputs, which does not fit {heads} heads of width {width} with packing "
            f"{packing!r}. The family is described incorrectly, or its values are computed in more than one step."
        )
    columns: Tensor = starts[:, None] + torch.arange(width)
    return columns.flatten()


def value_map(module: nn.Module, packing: Packing, heads: int, shared: int, width: int) -> tuple[Tensor, Tensor | None]:
    """W_V (H, d, d_h) and b_V (H, d_h) for row vectors; each of the `shared` value heads is repeated H / shared
    times."""
    weight, bias = linear_map(module)

    def each(x: Tensor) -> Tensor:
        return value_rows(x, packing, shared, width).repeat_interleave(heads // shared, -2)

    return each(weight.detach().t()).transpose(0, 1), None if bias is None else each(bias.detach())
