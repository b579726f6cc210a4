"""stream(): many inputs, in order, lazily, each equal to analyze() of it alone."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from normscope import Analyzer, NormscopeError
from normscope.engine.request import Options, requests_for
from normscope.engine.run import run_batch
from normscope.inputs.encode import encode
from tests.helpers.compare import assert_same
from tests.helpers.tiny import BERT_FAMILIES, tiny
from tests.helpers.toys import TEXT, some_ids, toy_lens

TEXTS = (
    "a cat",
    "the cats sat on the big red mat and it was a big bird",
    "it",
    ("the dog ran", "a bird saw it"),
    "the big dog",
    ["the", "cats", "sat"],
    "a cat",
    "the bird and the dog and the cat ran and sat and ran on the mat",
    "dogs",
)
LENGTHS = (5, 12, 3, 12, 1, 7, 30, 2, 9, 4)


def alone(lens: Analyzer, given: Any, **options: Any) -> Any:
    return lens.analyze(words=given, **options) if isinstance(given, list) else lens.analyze(given, **options)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 16, 100])
def test_equals_one_by_one_in_order(batch_size: int) -> None:
    lens = toy_lens()
    found = list(lens.stream(TEXTS, batch_size=batch_size))
    assert len(found) == len(TEXTS)
    for one, given in zip(found, TEXTS, strict=True):
        expected = alone(lens, given)
        assert_same(one, expected)
        assert one.word_ids == expected.word_ids
        assert one.rows == expected.rows
        assert dict(one.info) == dict(expected.info)


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_mixed_lengths_of_every_family(family: str) -> None:
    lens = Analyzer(tiny(family))
    given = [{"input_ids": some_ids(length, seed)} for seed, length in enumerate(LENGTHS)]
    for one, item in zip(lens.stream(given, batch_size=4, heads=True), given, strict=True):
        assert_same(one, lens.analyze(item, heads=True))


@pytest.mark.parametrize(
    "options",
    [
        {"rows": [-1]},
        {"rows": [-1], "heads": True},
        {"rows": [0, -1, 0]},
        {"heads": True},
        {"heads": [3, 1]},
        {"layers": [1]},
        {"scopes": ["weights", "layer"]},
        {"scopes": "attention", "layers": 0, "rows": 0, "heads": [2]},
        {"gate": "tangent"},
        {"value_bias": "remainder"},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    lens = toy_lens()
    for one, given in zip(lens.stream(TEXTS, batch_size=4, **options), TEXTS, strict=True):
        expected = alone(lens, given, **options)
        assert_same(one, expected)
        assert one.head_indices == expected.head_indices


def test_truncation() -> None:
    lens = toy_lens()
    long = "the cat " * 40
    found = list(lens.stream([TEXT, long], truncation=True))
    assert_same(found[1], lens.analyze(long, truncation=True))


@pytest.mark.parametrize("side", ["left", "right"])
def test_encoding_of_a_batch_counts_as_its_rows(side: str) -> None:
    lens = toy_lens()
    texts = [TEXT, "a cat", "the dog ran"]
    batch = lens.tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
    for given in (batch, dict(batch), [batch]):
        for one, text in zip(lens.stream(given, batch_size=2), texts, strict=True):
            assert_same(one, lens.analyze(text))


def test_batches_and_single_inputs_mix() -> None:
    lens = toy_lens()
    batch = lens.tokenizer([TEXT, "a cat"], padding=True, return_tensors="pt")
    found = list(lens.stream(["it", batch, "the dog"], batch_size=3))
    for one, text in zip(found, ["it", TEXT, "a cat", "the dog"], strict=True):
        assert_same(one, lens.analyze(text))


@pytest.mark.parametrize("order", [1, -1])
def test_inputs_with_different_keys(order: int) -> None:
    """Some inputs bring token types or positions, others do not: each is analysed as if it were alone."""
    lens = toy_lens()
    given = [
        {"input_ids": some_ids(9), "token_type_ids": torch.ones(9, dtype=torch.long)},
        {"input_ids": some_ids(7)},
        {"input_ids": some_ids(8), "position_ids": torch.arange(8) + 5},
        TEXT,
    ][::order]
    for one, item in zip(lens.stream(given, batch_size=4), given, strict=True):
        assert_same(one, lens.analyze(item))


@pytest.mark.parametrize("key", ["token_type_ids", "position_ids"])
def test_no_key_is_lost(key: str) -> None:
    """The longest input of a batch has no token types or positions, a shorter one has."""
    lens = toy_lens()
    given = [{"input_ids": some_ids(9)}, {"input_ids": some_ids(6), key: torch.tensor([1, 1, 1, 0, 0, 0])}]
    for one, item in zip(lens.stream(given), given, strict=True):
        assert_same(one, lens.analyze(item))


def test_holes_in_a_batch() -> None:
    lens = toy_lens()
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1])
    given = [{"input_ids": some_ids(12)}, {"input_ids": some_ids(7), "attention_mask": mask}, {"input_ids": [5]}]
    for one, item in zip(lens.stream(given, rows=[0, -1]), given, strict=True):
        assert_same(one, lens.analyze(item, rows=[0, -1]))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_reads_at_most_a_window_ahead(batch_size: int) -> None:
    taken = 0

    def texts() -> Iterator[str]:
        nonlocal taken
        while True:  # without an end: a stream that waited for it would never begin
            taken += 1
            yield TEXT

    results = toy_lens().stream(texts(), batch_size=batch_size, scopes="weights")
    assert taken == 0
    for number in range(1, 12):
        next(results)
        assert taken <= number - 1 + 8 * batch_size


def test_an_empty_stream() -> None:
    assert list(toy_lens().stream([])) == []


def test_many_short_inputs_in_one_batch() -> None:
    """A batch of more tokens than one decomposition step takes."""
    lens = Analyzer(tiny("bert"))
    given = [{"input_ids": some_ids(30, seed)} for seed in range(20)]
    for one, item in zip(lens.stream(given, batch_size=20, scopes=["layer", "attention"]), given, strict=True):
        assert_same(one, lens.analyze(item, scopes=["layer", "attention"]))


@pytest.mark.parametrize("given", [TEXT, 5, None, [5], [None], [""], [TEXT, " "], [[]], [b"x"], b"x"], ids=repr)
def test_bad_inputs(given: Any) -> None:
    with pytest.raises(NormscopeError):
        list(toy_lens().stream(given))


def test_stream_refuses_a_single_text() -> None:
    with pytest.raises(NormscopeError, match=r"stream\(\[text\]\)"):
        next(iter(toy_lens().stream(TEXT)))


@pytest.mark.parametrize("size", [0, -1, 1.5, "4", None, True, [4], [2, 3], np.array([4])], ids=repr)
def test_bad_batch_size(size: Any) -> None:
    with pytest.raises(NormscopeError, match="batch_size"):
        list(toy_lens().stream([TEXT], batch_size=size))


@pytest.mark.parametrize("size", [np.int64(2), torch.tensor(2)], ids=repr)
def test_batch_size_of_an_array(size: Any) -> None:
    assert len(list(toy_lens().stream([TEXT] * 3, batch_size=size))) == 3


def test_bad_options_are_refused_before_any_input_is_read() -> None:
    def never() -> Iterator[str]:
        pytest.fail("an input was read")
        yield TEXT

    for options in ({"scopes": "nope"}, {"layers": 9}, {"heads": [9]}, {"gate": "nope"}, {"batch_size": 0}):
        with pytest.raises(NormscopeError):
            list(toy_lens().stream(never(), **options))


@pytest.mark.parametrize(
    "options", [{}, {"heads": True}, {"rows": [0, -1]}, {"layers": [1, 0]}, {"layers": [1]}], ids=repr
)
def test_layers_are_reported_as_they_are_done(options: dict[str, Any]) -> None:
    lens = Analyzer(tiny("bert", num_hidden_layers=3), toy_lens().tokenizer)
    items = [item for text in ("the cats sat on the big red mat", "a cat") for item in encode(lens.loaded, text)]
    requests = requests_for(lens.loaded, Options(**options))
    told: list[list[Any]] = []
    whole = run_batch(lens.loaded, items, requests, lens.workspace, None, lambda results: told.append(results()))
    assert len(told) == len(whole[0].layers) - 1
    for done, early in enumerate(told, 1):
        for part, result in zip(early, whole, strict=True):
            _is_start_of(part, result, done)


def _is_start_of(part: Any, whole: Any, layers: int) -> None:
    """Assert that a result is the first layers of another, to the last bit."""
    assert part.layers == whole.layers[:layers]
    assert part.rows == whole.rows
    for scope in whole.scopes:
        for mine, all_layers in zip(
            vars(part.measured[scope]).values(), vars(whole.measured[scope]).values(), strict=True
        ):
            assert torch.equal(mine, all_layers[:layers])
    for scope, maps in whole.heads.items():
        assert torch.equal(part.heads[scope], maps[:layers])
