"""Products with a packed matrix are the plain products, with every kernel."""

from __future__ import annotations

import pytest
import torch

from normscope import Analyzer
from normscope.decompose import kernels
from normscope.decompose.kernels import has_packed_kernel, multiply_packed_kernel, pack_kernel_matrix
from tests.helpers.bert_oracle import oracle
from tests.helpers.compare import assert_close_to_oracle
from tests.helpers.tiny import BERT_FAMILIES, inputs, tiny
from tests.helpers.toys import some_encoding


@pytest.fixture(params=["kernel", "usual"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every matrix is packed, however small, or none is. Without a kernel both are the same."""
    monkeypatch.setattr(kernels, "PACKED_ROWS", 0 if request.param == "kernel" else 2**62)
    return str(request.param)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "inner", "width"), [(1, 1, 1), (5, 7, 3), (64, 1024, 48), (333, 100, 17)])
def test_products(rows: int, inner: int, width: int, transposed: bool) -> None:
    make = torch.Generator().manual_seed(0)
    x, into = torch.randn(rows, inner, generator=make), torch.randn(rows, width, generator=make)
    matrix = torch.randn(width, 2 * inner, generator=make)[:, inner:].t() if transposed else torch.randn(inner, width)
    ready = pack_kernel_matrix(matrix, rows)
    assert ready.is_mkldnn == has_packed_kernel()
    if not has_packed_kernel():
        pytest.skip("oneDNN brings nothing on this processor")
    plain = x.double() @ matrix.double()
    scale = (x.double().norm(dim=-1, keepdim=True) * matrix.double().norm(dim=0)).clamp_min(1e-3)
    for add in (False, True):
        found = multiply_packed_kernel(x, ready, into.clone(), add)
        assert found.dtype == torch.float32
        expected = plain + into if add else plain
        assert float(((found - expected).abs() / (scale + add * into.abs())).max()) < 1e-6


def test_float64_and_missing_kernels_are_never_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    double = torch.randn(4, 4, dtype=torch.float64)
    assert pack_kernel_matrix(double, 4) is double
    monkeypatch.setattr(kernels, "has_packed_kernel", lambda: False)
    single = torch.randn(4, 4)
    assert pack_kernel_matrix(single, 4) is single


def test_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another PyTorch may lack them, or use the names for something else."""

    def other(*args: object) -> torch.Tensor:
        raise TypeError("unexpected argument")

    monkeypatch.setattr(kernels, "_is_intel", lambda: False)
    monkeypatch.setattr(kernels, "multiply_packed_kernel", other)
    assert not has_packed_kernel.__wrapped__()
    monkeypatch.setattr(kernels, "multiply_packed_kernel", lambda x, matrix, into, add: torch.zeros_like(into))
    assert not has_packed_kernel.__wrapped__()


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_feed_forward_against_the_oracle(way: str, family: str) -> None:
    model = tiny(family, dtype=torch.float32)
    assert_close_to_oracle(Analyzer(model).analyze(some_encoding(13)), oracle(model, some_encoding(13)))


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss", "gpt2", "marian"])
def test_other_feed_forwards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(name, dtype=torch.float32)
    lens, given = Analyzer(model), inputs(name, model)
    usual = lens.analyze(given)
    monkeypatch.setattr(kernels, "PACKED_ROWS", 0)
    found = lens.analyze(given)
    if name == "marian":
        found, usual = found.decoder, usual.decoder
    for scope in found.scopes:
        torch.testing.assert_close(found[scope], usual[scope], rtol=1e-5, atol=1e-7)
        assert float(found.completeness[scope].max()) < 1e-5
