"""What one layer call computed, step by step, with everything held that a contribution needs to pass: read off the
records of the call and off its modules, by what they do."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.attacks.algebra import Norm, Values
from tests.attacks.modules_read import checked, close, linear, norm, zeros
from tests.attacks.recording import Call, NoAnswer, dense_layer, part
from tests.helpers.layer_oracle import Attention, FeedForward, Unit, clamped_expert, expert, first, product


@dataclass
class Step:
    """One component of one layer call, with all that is held: contributions of any sources can be sent through it."""

    role: str  # "norm", "attention", "ff", "scale", "begin", "add", "end"
    actual: Tensor | None = None
    norm: Norm | None = None
    weights: Tensor | None = None  # (H, n, keys)
    values: Values | None = None
    out: Tensor | None = None  # (H, width, d)
    bias: Tensor | None = None
    cross: bool = False
    read: Tensor | None = None  # (keys, d): what the values are made from
    units: list[Unit] = field(default_factory=list)
    scale: Tensor | None = None
    scope: str | None = None


class Reading:
    """One call's records at the real tokens."""

    def __init__(self, call: Call, keep: Mapping[str, Tensor]) -> None:
        self.call, self.keep = call, keep[call.side]
        self.source = keep.get("encoder")
        self.tolerance = 1e-5 if call.x.dtype == torch.float64 else 1e-4  # some modules compute in float32

    def module(self, path: str) -> Any:
        return part(self.call.layer, path)

    def whole(self, path: str, made: bool) -> Tensor:
        """(n, d), of all pieces that the module was called with."""
        pieces = [first(one[1 if made else 0]) for one in self.call.seen[path]]
        return torch.cat([one.reshape(-1, one.shape[-1]) for one in pieces]).double()

    def shape(self, path: str) -> torch.Size:
        return self.call.seen[path][0][0].shape

    def rows(self, path: str, made: bool, keep: Tensor | None = None) -> Tensor:
        keep = self.keep if keep is None else keep
        found = self.whole(path, made)
        if len(found) != len(keep):
            raise NoAnswer(f"{path} was called for {len(found)} tokens of {len(keep)}")
        return found[keep]

    def norm(self, path: str) -> tuple[Norm | None, Tensor]:
        y = self.rows(path, True)
        keep = (
            self.keep if self.shape(path)[-2] == len(self.keep) else torch.zeros(len(y), dtype=torch.long)
        )  # in pieces
        return norm(self.module(path), self.shape(path), self.rows(path, False), y, keep), y

    def linear(self, path: str, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        found = linear(self.module(path), self.shape(path))
        if found.bias.dim() == 2:
            found = found._replace(bias=found.bias[self.keep if keep is None else keep])
        return checked(found, self.rows(path, False, keep), self.rows(path, True, keep), self.tolerance, path)


def steps_of(read: Reading, y: Tensor) -> Iterator[Step]:
    """As in `layer_oracle.decompose`: the components of a layer in its order, each with its scope."""
    blocks = read.call.stack.blocks
    name = ""
    for number, block in enumerate(blocks):
        yield Step("begin")
        parallel = len(block.branches) > 1
        for branch in block.branches:
            op = branch.op
            yield Step("branch")
            second = parallel and isinstance(op, FeedForward)
            readable = True
            if branch.pre is not None:
                name += "" if second else "LN"
                starts = number == 0 and isinstance(op, Attention)  # its effect is part of the values
                try:
                    found, actual = read.norm(branch.pre)
                except NoAnswer:
                    if not starts:
                        raise
                    found, actual, readable = None, read.rows(branch.pre, True), False
                scope = name if number > 0 and not second else None
                yield Step("norm" if readable else "unknown", actual, found, scope=scope)
            if isinstance(op, Attention):
                name += "XATTN" if op.cross else "ATTN"
                yield attention_step(read, op, branch.pre, readable, "XATTN" if op.cross else name)
            else:
                name += "FF"
                yield feed_forward_step(read, op, None if parallel else name)
            if branch.post is not None:
                name += "LN"
                found, actual = read.norm(branch.post)
                yield Step("norm", actual, found, scope=name)
            scale = None if branch.scale is None else scaling(read, branch.scale)
            yield Step("add", scale=scale)
        name += "RES"
        if block.after is not None:
            actual = read.rows(block.after, False)
        elif block is blocks[-1]:
            actual = y
        else:
            actual = read.rows(blocks[number + 1].branches[0].pre or "", False)
        yield Step("end", actual, scope=name)
        if block.after is not None:
            name += "LN"
            found, actual = read.norm(block.after)
            yield Step("norm", actual, found, scope=name)


def scaling(read: Reading, path: str) -> Tensor:
    """LayerScale, read as the factor that it is."""
    module = read.module(path)
    found = linear(module, read.shape(path))
    checked(found, read.rows(path, False), read.rows(path, True), read.tolerance, path)
    factors = found.weight.diagonal()
    if float((found.weight - torch.diag(factors)).abs().max()) > 0 or float(found.bias.abs().max()) > 0:
        raise NoAnswer(f"{path} is not a factor")
    return factors


def attention_step(read: Reading, op: Attention, pre: str | None, readable: bool, scope: str) -> Step:
    outputs = [one[1] for one in read.call.seen[op.module]]
    if len(outputs) != 1 or not isinstance(outputs[0], tuple) or not isinstance(outputs[0][-1], Tensor):
        raise NoAnswer(f"{op.module} returns no probabilities")
    weights = outputs[0][-1][0].double()
    if weights.dim() != 3:
        raise NoAnswer(f"{op.module} returns no probabilities")
    keys = read.source if op.cross else read.keep
    assert keys is not None
    prefix = weights.shape[2] - len(keys)
    if prefix < 0:
        raise NoAnswer("fewer keys than tokens")
    weights = weights[:, read.keep][:, :, torch.cat([torch.ones(prefix, dtype=torch.bool), keys])]
    heads = len(weights)
    out, bias = read.linear(op.output)
    width = len(out) // heads
    made = read.rows(op.value, True, keys)
    groups = heads * width // values_of(made, op.layout, heads, width, len(out)).shape[1]

    def split(flat: Tensor) -> Tensor:
        """(rows, everything) to (H, rows, width): the values, each repeated for the heads that share it."""
        some = values_of(flat, op.layout, heads, width, len(out))
        return some.reshape(len(some), -1, width).transpose(0, 1).repeat_interleave(groups, 0)

    each = split(made)
    given = read.rows(op.value, False, keys)
    local(read, op, pre if readable else None, given, keys)
    weight = constant = None
    try:
        found, offset = read.linear(op.value, keys)
        if offset.dim() == 1:
            weight, constant = split(found), split(offset[None])[:, 0]
    except NoAnswer:
        pass
    if prefix:
        each = torch.cat([virtual_values(read, op, prefix, groups), each], 1)
    shift = None
    if not readable:
        weight = None
    elif pre is not None and not op.cross:
        before, _ = read.norm(pre)
        if before is not None:
            shift = before.beta if before.beta.dim() == 1 else before.beta[0]
            weight = (
                weight if before.beta.dim() == 1 or close(before.beta, shift.expand_as(before.beta), 1e-5) else None
            )
    values = Values(each, weight, constant, shift, prefix)
    actual = read.rows(op.output, True)
    matrix = out.reshape(heads, width, -1)
    return Step(
        "attention",
        actual,
        weights=weights,
        values=values,
        out=matrix,
        bias=bias,
        cross=op.cross,
        read=given,
        scope=scope,
    )


def values_of(flat: Tensor, layout: str, heads: int, width: int, size: int) -> Tensor:
    """(rows, H_kv * width): the values in the output of their projection."""
    if layout == "tail":
        return flat[:, -((flat.shape[1] - size) // 2) :]
    if layout == "heads":
        return flat.reshape(len(flat), heads, 3, width)[:, :, 2].reshape(len(flat), -1)
    return flat


def virtual_values(read: Reading, op: Attention, prefix: int, groups: int) -> Tensor:
    """(H, prefix, width): the values of virtual tokens, from the cache that the attention was given."""
    values = read.call.cached.get(op.module)
    if values is None or values.shape[2] != prefix:
        raise NoAnswer("more keys than tokens, and no cache that they come from")
    return values[0].double().repeat_interleave(groups, 0)


def local(read: Reading, op: Attention, pre: str | None, given: Tensor, keys: Tensor) -> None:
    """The value of a token must be its own: made of what the token's vector is at this place, and of no other's."""
    whole = read.whole(op.value, False)
    moved = int(keys.nonzero().flatten()[-1])
    rest = torch.arange(len(whole)) != moved
    if not rest.any():
        return
    other = whole.clone()
    other[moved] += torch.randn(whole.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shape, module = read.shape(op.value), read.module(op.value)
    one, two = (module(given.reshape(shape)).reshape(len(whole), -1) for given in (whole, other))
    if not close(two[rest], one[rest], 1e-5):
        raise NoAnswer(f"{op.value} mixes tokens")
    if op.cross:
        states = [one for one in (*read.call.args[1:], *read.call.kwargs.values()) if isinstance(one, Tensor)]
        rows = [one.reshape(-1, one.shape[-1]).double() for one in states if one.dim() == 3 and one.is_floating_point()]
        if not any(len(one) == len(whole) and close(whole, one, read.tolerance) for one in rows):
            raise NoAnswer("the cross-attention reads something else than the encoder's vectors")
        return
    entered = read.rows(pre, True) if pre is not None else read.call.x.reshape(-1, whole.shape[1])[read.keep].double()
    if not close(given, entered, read.tolerance):
        again(read, op, moved, rest)


class Seen(Exception):  # noqa: N818
    """Stops the pass: enough was seen."""


def again(read: Reading, op: Attention, moved: int, rest: Tensor) -> None:
    """Something lies between the layer's vectors and its values: another vector of one token must leave the values of
    the others alone."""
    found: list[Tensor] = []

    def hook(module: nn.Module, args: Any, made: Tensor) -> None:
        found.append(made)
        raise Seen

    handle = read.module(op.value).register_forward_hook(hook)
    x = double(read.call.x)
    other = x.clone().reshape(-1, x.shape[-1])
    other[moved] += torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    try:
        for given in (x, other.reshape(x.shape)):
            args, kwargs = double(read.call.args), double(read.call.kwargs)
            if args:
                args = (given, *args[1:])
            else:
                kwargs = kwargs | {"hidden_states": given}
            with contextlib.suppress(Seen):
                read.call.layer(*args, **kwargs)
    except Exception as error:
        raise NoAnswer("what makes the values cannot be run again") from error
    finally:
        handle.remove()
    one, two = (made.reshape(-1, made.shape[-1]) for made in found)
    if not close(two[rest], one[rest], 1e-5):
        raise NoAnswer("tokens are mixed before the values are made")


def double(value: Any) -> Any:
    """Everything numeric in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(double(one) for one in value)
    if isinstance(value, dict):
        return {key: double(one) for key, one in value.items()}
    return value


def feed_forward_step(read: Reading, op: FeedForward, scope: str | None) -> Step:
    op = dense_layer(read.call.layer, op)
    actual = read.rows(op.output, True)
    return Step("ff", actual, units=units_of(read, op), scope=scope)


def units_of(read: Reading, op: FeedForward) -> list[Unit]:
    """As `layer_oracle.units_of`, with modules read by what they do."""
    n = int(read.keep.sum())
    if op.experts:
        experts: Any = read.module(op.experts)
        _, shares, indices = read.call.seen[op.router][0][1]
        shares, indices = (one.reshape(-1, one.shape[-1])[read.keep].double() for one in (shares, indices))
        make = clamped_expert if hasattr(experts, "limit") else expert
        return [make(experts, e, (shares * (indices == e)).sum(-1)) for e in range(experts.num_experts)]
    act: Any = read.module(op.activation)
    inputs = tuple(read.linear(path) for path in op.inputs)
    if op.fused:
        ((weight, bias),) = inputs
        inputs = tuple(zip(weight.chunk(2, dim=1), bias.chunk(2), strict=True))
    function: Callable[..., Tensor] = act if len(inputs) == 1 else product(act)
    return [Unit(inputs, function, *read.linear(op.output), zeros(n) + 1)]
