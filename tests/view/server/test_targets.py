"""Flows over HTTP: a model's targets, scores in the header, and invalid targets."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from normscope import Analyzer
from normscope.view.document import document_header
from tests.helpers.kinds import lenses, result_of
from tests.helpers.live import Live, Slow, Told, live
from tests.helpers.tiny import tiny
from tests.helpers.toys import toy_tokenizer

CAUSAL: dict[str, Any] = {"model": "tiny-causal", "text": "the cat sat on a mat"}
PAIR: dict[str, Any] = {"model": "tiny-encoder-decoder", "text": "the cat sat", "target": "le chat sur un tapis"}


@pytest.fixture(scope="module")
def heads() -> Iterator[Live]:
    """Encoders with heads, for the whole text and for every token."""
    make = partial(tiny, "bert")
    models = {
        "classifier": Analyzer(make("SequenceClassification", id2label={0: "bad", 1: "good"}), toy_tokenizer()),
        "tagger": Analyzer(make("TokenClassification"), toy_tokenizer()),
        "masked": Analyzer(make("MaskedLM"), toy_tokenizer()),
    }
    with live(models) as found:
        yield found


def test_target_kinds_of_models(server: Live, heads: Live) -> None:
    infos = [*server.client.get("/api/models").json(), *heads.client.get("/api/models").json()]
    assert {info["name"]: (info["targets"], info["classes"], info["positions"]) for info in infos} == {
        "tiny-encoder": ("none", [], False),
        "tiny-causal": ("tokens", [], True),
        "tiny-encoder-decoder": ("tokens", [], True),
        "tiny-vision": ("none", [], False),
        "classifier": ("classes", ["bad", "good"], False),
        "tagger": ("classes", ["LABEL_0", "LABEL_1"], True),
        "masked": ("tokens", [], True),
    }


def test_scores_in_the_header(server: Live) -> None:
    found = server.start(**CAUSAL, flow={"target": "cat", "against": "dog", "position": 2})
    assert found["state"] == "done", found
    flow = lenses()["tiny-causal"].flow(CAUSAL["text"], target=("cat", "dog"), position=2)
    expected = document_header(result_of("causal"), flow=flow)["flow"]
    for name in ("target", "position", "method", "columns"):
        assert found["header"]["flow"][name] == expected[name]
    assert found["header"]["flow"]["value"] == pytest.approx(expected["value"])
    assert found["header"]["flow"]["scores"] == pytest.approx(expected["scores"], abs=1e-5)
    again = server.client.get(f"/api/analyses/{found['id']}/header").json()
    assert again == found["header"]


def test_an_encoder_decoder(server: Live) -> None:
    found = server.start(**PAIR, flow={"target": 5})["header"]["flow"]
    assert [label["side"] for label in found["columns"]] == ["decoder"] * 6 + ["encoder"] * 4
    own = server.start(model=PAIR["model"], text=PAIR["text"], generate=3, flow={"target": "top"})  # what it writes
    assert len(own["header"]["flow"]["scores"]) == len(own["header"]["sides"][0]["columns"])


def test_classes(heads: Live) -> None:
    found = heads.start(model="classifier", text="the cat sat", flow={"target": "good", "against": 0})["header"]["flow"]
    assert found["target"] == "logit of 'good' minus 'bad'"
    assert found["position"] is None
    tagged = heads.start(model="tagger", text="the cat sat", flow={"target": "top", "position": 2})["header"]["flow"]
    assert tagged["position"] == 2


def test_other_methods(server: Live) -> None:
    assert server.start(**CAUSAL, flow={"target": "top", "method": "rollout"})["header"]["flow"]["remainder"] is None


def test_requests_with_different_targets_are_different(server: Live) -> None:
    flows = [None, {"target": "top"}, {"target": "cat"}, {"target": "cat", "against": "dog"}]
    flows += [{"target": "top", "position": 1}, {"target": "top", "method": "rollout"}]
    ids = [server.start(**CAUSAL, flow=flow)["id"] for flow in flows]
    assert len(set(ids)) == len(flows)
    assert server.start(**CAUSAL, flow={"target": "top"})["id"] == ids[1]
    assert server.start(**CAUSAL)["id"] == ids[0]


@pytest.mark.parametrize(
    ("flow", "reason"),
    [
        ({"target": "nowhere"}, "'nowhere' is not in the vocabulary"),
        ({"target": "</script><b>"}, "is not in the vocabulary"),
        ({"target": ""}, "is not in the vocabulary"),
        ({"target": 10**9}, "There is no logit 1000000000"),
        ({"target": "cat", "against": "cat"}, "The two targets are the same"),
        ({"target": "top", "position": 99}, "There is no position 99 in the logits"),
        ({"target": "top", "method": "magic"}, "magic"),
    ],
)
def test_targets_that_make_no_sense(server: Live, flow: dict[str, Any], reason: str) -> None:
    found = server.start(**CAUSAL, flow=flow)
    assert found["state"] == "failed"
    assert reason in found["error"]
    assert "header" not in found


def test_a_logit_at_every_token(heads: Live) -> None:
    found = heads.start(model="tagger", text="the cat sat", flow={"target": "top"})
    assert "choose one, or mask a token in the text" in found["error"]
    assert "position=" not in found["error"]


@pytest.mark.parametrize(
    "flow",
    [
        {},
        {"target": None},
        {"target": 1.5},
        {"target": True},
        {"target": ["a", "b"]},
        {"target": "x" * 1001},
        {"target": "top", "position": "2"},
        {"target": "top", "more": 1},
        "top",
    ],
)
def test_malformed_flows(server: Live, flow: Any) -> None:
    answer = server.client.post("/api/analyses", json={**CAUSAL, "flow": flow})
    assert answer.status_code == 422
    assert "flow" in answer.json()["error"]


def test_a_model_without_a_head(server: Live) -> None:
    answer = server.client.post("/api/analyses", json={"model": "tiny-encoder", "text": "a", "flow": {"target": "top"}})
    assert answer.status_code == 422
    assert "no head" in answer.json()["error"]


def test_progress_leaves_room_for_the_flow() -> None:
    from normscope.view.server.analyses import run_server_analysis
    from normscope.view.server.schemas import AnalysisRequest

    def told(**more: Any) -> list[float]:
        seen: list[float] = []
        request = AnalysisRequest(**CAUSAL, **more)
        run_server_analysis(lenses()["tiny-causal"], request, Told(lambda done, total: seen.append(done / total)))
        return seen

    assert told()[-1] == 1
    assert told(flow={"target": "top"})[-1] < 1


def test_cancelling_between_the_maps_and_the_flow(slow: Slow) -> None:
    with live(lenses(), run=slow) as server:
        id = server.client.post("/api/analyses", json={**CAUSAL, "flow": {"target": "top"}}).json()["id"]
        slow.let_go(2)
        assert server.client.delete(f"/api/analyses/{id}").json()["state"] == "cancelled"
        slow.let_go()
        assert server.until(id, "cancelled")
