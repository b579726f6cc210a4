"""Progress of flows and explanations: every part is counted, nothing is counted twice, and the last call is the end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from normscope import Analyzer, Passage
from normscope.step_progress import FOLLOWED, follow_steps
from tests.helpers.toys import speaker, translator

Seen = list[tuple[int, int]]


def follow(call: Callable[..., Any]) -> Seen:
    """What a call reports; it must never go back or beyond the total, and end there."""
    seen: Seen = []
    call(progress=lambda done, total: seen.append((done, total)))
    done = [one for one, _ in seen]
    assert done == sorted(done)
    assert all(1 <= one <= total for one, total in seen)
    assert seen[-1][0] == seen[-1][1]
    return seen


def test_a_flow_counts_tokens_layers_and_layers_back() -> None:
    lens = speaker()
    plain = follow(lambda **how: lens.flow("the cat sat", target="top", **how))
    assert len(plain) == plain[-1][1] == 2 * lens.depth
    written = follow(lambda **how: lens.flow("the cat", generate=4, target=Passage(), **how))
    assert len(written) == written[-1][1] == 4 + 2 * lens.depth


def test_an_explanation_counts_tokens_layers_and_targets() -> None:
    lens = speaker()
    seen = follow(lambda **how: lens.explain("the cat", generate=4, **how))
    assert [done for done, _ in seen][: 4 + lens.depth] == list(range(1, 5 + lens.depth))
    assert {total for _, total in seen} == {4 + lens.depth + 4}  # all parts are known from the start
    two = follow(lambda **how: lens.explain("the cat", answer="on a mat", against="dog", **how))
    assert two[-1][1] == 2 * lens.depth + 3 + 1


def test_both_sides_of_a_translation_count() -> None:
    lens = translator()
    layers = sum(lens.loaded.depths)
    seen = follow(lambda **how: lens.flow(("the cat", "le chat"), target=slice(1, 2), **how))
    assert seen[-1][1] == 2 * layers


def test_a_model_that_stops_early_lowers_the_total() -> None:
    lens = Analyzer(copy.deepcopy(speaker().model), speaker().tokenizer)
    written = lens.explain("the cat", generate=20)
    lens.model.generation_config.eos_token_id = int(lens.tokenizer.convert_tokens_to_ids(written.tokens[0]))
    seen = follow(lambda **how: lens.explain("the cat", generate=20, **how))
    assert seen[0][1] == 20 + lens.depth + 20
    assert seen[-1][1] == 1 + lens.depth + 1


def test_maps_count_their_columns() -> None:
    flow, seen = speaker().flow("the cat sat"), []
    with follow_steps(lambda done, total: seen.append((done, total)), {}):
        assert flow.maps is not None
    assert seen[-1] == (len(flow.columns), len(flow.columns))


def test_a_callback_may_run_the_library() -> None:
    lens, inside = speaker(), []

    def nested(done: int, total: int) -> None:
        inside.append((done, total))
        lens.flow("a cat", target="top")

    lens.flow("the cat sat", target="top", progress=nested)
    assert len(inside) == 2 * lens.depth
    assert FOLLOWED.get() is None


@pytest.mark.parametrize("method", ["explain", "flow"])
def test_nobody_follows_after_an_error(method: str) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    lens: Analyzer = speaker()
    with pytest.raises(KeyboardInterrupt):
        getattr(lens, method)("the cat", generate=2, progress=stop)
    assert FOLLOWED.get() is None
