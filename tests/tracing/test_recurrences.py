"""The weights of recurrences against the recurrences themselves, one token at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from normscope.tracing.recurrences import CHUNK, RecurrenceInputs

LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 22)


def random_recurrence(length: int, delta: bool, items: int = 2, heads: int = 3) -> RecurrenceInputs:
    generator = torch.Generator().manual_seed(length)

    def noise(*shape: int) -> Tensor:
        return torch.randn(items, heads, length, *shape, generator=generator, dtype=torch.float64)

    query, key = normalize(noise(6), dim=-1), normalize(noise(6), dim=-1)
    return RecurrenceInputs(
        query, key, -noise().abs() / 2, noise().sigmoid(), None if delta else noise()[0, :, 0], delta
    )


def step_by_step(given: RecurrenceInputs, values: Tensor) -> Tensor:
    """The definition: one state, one token after the other."""
    items, heads, length, width = values.shape
    state = torch.zeros(items, heads, given.key.shape[3], width, dtype=torch.float64)
    out = torch.zeros_like(values)
    for b in range(items):
        for h in range(heads):
            for t in range(length):
                k, v = given.key[b, h, t], values[b, h, t]
                state[b, h] *= given.decay[b, h, t].exp()
                change = v - state[b, h].t() @ k if given.delta else v
                state[b, h] += given.write[b, h, t] * torch.outer(k, change)
                out[b, h, t] = state[b, h].t() @ given.query[b, h, t]
                if given.skip is not None:
                    out[b, h, t] += given.skip[h] * v
    return out


def probed(given: RecurrenceInputs) -> Tensor:
    """(b, H, i, j): the weights, from one unit value at a time, all in one pass of width n."""
    items, heads, length, _ = given.shape
    return step_by_step(given, torch.eye(length, dtype=torch.float64).expand(items, heads, length, length))


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_weights_are_those_of_single_values(length: int, delta: bool) -> None:
    given = random_recurrence(length, delta)
    expected = probed(given)
    found = given.weights(slice(0, length))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)
    assert not found.triu(1).any()
    assert (found < 0).any()


@pytest.mark.parametrize("delta", [True, False])
def test_some_rows(delta: bool) -> None:
    """Slices, and other positions in every item, in any order; the second time what is kept of a chunk is used."""
    length = 2 * CHUNK + 22
    given = random_recurrence(length, delta)
    expected = probed(given)
    positions = torch.stack([torch.tensor([149, 3, 64, 63]), torch.tensor([0, 65, 128, 1])])
    for _ in range(2):
        found = given.weights(positions)
        index = positions[:, None, :, None].expand(-1, 3, -1, length)
        torch.testing.assert_close(found, expected.gather(2, index), rtol=1e-9, atol=1e-14)
        for first, last in ((0, 1), (10, 70), (64, 128), (149, 150)):
            found = given.weights(slice(first, last))
            torch.testing.assert_close(found, expected[:, :, first:last, :last], rtol=1e-9, atol=1e-14)


def test_blocks_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    given = random_recurrence(70, True)
    monkeypatch.setattr("normscope.tracing.recurrences.BLOCK_WEIGHTS", 1)
    parts = [some.weights(slice(0, 70)) for _, some in given.head_blocks()]
    assert len(parts) == 3
    torch.testing.assert_close(torch.cat(parts, 1), given.weights(slice(0, 70)))


def test_float32_is_as_good_as_the_recurrence() -> None:
    """Strong decays, whose exponents within a chunk reach -600, neither overflow nor lose the near tokens."""
    given = random_recurrence(150, True)
    strong = RecurrenceInputs(given.query, given.key, 20 * given.decay, given.write, None, True)
    expected = probed(strong)
    single = RecurrenceInputs(*(x.float() for x in (strong.query, strong.key, strong.decay, strong.write)), None, True)
    found = single.weights(slice(0, 150))
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-6)
