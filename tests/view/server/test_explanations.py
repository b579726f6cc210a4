"""Explanations over HTTP have the numbers of the library."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from normscope import Analyzer
from tests.helpers.kinds import lenses
from tests.helpers.live import WAIT, Live, live

TEXT = "the cat sat on"


@pytest.fixture(scope="module")
def writer() -> Analyzer:
    return lenses()["tiny-causal"]


@pytest.fixture(scope="module")
def server(writer: Analyzer) -> Iterator[Live]:
    with live({"writer": writer, "encoder": lenses()["tiny-encoder"]}) as found:
        yield found


def explained(server: Live, **request: Any) -> Any:
    answer = server.client.post("/api/explanations", params={"wait": WAIT}, json={"model": "writer", **request})
    assert answer.status_code == 201, answer.text
    found = answer.json()
    assert found["state"] == "done", found["error"]
    return found["explanation"]


def test_the_numbers_are_those_of_explain(server: Live, writer: Analyzer) -> None:
    told = writer.explain(TEXT, generate=3, alternatives=10)
    found = explained(server, text=TEXT, generate=3)
    assert [label["token"] for label in found["columns"]] == list(told.input_tokens)
    assert [label["token"] for label in found["rows"]] == list(told.tokens)
    np.testing.assert_allclose(found["scores"], told.scores.double().numpy(), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(found["values"], told.values.numpy(), rtol=1e-5)
    sums = np.array(found["scores"]).sum(1) + np.array(found["remainder"])
    np.testing.assert_allclose(sums, found["values"], rtol=1e-5, atol=1e-6)
    assert [[one["token"] for one in others] for others in found["alternatives"]] == [
        [one.token for one in others] for others in told.alternatives
    ]
    for grain, groups in found["groups"].items():
        assert sorted(place for group in groups for place in group["places"]) == list(range(len(told.columns)))
        assert [group["name"] for group in groups] == [one.name for one in told.grouped(inputs=grain).columns]


def test_a_given_answer(server: Live, writer: Analyzer) -> None:
    told = writer.explain(TEXT, answer="the mat")
    assert [label["token"] for label in explained(server, text=TEXT, answer="the mat")["rows"]] == list(told.tokens)


def test_a_contrast_is_the_difference_of_two_logits(server: Live, writer: Analyzer) -> None:
    """As the model computes them."""
    main = explained(server, text=TEXT, generate=2)
    row = main["rows"][1]
    other = main["alternatives"][1][3]["token"]
    found = explained(server, text=TEXT, generate=2, contrast={"position": row["position"], "token": other})
    assert [label["token"] for label in found["rows"]] == [row["token"]]
    vocabulary = writer.loaded.tokenizer.get_vocab()
    ids = [vocabulary[label["token"]] for label in [*main["columns"]][: row["position"]]]
    with torch.no_grad():
        logits = writer.model(torch.tensor([ids])).logits[0, -1]
    difference = float(logits[vocabulary[row["token"]]] - logits[vocabulary[other]])
    assert found["values"][0] == pytest.approx(difference, rel=1e-4)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"model": "encoder", "text": TEXT, "generate": 1}, "does not write text"),
        ({"text": " ", "generate": 1}, "text is empty"),
        ({"text": TEXT}, "either a number of tokens"),
        ({"text": TEXT, "generate": 1, "answer": "cat"}, "either a number of tokens"),
        ({"model": "nobody", "text": TEXT, "generate": 1}, "No model 'nobody' is served"),
    ],
)
def test_requests_that_are_refused(server: Live, request_: dict[str, Any], reason: str) -> None:
    answer = server.client.post("/api/explanations", json={"model": "writer", **request_})
    assert answer.status_code == 422
    assert reason in answer.json()["error"]


@pytest.mark.parametrize(
    ("contrast", "reason"),
    [
        ({"position": 4, "token": "<img src=x>"}, "is not a token of this model"),
        ({"position": 999, "token": "cat"}, "999"),
    ],
)
def test_contrasts_that_are_refused(server: Live, contrast: dict[str, Any], reason: str) -> None:
    request = {"model": "writer", "text": TEXT, "generate": 1, "contrast": contrast}
    found = server.client.post("/api/explanations", params={"wait": WAIT}, json=request).json()
    assert found["state"] == "failed"
    assert reason in found["error"]


def test_unknown_explanations(server: Live) -> None:
    assert server.client.get("/api/explanations/none").status_code == 404
    assert server.client.delete("/api/explanations/none").status_code == 404
