"""The rows of a run: scores from the methods, probabilities from the model."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from normscope import Analyzer, corpus
from normscope.errors import NormscopeError
from normscope.flow import methods as flow_methods
from normscope.papers.faithfulness.measures import SHARES
from normscope.papers.faithfulness.scores import compared_methods
from normscope.papers.faithfulness.settings import Settings
from tests.helpers.files import labelled_file, labelled_texts
from tests.helpers.toys import causal, classifier, masked

CASES = {"class": classifier, "next": causal, "masked": masked}


def run(lens: Analyzer, folder: Path, **settings: Any) -> pl.DataFrame:
    data = labelled_file(folder)
    reader = {"text": "text", "label": "label"}
    corpus.run(
        data, lens, folder / "run", measures=["faithfulness"], reader=reader, settings=Settings(**settings).to_plain()
    )
    return corpus.open(folder / "run").scan("faithfulness").collect()


def after(lens: Analyzer, ids: list[int], at: int | None, target: int) -> tuple[float, int]:
    with torch.no_grad():
        logits = lens.model(input_ids=torch.tensor([ids])).logits[0]
    logits = (logits if at is None else logits[at]).double()
    return float(logits.softmax(-1)[target]), int(logits.argmax())


@pytest.mark.parametrize("task", CASES)
def test_rows_by_hand(task: str, tmp_path: Path) -> None:
    lens = CASES[task]()
    frame = run(lens, tmp_path, methods=("exact", "leave_one_out"))
    assert frame["method"].unique(maintain_order=True).to_list() == ["exact", "leave_one_out", "random"]
    neutral = 4 if task != "next" else 1
    for number, (text, label) in enumerate(labelled_texts()):
        ids = lens.tokenizer(text)["input_ids"]
        rows = frame.filter(pl.col("id") == frame["id"].unique(maintain_order=True)[number])
        at = None
        if task == "next":
            ids, at = ids[:-1], len(ids) - 2  # the last word predicts what follows
        elif task == "masked":
            at = len(ids) - 2
            ids = [*ids[:at], 4, *ids[at + 1 :]]
        words = [n for n in range(1, len(ids)) if n != (at if task == "masked" else None) and ids[n] != 3]
        full, choice = after(lens, ids, at, 0)
        full, _ = after(lens, ids, at, choice)
        flow = lens.flow({"input_ids": ids}, method="exact", target=choice, position=at)
        for row in rows.iter_rows(named=True):
            assert (row["position"], row["tokens"]) == (-1 if at is None else at, len(words))
            assert (row["target"], row["choice"]) == (choice, choice)
            assert row["probability"] == pytest.approx(full, abs=1e-6)
            assert row["given"] == (int(label) if task == "class" else row["given"])
            scores = row["scores"]
            if row["method"] == "exact":
                np.testing.assert_allclose(scores, flow.scores[words], rtol=1e-6, atol=1e-9)
            elif row["method"] == "leave_one_out":
                alone = [
                    full - after(lens, [neutral if n == w else i for n, i in enumerate(ids)], at, choice)[0]
                    for w in words
                ]
                np.testing.assert_allclose(scores, alone, rtol=1e-6, atol=1e-6)
            order = [words[n] for n in np.argsort(-np.array(scores), kind="stable")]
            for k, share in enumerate(SHARES):
                top = order[: int(np.ceil(share * len(order) - 1e-9))]
                rest = [n for n in words if n not in top]
                for erasure, kind, gone in (
                    ("mask", "without", top),
                    ("mask", "only", rest),
                    ("delete", "without", top),
                    ("delete", "only", rest),
                ):
                    given = [neutral if n in gone else i for n, i in enumerate(ids)]
                    place = at
                    if erasure == "delete":
                        kept = [n for n in range(len(ids)) if n not in gone]
                        given = [ids[n] for n in kept]
                        place = at if at is None else (len(kept) - 1 if task == "next" else kept.index(at))
                    probability, chosen = after(lens, given, place, choice)
                    assert row[f"{erasure}_{kind}"][k] == pytest.approx(probability, abs=1e-6)
                    assert row[f"{erasure}_{kind}_choice"][k] == chosen


def test_the_given_target(tmp_path: Path) -> None:
    frame = run(classifier(), tmp_path, methods=("exact",), target="given")
    assert frame["target"].to_list() == frame["given"].to_list()
    assert sorted(frame["target"].unique().to_list()) == [0, 1, 2]


def test_a_method_that_is_not_for_the_model_says_why(tmp_path: Path) -> None:
    frame = run(classifier(), tmp_path, methods=("alti+", "exact"))
    refused = frame.filter(pl.col("method") == "alti+")
    assert all("reads an encoder" in reason for reason in refused["reason"])
    assert all(isnan(value) for row in refused["mask_without"].to_list() for value in row)
    assert refused["scores"].list.len().max() == 0
    assert frame.filter(pl.col("method") == "exact")["reason"].unique().to_list() == [""]


def test_methods_that_appear_later_are_included(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compared_methods(classifier())
    assert {"exact", "decompx", "rollout", "alti", "gradient_x_input", "leave_one_out", "random"} <= set(before)
    assert {"rollout:ATTN-W", "rollout:ATTNRESLN-N", "rollout:ATTNRESLNFFRESLN-N"} <= set(before)
    assert "rollout-raw" not in before  # needs a scope
    assert "rollout:ATTNRES-W" not in before  # is rollout itself
    monkeypatch.setitem(flow_methods.METHODS, "mine", flow_methods.METHODS["exact"])
    assert set(compared_methods(classifier())) - set(before) == {"mine"}
    assert compared_methods(classifier(), ["rollout-raw:layer"]) == ("rollout-raw:layer", "random")
    with pytest.raises(NormscopeError, match="Unknown method 'nope'"):
        compared_methods(classifier(), ["nope"])


def test_random_scores_are_fixed_by_seed_and_entry(tmp_path: Path) -> None:
    frames = []
    for number, seed in enumerate((0, 0, 1)):
        folder = tmp_path / str(number)
        folder.mkdir()
        frames.append(run(classifier(), folder, methods=("random",), seed=seed)["scores"].to_list())
    assert frames[0] == frames[1] != frames[2]
    assert frames[0][0][:3] != frames[0][1][:3]


def test_short_entries_are_errors_and_the_rest_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "texts.txt"
    data.write_text("the cat\nthe cat sat on the mat\n")
    settings = Settings(methods=("exact",)).to_plain()
    summary = corpus.run(data, causal(), tmp_path / "run", measures=["faithfulness"], settings=settings)
    assert (summary.done, summary.faults) == (2, 1)
    errors = corpus.open(tmp_path / "run").scan("errors").collect()
    assert "too short" in errors["reason"][0]
    with pytest.raises(NormscopeError, match="options\\.settings"):
        corpus.run(data, causal(), tmp_path / "run", measures=["faithfulness"], settings=settings | {"seed": 5})
