"""Cancellation, tiny weights and blocks: where a careless float32 computation goes wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from normscope.decompose import feed_forward, gram
from normscope.decompose.state import Factored, GatedRows, Scratch, decompose_attention
from normscope.tracing.records import AttentionRecord, FeedForwardRecord, NormRecord, Projection, Unit


def record(
    heads: int = 4, tokens: int = 9, width: int = 64, cancel: float = 0.0, sharp: float = 1.0, seed: int = 0
) -> AttentionRecord:
    """Made-up attention; `cancel` makes the second head the negative of the first up to that relative difference."""
    make = torch.Generator().manual_seed(seed)
    values = torch.randn(1, heads, tokens, width // heads, generator=make)
    matrix = torch.randn(heads, width // heads, width, generator=make)
    scores = torch.randn(1, heads, tokens, tokens, generator=make) * sharp
    if cancel:
        values[:, 1] = values[:, 0]
        matrix[1] = -matrix[0] + cancel * torch.randn(matrix[0].shape, generator=make)
        values[:, 2:] = 0
        scores[:, 1] = scores[:, 0]
    weights = torch.softmax(scores, dim=-1)
    bias = torch.randn(width, generator=make)
    output = torch.einsum("bhij,bhje,hed->bid", weights, values, matrix) + bias
    return AttentionRecord(weights, values, None, matrix, bias, output)


def exact(given: AttentionRecord) -> torch.Tensor:
    """||sum_h alpha f|| in float64, (i, j)."""
    f = torch.einsum("bhje,hed->bhjd", given.values.double(), given.matrix.double())
    return torch.einsum("bhij,bhjd->ijd", given.weights.double(), f).norm(dim=-1)


def found(given: AttentionRecord) -> torch.Tensor:
    scratch = Scratch()
    state = decompose_attention(replace(given, weights=given.weights.clone()), None, "token", scratch)
    reduced = gram.reduce_states(["ATTN-N"], [state], [given.output], scratch)
    statistics = gram.RowStatistics(*reduced.statistics)
    assert float(gram.completeness_error(statistics).max()) < 1e-5
    cells = reduced.maps[0][0].cells[0].t().clone()
    cells.fill_diagonal_(0)
    cells += torch.diag(statistics.own[0, 0])
    return cells


@pytest.mark.parametrize("cancel", [1.0, 1e-1, 1e-2])
def test_near_cancelling_heads(cancel: float) -> None:
    given = record(cancel=cancel)
    expected = exact(given)
    relative = ((found(given).double() - expected).abs() / expected).max()
    assert float(relative) < 1e-4


@pytest.mark.parametrize("cancel", [1e-3, 1e-5, 1e-7])
def test_others_survive_any_cancellation(cancel: float) -> None:
    """Off the diagonal, inaccurate columns are computed again in float64, from the same values."""
    given = record(cancel=cancel)
    error = (found(given).double() - exact(given)).abs() / exact(given)
    assert float(error.fill_diagonal_(0).max()) < 1e-6


@pytest.mark.parametrize("cancel", [0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7])
@pytest.mark.parametrize("heads", [2, 4, 12])
def test_columns_that_are_not_in_doubt_are_sound(cancel: float, heads: int) -> None:
    """On both sides of the threshold for float64."""
    given = record(tokens=40, heads=heads, width=96, cancel=cancel)
    expected = exact(given)
    error = (found(given).double() - expected).abs() / expected.amax(1, keepdim=True)
    assert float(error.max()) < 2e-6


@pytest.mark.parametrize("heads", [14, 15, 16, 31])
def test_many_heads(heads: int) -> None:
    """Gram matrices are computed a few rows at a time."""
    given = record(heads=heads, width=8 * heads)
    expected = exact(given)
    assert float(((found(given).double() - expected).abs() / expected).max()) < 2e-6


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-4, 1e4, 1e9])
def test_vectors_of_any_size(size: float) -> None:
    """Squares are scaled to the range of float32, by a factor that must itself be in that range."""
    given = record(heads=4, width=96)
    given = replace(given, values=given.values * size, bias=None, output=(given.output - given.bias) * size)
    expected = exact(given)
    assert float(((found(given).double() - expected).abs() / expected).max()) < 2e-6


def normed_error(given: AttentionRecord, both: bool) -> torch.Tensor:
    """Relative errors of the cells after a norm, with the scope before it requested too (`both`) or not."""
    scratch, gain = Scratch(), torch.rand(given.matrix.shape[2], generator=torch.Generator().manual_seed(3)) + 0.5
    norm = NormRecord("layer", torch.ones(1, given.values.shape[2]), gain, None, given.output)
    state = decompose_attention(replace(given, weights=given.weights.clone()), None, "token", scratch)
    states = [state, state.after_norm(norm)] if both else [state.after_norm(norm)]
    reduced = gram.reduce_states([str(n) for n in range(len(states))], states, [given.output] * len(states), scratch)
    matrix = given.matrix.double()
    f = torch.einsum("bhje,hed->bhjd", given.values.double(), (matrix - matrix.mean(-1, keepdim=True)) * gain.double())
    expected = torch.einsum("bhij,bhjd->ijd", given.weights.double(), f).norm(dim=-1)
    found = reduced.maps[-1][0].cells[0].t().double()
    return ((found - expected).abs() / expected.amax(1, keepdim=True)).fill_diagonal_(0)


@pytest.mark.parametrize("both", [True, False])
def test_a_large_common_offset_costs_nothing(both: bool) -> None:
    """A mean of f over d far above its spread is subtracted by the norm: float32 vectors would lose the spread."""
    given = record(heads=4, width=96)
    given.matrix.add_(1e4)
    assert float(normed_error(given, both).max()) < 2e-6


@pytest.mark.parametrize("offset", [0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("both", [True, False])
def test_the_mean_is_taken_out_of_the_squares(offset: float, both: bool) -> None:
    """On both sides of the threshold for float64."""
    given = record(tokens=40, heads=12, width=96)
    given.matrix.add_(offset)
    assert float(normed_error(given, both).max()) < 2e-6


def test_a_float32_gram_would_fail_there() -> None:
    """The test above can fail: the same algebra with float32 Gram matrices loses more than the tolerance."""
    given = record(cancel=1e-3)
    f = torch.einsum("bhje,hed->bjhd", given.values, given.matrix)[0]
    gram = f @ f.transpose(1, 2)
    squared = torch.einsum("hij,jhg,gij->ij", given.weights[0], gram, given.weights[0])
    expected = exact(given)
    assert float(((squared.clamp_min(0).sqrt().double() - expected).abs() / expected).max()) > 1e-4


@pytest.mark.parametrize("heads", [1, 4])
def test_tiny_weights_keep_their_relative_accuracy(heads: int) -> None:
    given = record(heads=heads, sharp=25.0)
    expected = exact(given)
    assert float(expected.min()) < 1e-18  # their squares underflow in float32
    seen = expected > 1e-30
    assert float(((found(given).double() - expected).abs()[seen] / expected[seen]).max()) < 1e-4


def test_singular_gram() -> None:
    """Equal heads make every Gram matrix singular."""
    given = record()
    given.values[:] = given.values[:, :1]
    given.matrix[:] = given.matrix[:1]
    output = torch.einsum("bhij,bhje,hed->bid", given.weights, given.values, given.matrix) + given.bias
    same = AttentionRecord(given.weights, given.values, None, given.matrix, given.bias, output)
    torch.testing.assert_close(found(same).double(), exact(same), rtol=1e-5, atol=0)


def feed_forward_record(state_width: int, hidden: int, rows: int, gated: bool) -> FeedForwardRecord:
    make = torch.Generator().manual_seed(1)

    def projection() -> Projection:
        weight, bias = torch.randn(state_width, hidden, generator=make), torch.randn(hidden, generator=make)
        return Projection(weight, bias, torch.randn(1, rows, hidden, generator=make))

    out = torch.randn(hidden, state_width, generator=make)
    up = projection() if gated else None
    unit = Unit(projection(), up, torch.nn.functional.gelu, "gelu", out, None)
    return FeedForwardRecord((unit,), torch.zeros(1, rows, state_width))


@pytest.mark.parametrize("block_bytes", [1, 10_000, 100_000, 2**25])
@pytest.mark.parametrize("sharp", [1.0, 25.0])
@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_blocks(block_bytes: int, sharp: float, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any block size gives the vectors of the direct computation, also for tiny weights."""
    monkeypatch.setattr(feed_forward, "HIDDEN", 7)
    given = record(sharp=sharp)
    tokens, width = given.values.shape[2], given.matrix.shape[2]
    state = decompose_attention(given, None, "token", Scratch())
    make = torch.Generator().manual_seed(2)
    gain, shift = torch.randn(2, width, generator=make)
    norm = NormRecord("layer", torch.rand(1, tokens, generator=make) + 0.5, gain, shift, given.output)
    normed: Factored = state.after_norm(norm)
    ff = feed_forward_record(width, 20, tokens, gated)
    made = feed_forward.decompose_feed_forward(normed, ff, "ig")
    assert isinstance(made, GatedRows)
    rows = made.add(normed).after_norm(norm)
    projections = feed_forward.ff_hidden_projections(rows, normed.terms[0])
    whole = slice(None)
    streamed = feed_forward.stream_contributions(
        rows, projections, [0, 1, 2], 0, 0, whole, whole, block_bytes, Scratch(), keep_vectors=True
    )

    vectors = gram.contribution_vectors(normed, None)[0][0].double()
    (unit,) = rows.units
    hidden = [
        torch.einsum("ik,ijk->ijk", gate[0].double(), vectors @ weight.double())
        for gate, weight in zip(unit.coefficients, unit.weights, strict=True)
    ]
    after = sum(hidden[1:], hidden[0]) @ unit.out.double()
    total = after + vectors
    last = (total - total.mean(-1, keepdim=True)) * norm.gain.double() * norm.inverse[0].double()[:, None, None]
    off = ~torch.eye(tokens, dtype=torch.bool)
    for point, expected in enumerate((after, total, last)):
        lengths = expected.norm(dim=-1)
        seen = off & (lengths > 1e-30)
        apart = (streamed[point].map.t().double() - lengths).abs()
        assert float((apart[seen] / lengths[seen]).max()) < 1e-4
        vectors_found = streamed[point].vectors
        assert vectors_found is not None
        miss = (vectors_found.double() - expected).norm(dim=-1)
        assert float((miss[seen] / lengths[seen]).max()) < 1e-4
        others = (expected * off[..., None]).sum(1)
        torch.testing.assert_close(streamed[point].others.double(), others, rtol=1e-4, atol=1e-3)
