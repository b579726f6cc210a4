"""The trust benchmark on planted answers: a model whose true sources are known, and scores that know nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import permutations
from math import exp, isnan, log
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.trust import metrics
from benchmarks.trust.__main__ import METRICS, measure_question, read_finished
from benchmarks.trust.asking import ask
from benchmarks.trust.summary import estimates, summary_tables
from benchmarks.trust.tasks import KINDS, Question, questions
from normscope import Analyzer
from tests.helpers.files import real_model

WEIGHTS = (0.3, 2.0, 0.0, 0.1, 1.0, 0.05)  # what each source adds to the log-odds of the planted answer


def planted(kept: Sequence[int]) -> float:
    """The log-probability of the answer: its log-odds are the weights of the sources that are kept."""
    odds = -2 + sum(WEIGHTS[n] for n in kept)
    return -log(1 + exp(-odds))


def random_scores(count: int) -> list[list[float]]:
    return np.random.default_rng(0).random((count, len(WEIGHTS))).tolist()


SUBSETS = metrics.random_subsets(len(WEIGHTS), 64, seed=1)
ODDS = [metrics.log_odds(planted(kept)) for kept in SUBSETS]


def test_the_true_sources_come_out_right_for_every_metric() -> None:
    drops = metrics.leave_one_out(planted, len(WEIGHTS))
    assert metrics.recovery(WEIGHTS, [1, 4]) == 1
    assert metrics.wins(WEIGHTS, [1, 4], [0, 2]) == 1
    assert metrics.rank_correlation(WEIGHTS, drops) == pytest.approx(1)
    assert metrics.linear_datamodelling_score(WEIGHTS, SUBSETS, ODDS) == pytest.approx(1, abs=1e-6)
    assert ODDS[0] == pytest.approx(-2 + sum(WEIGHTS[n] for n in SUBSETS[0]))
    without = [n for n in range(len(WEIGHTS)) if n not in (1, 4)]
    assert metrics.top_drop(WEIGHTS, planted, 2) == pytest.approx(planted(range(len(WEIGHTS))) - planted(without))
    best = metrics.comprehensiveness_area(WEIGHTS, planted)
    orders = [[-float(order.index(n)) for n in range(6)] for order in permutations(range(6))]
    assert best == pytest.approx(max(metrics.comprehensiveness_area(one, planted) for one in orders))


def test_the_opposite_of_the_truth_comes_out_wrong() -> None:
    opposite = [-w for w in WEIGHTS]
    drops = metrics.leave_one_out(planted, len(WEIGHTS))
    assert metrics.recovery(opposite, [1]) == 0
    assert metrics.wins(opposite, [1], [2]) == 0
    assert metrics.rank_correlation(opposite, drops) == pytest.approx(-1)
    assert metrics.linear_datamodelling_score(opposite, SUBSETS, ODDS) == pytest.approx(-1, abs=1e-6)
    assert metrics.comprehensiveness_area(opposite, planted) < metrics.comprehensiveness_area(WEIGHTS, planted)


def test_random_scores_are_at_chance() -> None:
    drops = metrics.leave_one_out(planted, len(WEIGHTS))
    scores = random_scores(2000)

    def mean(values: list[float]) -> float:
        return float(np.mean(values))

    assert mean([metrics.recovery(one, [1, 4]) for one in scores]) == pytest.approx(2 / 6, abs=0.02)
    assert mean([metrics.wins(one, [1], [2]) for one in scores]) == pytest.approx(0.5, abs=0.04)
    assert mean([metrics.rank_correlation(one, drops) for one in scores]) == pytest.approx(0, abs=0.04)
    areas = [metrics.comprehensiveness_area(one, planted) for one in scores[:200]]
    assert mean(areas) < metrics.comprehensiveness_area(WEIGHTS, planted) - 0.05
    by_one = mean([metrics.top_drop(one, planted, 1) for one in scores])
    assert by_one == pytest.approx(mean(drops), abs=0.02)  # of a source drawn at random


def test_equal_scores_are_at_chance() -> None:
    equal = [0.5] * 6
    assert metrics.recovery(equal, [1, 4]) == pytest.approx(2 / 6)
    assert metrics.wins(equal, [1], [2]) == 0.5
    assert metrics.rank_correlation(equal, WEIGHTS) == 0
    assert metrics.recovery([1, 1, 0], [0]) == 0.5
    assert isnan(metrics.wins(equal, [1], []))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("scale", [1, 1000])
def test_the_retained_share_is_fixed(share: float, scale: float) -> None:
    """Whatever the size of the scores, and in their order; so larger scores gain nothing."""
    scores = [scale * w for w in WEIGHTS]
    kept = metrics.keep_probabilities(scores, share)
    assert kept.mean() == pytest.approx(share, abs=1e-6)
    assert kept.max() <= 1
    assert (np.diff(kept[np.argsort(scores)]) >= 0).all()
    np.testing.assert_allclose(kept, metrics.keep_probabilities(list(WEIGHTS), share), atol=1e-9)
    assert metrics.keep_probabilities([2.0] * 4, share) == pytest.approx([share] * 4)


def test_questions_are_balanced_and_hold_their_answers() -> None:
    asked = questions(20, seed=3)
    assert [one.name for one in questions(5, seed=3)] == [one.name for one in asked[: 5 * len(KINDS)]]
    assert questions(5, seed=3) == asked[: 5 * len(KINDS)]
    for kind in KINDS:
        some = [one for one in asked if one.kind == kind]
        assert sum(one.decoy_first for one in some) == len(some) / 2
        for one in some:
            check_question(one)


def check_question(one: Question) -> None:
    gold, decoys = ([one.sentences[n] for n in places] for places in (one.gold, one.decoys))
    assert (max(one.decoys) < min(one.gold)) == one.decoy_first
    assert sum(one.answer.strip() in sentence for sentence in gold) == 1
    assert sum(one.wrong.strip() in sentence for sentence in decoys) == 1
    others = [sentence for n, sentence in enumerate(one.sentences) if n not in (*one.gold, *one.decoys)]
    assert not any(word in sentence for sentence in others for word in (f"{one.answer}.", f"{one.wrong}."))
    text = one.text()
    assert [text[a:b] for a, b in one.spans()] == list(one.sentences)
    assert one.text([0, 1]).splitlines()[:2] == list(one.sentences[:2])


def test_summaries_over_the_questions_answered_right() -> None:
    records = [
        {"name": "a", "kind": "needle", "right": False},
        *({"name": str(n), "kind": "needle", "right": True, "decoy_first": bool(n % 2),
           "methods": {"truth": {"recovery": 1.0, "seconds": 1.0}, "never": {"refusal": "not for this model"}}}
          for n in range(6)),
    ]  # fmt: skip
    found = estimates(records, "recovery")
    assert set(found) == {"truth"}
    assert (found["truth"].value, found["truth"].low, found["truth"].high) == (1, 1, 1)
    titles = [str(table.title) for table in summary_tables(records)]
    assert titles[0] == "Recovery: 6 of 7 questions answered right"
    assert titles[-1] == "Refused"


def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    path, settings = tmp_path / "runs" / "trust.jsonl", {"seed": 0}
    assert read_finished(path, settings) == {}
    with path.open("a") as file:
        file.write(json.dumps({"name": "needle-0", "right": False}) + "\n" + '{"name": "need')
    assert list(read_finished(path, settings)) == ["needle-0"]
    assert list(read_finished(path, settings)) == ["needle-0"]  # the cut line is gone
    with pytest.raises(SystemExit, match="other settings"):
        read_finished(path, {"seed": 1})


def test_a_real_model_is_asked_and_measured() -> None:
    """The whole path on a small model, whose answer is taken as right."""
    folder = real_model("stories15M")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lens: Analyzer = Analyzer(model, AutoTokenizer.from_pretrained(folder))
    asked = ask(lens, questions(1)[0])
    sources = len(asked.question.sentences)
    some = [0, 2]
    asked.prepare([some, [1], []])
    with torch.no_grad():
        alone = model(**lens.tokenizer(asked.question.text(some), return_tensors="pt")).logits[0, -1]
    assert asked.log_probability(some) == pytest.approx(float(alone.log_softmax(-1)[asked.target]), abs=1e-4)
    assert asked.soft_drop([1.0] * 500, 1.0, 2, 0) == pytest.approx(0, abs=1e-4)  # nothing is taken away
    found = measure_question(asked, ["exact", "rollout", "alti+"], METRICS)["methods"]
    assert set(found) == {"exact", "rollout", "random", "leave one out"}
    for name in ("exact", "rollout", "random"):
        assert len(found[name]["scores"]) == sources
        assert np.isfinite([found[name][key] for key in ("recovery", "LDS", "AOPC", "top-1 drop", "soft-NC")]).all()
    assert found["leave one out"]["leave-one-out"] == pytest.approx(1)
