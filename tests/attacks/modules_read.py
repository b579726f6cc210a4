"""Reading modules by what they do: linear maps as m(I) - m(0), norms by how they scale, independent of their class."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.attacks.algebra import Norm
from tests.attacks.recording import NoAnswer


class Linear(NamedTuple):
    """x -> x weight + bias."""

    weight: Tensor  # (in, out)
    bias: Tensor  # (out,), or (n, out) where each token has its own


def untouched(module: nn.Module) -> bool:
    """No hook and no replaced forward."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def linear(module: Any, shape: torch.Size) -> Linear:
    """W and b of a module that is called with (1, n, d) inputs of this shape."""
    if untouched(module) and type(module) in (nn.Linear, Conv1D):
        weight = module.weight.T if type(module) is nn.Linear else module.weight
        return Linear(weight, zeros(weight.shape[1]) if module.bias is None else module.bias)
    width = shape[-1]
    constants = module(torch.zeros(shape, dtype=torch.float64))
    if not isinstance(constants, Tensor) or constants.shape[:-1] != shape[:-1]:
        raise NoAnswer(f"{type(module).__name__} is not a linear map of tokens")
    constants = constants.reshape(-1, constants.shape[-1])
    count = len(constants)
    rows = []
    for start in range(0, width, count):  # in inputs of the same length: a module may look at it
        unit = zeros(count, width)
        for n in range(min(count, width - start)):
            unit[n, start + n] = 1
        rows.append(module(unit.reshape(shape)).reshape(count, -1) - constants)
    alike = close(constants, constants[:1].expand_as(constants), 1e-5)
    return Linear(torch.cat(rows)[:width], constants[0] if alike else constants)


def checked(found: Linear, given: Tensor, made: Tensor, tolerance: float, what: str) -> Linear:
    """The map itself, if that is what the model computed with it."""
    if not close(given @ found.weight + found.bias, made, tolerance):
        raise NoAnswer(f"{what} is not linear")
    return found


def norm(module: Any, shape: torch.Size, x: Tensor, y: Tensor, keep: Tensor) -> Norm | None:
    """The norm that made y of x at the tokens to keep, all of which are in `shape`; None: x went through as it was."""
    if isinstance(module, nn.Identity) and untouched(module):
        return None
    if untouched(module) and type(module) is nn.LayerNorm:
        width = x.shape[-1]
        gamma = zeros(width) + 1 if module.weight is None else module.weight
        beta = zeros(width) if module.bias is None else module.bias
        spread = x.var(-1, correction=0)
        return Norm(gamma, beta, (spread + module.eps).rsqrt(), True)
    kind = type(module)
    if untouched(module) and kind.__module__.startswith("transformers.") and kind.__name__.endswith(RMS):
        gamma = 1 + module.weight if kind.__name__.startswith("Gemma") else module.weight
        eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
        return Norm(gamma, zeros(len(gamma)), (x.square().mean(-1) + eps).rsqrt(), False)
    return fitted(module, shape, x, y, keep)


RMS = ("RMSNorm", "T5LayerNorm")


def fitted(module: Any, shape: torch.Size, x: Tensor, y: Tensor, keep: Tensor) -> Norm:
    """By how it scales large vectors: their statistic divides out, and that of x is read off y."""
    generator = torch.Generator().manual_seed(0)
    given = [1e4 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    results = [module(one) for one in (torch.zeros_like(given[0]), *given)]
    if not all(isinstance(one, Tensor) and one.shape == shape for one in results):
        raise NoAnswer(f"{type(module).__name__} is not a norm")
    beta, *others = (one.reshape(-1, shape[-1]) for one in results)
    made = torch.stack(others) - beta  # (calls, n, d)
    probes = torch.stack([one.reshape(-1, shape[-1]) for one in given])
    for centred in (True, False):
        even = probes - probes.mean(-1, keepdim=True) if centred else probes
        for size in (even.square().mean(-1, keepdim=True).sqrt(), 1.0):
            gamma = (made * size / even).median(0).values  # of each token
            if close((gamma * even / size).flatten(0, 1), made.flatten(0, 1), 1e-4):
                gamma, beta = (shared(one)[keep] for one in (gamma, beta))
                own = gamma * (x - x.mean(-1, keepdim=True) if centred else x)
                inverse = ((y - beta) * own).sum(-1) / own.square().sum(-1)
                return Norm(gamma, beta, inverse, centred)
    raise NoAnswer(f"{type(module).__name__} is not a norm")


def shared(rows: Tensor) -> Tensor:
    """One for all rows, where they differ by rounding only."""
    return rows[:1].expand_as(rows) if close(rows, rows[:1].expand_as(rows), 1e-5) else rows


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Relative to the longest of the rows; NaN is close to nothing."""
    if found.shape != expected.shape:
        return False
    size = max(float(expected.norm(dim=-1).max()), 1e-30)
    return bool((found - expected).norm(dim=-1).max() <= tolerance * size)
