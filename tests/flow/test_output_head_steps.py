"""Each form that a step of a head may have is recognised, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normscope.flow.maps import FrozenPool, FrozenScale
from normscope.flow.output_head_steps import (
    ACTIVATIONS,
    HeadStep,
    StepCandidates,
    find_output_head_steps,
    head_step_candidates,
)
from tests.helpers.tiny import tiny

DTYPES = (torch.float32, torch.float64)
NAMED = torch.linspace(-2, 3, 12, dtype=torch.float64)


def known(dtype: torch.dtype, **options: Any) -> StepCandidates:
    model = tiny("bert", "MaskedLM", dtype=dtype, **options)
    model.register_buffer("shift", NAMED.to(dtype))
    return head_step_candidates(model, torch.tensor([True, True, False, True, True]), dtype)


def vectors(rows: int = 5, width: int = 12, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def through(link: HeadStep, s: Tensor) -> Tensor:
    x = s[:, None]
    for one in link.maps:
        x = one.forward(x, None)
        if one.constant is not None:
            x = x + one.constant
    return x[:, 0]


KNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda s: s.clone(),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "gelu of tanh": lambda s: nn.functional.gelu(s, approximate="tanh"),
    "silu": nn.functional.silu,
    "quick gelu": lambda s: s * torch.sigmoid(1.702 * s),
    "sigmoid": torch.sigmoid,
    "factor": lambda s: s * 0.3,
    "factor of minus one": lambda s: -s,
    "its own constant": lambda s: s + NAMED.to(s),
    "constant": lambda s: s + torch.arange(s.shape[1]).to(s),
    "constant in one unit": lambda s: s + 50 * torch.eye(s.shape[1]).to(s)[3],
}
UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "one unit scaled": lambda s: s * (1 + torch.eye(s.shape[1]).to(s)[3]),
    "all but one unit as it was": lambda s: torch.where(torch.arange(s.shape[1]) == 3, s.abs() + 1, s),
    "units in another order": lambda s: s.flip(1),
    "x |x|": lambda s: s * s.abs(),
    "square": torch.square,
    "elu": nn.functional.elu,
    "softplus": nn.functional.softplus,
    "clamp": lambda s: s.clamp(-0.5, 0.5),
    "log softmax": lambda s: s.log_softmax(-1),
    "softmax": lambda s: s.softmax(-1),
    "a factor for each row": lambda s: s * s.norm(dim=-1, keepdim=True),
    "a constant for each row": lambda s: s + s.norm(dim=-1, keepdim=True),
    "factor and constant": lambda s: 2 * s + 1,
    "noise": lambda s: s + 1e-3 * vectors(*s.shape, dtype=s.dtype, seed=1),
    "rows in another order": lambda s: s.flip(0),
    "cut": lambda s: s[:, :3],
    "two rows": lambda s: s[:2],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_known_steps(name: str, dtype: torch.dtype) -> None:
    s = vectors(dtype=dtype)
    t = KNOWN[name](s)
    (link,) = find_output_head_steps(s, t, dtype, known(dtype))
    torch.testing.assert_close(through(link, s), t)
    other = vectors(dtype=dtype, seed=1)
    if link.maps:
        assert link.fits(other, KNOWN[name](other))
        assert not link.fits(other, KNOWN[name](other) + 0.01)
    assert link.sure == (name not in ("factor", "factor of minus one", "constant", "constant in one unit"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_steps(name: str, dtype: torch.dtype) -> None:
    s = vectors(dtype=dtype)
    assert find_output_head_steps(s, UNKNOWN[name](s), dtype, known(dtype)) == []


ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda s: s + torch.arange(s.shape[1]).to(s),
    "constant in one unit": lambda s: s + 50 * torch.eye(s.shape[1]).to(s)[-1],
    "one unit scaled": lambda s: s * (1 + torch.eye(s.shape[1]).to(s)[-1]),
    "log softmax": lambda s: s.log_softmax(-1),
}


@pytest.mark.parametrize("width", [1, 2, 3, 12])
@pytest.mark.parametrize("name", [*ROW, "x |x|", "square", "softplus", "clamp"])
def test_one_row_does_not_prove_a_constant(name: str, width: int) -> None:
    s = 1.5 + vectors(1, width).abs()
    step = (UNKNOWN | ROW)[name]
    assert find_output_head_steps(s, step(s), torch.float64, known(torch.float64)) == [] or torch.equal(step(s), s)


def test_one_row_and_a_constant_of_the_model() -> None:
    s = vectors(1)
    (link,) = find_output_head_steps(s, s + NAMED, torch.float64, known(torch.float64))
    torch.testing.assert_close(through(link, s), s + NAMED)
    assert link.sure


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_few_numbers_do_not_prove_a_factor(count: int) -> None:
    s = vectors(1, count)
    assert find_output_head_steps(s, 0.3 * s, torch.float64, known(torch.float64)) == []


def test_equal_numbers_do_not_prove_a_factor() -> None:
    s = torch.full((5, 12), 3.0, dtype=torch.float64)
    assert find_output_head_steps(s, s + 1, torch.float64, known(torch.float64)) == []


def test_equal_rows_do_not_prove_a_constant() -> None:
    s = vectors(1).expand(5, 12)
    assert find_output_head_steps(s, s + torch.arange(12), torch.float64, known(torch.float64)) == []


@pytest.mark.parametrize("name", ["sigmoid", "gelu", "tanh", "relu"])
def test_an_activation_is_held_at_its_integrated_gradient(name: str) -> None:
    s = torch.tensor([[-3.0, -1e-9, 0.0, 1e-9, 0.5, 4.0]], dtype=torch.float64)
    function: Any = getattr(torch, name, getattr(nn.functional, name, None))
    (link,) = find_output_head_steps(s, function(s), torch.float64, known(torch.float64))
    (one,) = link.maps
    assert isinstance(one, FrozenScale)
    nodes = torch.linspace(0.5 / 4000, 1 - 0.5 / 4000, 4000, dtype=torch.float64)[:, None] * s
    nodes.requires_grad_()
    (slopes,) = torch.autograd.grad(function(nodes).sum(), nodes)
    torch.testing.assert_close(one.gain, slopes.mean(0, keepdim=True), rtol=1e-6, atol=1e-6)
    start = float(function(torch.zeros(1)))
    assert (one.constant is None) if start == 0 else bool((one.constant == start).all())


def test_an_activation_that_the_config_names() -> None:
    s = vectors()
    t = nn.functional.mish(s)
    assert find_output_head_steps(s, t, torch.float64, known(torch.float64)) == []
    assert len(find_output_head_steps(s, t, torch.float64, known(torch.float64, hidden_act="mish"))) == 1
    assert "mish" not in ACTIVATIONS


def test_a_factor_that_the_config_names() -> None:
    s = vectors()
    for factor in (24**-0.5, 1 / 24, 0.1):  # its hidden size is 24
        (link,) = find_output_head_steps(s, factor * s, torch.float64, known(torch.float64))
        assert link.sure == (factor != 0.1) or 0.1 in known(torch.float64).factors


def test_a_softcap() -> None:
    s = 10 * vectors()
    capped = head_step_candidates(
        tiny("gemma2", "CausalLM", final_logit_softcapping=7.0), torch.ones(5).bool(), torch.float64
    )
    (link,) = find_output_head_steps(s, 7 * torch.tanh(s / 7), torch.float64, capped)
    assert link.note == "softcap 7 held at its ratio"
    torch.testing.assert_close(through(link, s), 7 * torch.tanh(s / 7))
    assert find_output_head_steps(s, 6 * torch.tanh(s / 6), torch.float64, capped) == []


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "first": lambda s: s[:1],
    "last": lambda s: s[-1:],
    "mean": lambda s: s.mean(0, keepdim=True),
    "mean of the unmasked": lambda s: s[[0, 1, 3, 4]].mean(0, keepdim=True),
    "first and mean": lambda s: torch.cat([s[0], s[1:].mean(0)])[None],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 12])
@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str, width: int, dtype: torch.dtype) -> None:
    s = vectors(width=width, dtype=dtype)
    (link,) = find_output_head_steps(s, POOLS[name](s), dtype, known(dtype))
    (pool,) = link.maps
    assert isinstance(pool, FrozenPool)
    torch.testing.assert_close(through(link, s), POOLS[name](s))


@pytest.mark.parametrize("step", ["tanh", "factor", "its own constant"])
@pytest.mark.parametrize("name", ["first", "last", "mean"])
def test_a_pool_that_is_modified_afterwards(name: str, step: str) -> None:
    s = vectors()
    t = KNOWN[step](POOLS[name](s))
    (link,) = find_output_head_steps(s, t, torch.float64, known(torch.float64))
    torch.testing.assert_close(through(link, s), t)
    other = vectors(seed=1)
    assert link.fits(other, KNOWN[step](POOLS[name](other)))


@pytest.mark.parametrize("width", [1, 2, 3, 12])
def test_vectors_that_are_not_pools(width: int) -> None:
    s = vectors(width=width)
    for t in (s[1:3].mean(0), s[0] + 50, s.abs().amax(0) + 1, s[0].abs() + 2 * s[0] + 1, s[2] * (1 + 1e-6) + 1e-6):
        assert find_output_head_steps(s, t[None], torch.float64, known(torch.float64)) == []


def test_equal_rows_leave_open_which_is_taken() -> None:
    s = vectors()
    s[3] = s[1]
    links = find_output_head_steps(s, s[3:4], torch.float64, known(torch.float64))
    assert len(links) == 2
    other = vectors(seed=1)
    assert [link.fits(other, other[3:4]) for link in links] == [False, True]
