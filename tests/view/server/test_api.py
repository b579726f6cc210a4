"""Every endpoint of the API, for scripts and for the viewer."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from normscope import Analyzer
from normscope.view.document import document_header, document_header_to_json, document_map_bytes, sides_of
from normscope.view.server import analyses
from normscope.view.server.analyses import Shown, run_server_analysis
from normscope.view.server.jobs import ProgressReport
from normscope.view.server.schemas import AnalysisRequest
from tests.helpers.kinds import KINDS, lenses, png, result_of
from tests.helpers.live import PATIENCE, WAIT, Live, Slow, Told, eventually, held, live
from tests.helpers.tiny import tiny
from tests.helpers.toys import toy_lens

REQUESTS = {
    "encoder": {"text": "the cats sat on the big red mat"},
    "causal": {"text": "the cat sat on a mat"},
    "encoder-decoder": {"text": "the cat sat", "target": "le chat sur un tapis"},
    "vision": {"image": png()},
}


def request(kind: str, **more: object) -> dict[str, object]:
    return {"model": f"tiny-{kind}", **REQUESTS[kind], **more}


def test_models(server: Live) -> None:
    found = {info["name"]: info for info in server.client.get("/api/models").json()}
    assert list(found) == list(lenses())
    for kind in KINDS:
        info = found[f"tiny-{kind}"]
        assert info["kind"] == kind
        assert info["layers"] == 2
        assert info["heads"] == 4
        assert info["scopes"]
    assert found["tiny-encoder"]["max_tokens"] == 40
    assert found["tiny-vision"]["max_tokens"] is None
    assert "XATTN-N" in found["tiny-encoder-decoder"]["scopes"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [False, True])
def test_an_analysis_from_start_to_cells(server: Live, kind: str, heads: bool) -> None:
    status = server.start(**request(kind, heads=heads))
    assert status["state"] == "done", status
    assert status["progress"] == 1
    assert status["error"] is None
    path = f"/api/analyses/{status['id']}"
    described = server.client.get(f"{path}/header").json()
    assert described == status["header"]
    expected = result_of(kind, heads)
    own = document_header(expected)
    for name in ("encoding", "sides"):
        assert described[name] == own[name]
    assert described["model"] == own["model"] | {"name": f"tiny-{kind}"}
    assert described["text"] == (None if kind == "vision" else REQUESTS[kind]["text"])
    assert (described["image"] is None) == (kind != "vision")
    for side, one in sides_of(expected).items():
        for scope in [*one.scopes, *(f"heads/{name}" for name in one.heads)]:
            answer = server.client.get(f"{path}/cells", params={"side": side, "scope": scope, "layer": 1})
            assert answer.headers["content-type"] == "application/octet-stream"
            assert np.allclose(
                np.frombuffer(answer.content, "<f4"),
                np.frombuffer(document_map_bytes(expected, side, scope, 1), "<f4"),
                rtol=1e-5,
            )
            whole = server.client.get(f"{path}/cells", params={"side": side, "scope": scope})
            assert len(whole.content) == 2 * len(answer.content)
            assert whole.content.endswith(answer.content)


def test_a_pair(server: Live) -> None:
    status = server.start(**request("encoder", second="a dog ran"))
    tokens = [row["token"] for row in status["header"]["sides"][0]["rows"]]
    assert tokens.count("[SEP]") == 2
    assert tokens[-2] == "ran"


def test_generation(server: Live) -> None:
    plain = server.start(**request("causal"))
    longer = server.start(**request("causal", generate=3))
    assert len(longer["header"]["sides"][0]["rows"]) > len(plain["header"]["sides"][0]["rows"])
    own = server.start(model="tiny-encoder-decoder", text="the cat sat", generate=4)
    assert [side["side"] for side in own["header"]["sides"]] == ["decoder", "encoder"]


def test_the_same_request_is_the_same_analysis(server: Live) -> None:
    first, again = server.start(**request("encoder")), server.start(**request("encoder"))
    assert first["id"] == again["id"]
    other = server.start(**request("encoder", heads=True))
    assert other["id"] != first["id"]
    assert server.client.get(f"/api/analyses/{first['id']}").json() == {
        "id": first["id"],
        "state": "done",
        "progress": 1.0,
        "error": None,
        "layers": 2,
    }


def test_two_answers_to_one_question() -> None:
    """A finished analysis is not computed again."""
    slow = Slow(0)
    with live(lenses(), run=slow) as server:
        for _ in range(3):
            server.start(**request("encoder"))
        assert slow.begun == 1


@pytest.mark.parametrize("kind", ["encoder", "causal", "vision"])
def test_the_first_layer_before_the_others(kind: str) -> None:
    go = Event()
    with live(lenses(), run=lambda lens, asked, report: run_server_analysis(lens, asked, held(report, go))) as server:
        answer = server.client.post("/api/analyses", params={"wait": WAIT, "first": True}, json=request(kind))
        early = answer.json()
        assert (early["state"], early["progress"]) == ("running", 0.5)
        path = f"/api/analyses/{early['id']}"
        (side,) = early["header"]["sides"]
        assert side["layers"] == [0]
        assert "header" not in server.client.post("/api/analyses", params={"wait": 0}, json=request(kind)).json()
        asked = {"side": side["side"], "scope": side["scopes"][-1]}
        first = server.client.get(f"{path}/cells", params=asked | {"layer": 0}).content
        assert len(first) == 4 * len(side["rows"]) * len(side["columns"])
        for more in ({"layer": 1}, {}):  # not computed yet
            assert server.client.get(f"{path}/cells", params=asked | more).status_code == 409
        assert server.client.get(f"{path}/header").status_code == 409
        go.set()
        server.until(early["id"], "done")
        whole = server.client.get(f"{path}/header").json()
        assert whole["sides"][0]["layers"] == [0, 1]
        for measure in ("completeness", "mixing", "remainder"):
            for scope, layers in side[measure].items():
                assert layers == whole["sides"][0][measure][scope][:1]
        assert server.client.get(f"{path}/cells", params=asked | {"layer": 0}).content == first
        again = server.client.post("/api/analyses", params={"first": True}, json=request(kind)).json()
        assert again["header"] == whole


def test_layers_are_available_as_soon_as_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analyses, "PART_SECONDS", 0)
    lens = Analyzer(tiny("bert", num_hidden_layers=3), toy_lens().tokenizer)
    whole = lens.analyze("the cat")
    go = {done: Event() for done in (2, 3)}

    def run(lens: Analyzer, asked: AnalysisRequest, report: ProgressReport[Shown]) -> Shown:
        def on(done: int, total: int) -> None:
            report(done, total)
            assert done not in go or go[done].wait(20)

        return run_server_analysis(lens, asked, Told(on, report))

    with live({"tiny": lens}, run=run) as server:
        answer = server.client.post(
            "/api/analyses", params={"wait": WAIT, "first": True}, json={"model": "tiny", "text": "the cat"}
        ).json()
        path = f"/api/analyses/{answer['id']}"
        assert (answer["layers"], answer["header"]["sides"][0]["layers"]) == (1, [0])
        go[2].set()
        eventually(lambda: server.status(answer["id"], 1)["layers"] == 2)
        assert server.client.get(f"{path}/header", params={"first": True}).json()["sides"][0]["layers"] == [0, 1]
        cells = server.client.get(f"{path}/cells", params={"side": "encoder", "scope": "ATTN-N", "layer": 1})
        assert cells.content == whole["ATTN-N"][1].float().numpy().tobytes()
        go[3].set()
        assert server.until(answer["id"], "done")["layers"] == 3


def test_the_first_layer_of_a_cancelled_analysis_stays_available() -> None:
    go = Event()
    with live(lenses(), run=lambda lens, asked, report: run_server_analysis(lens, asked, held(report, go))) as server:
        answer = server.client.post("/api/analyses", params={"wait": WAIT, "first": True}, json=request("encoder"))
        path = f"/api/analyses/{answer.json()['id']}"
        assert server.client.delete(path).json()["state"] == "cancelled"
        go.set()
        asked = {"side": "encoder", "scope": "ATTN-W", "layer": 0}
        assert server.client.get(f"{path}/cells", params=asked).status_code == 200
        assert server.client.get(f"{path}/cells", params=asked | {"layer": 1}).status_code == 409


def test_an_encoder_decoder_is_shown_whole(server: Live) -> None:
    answer = server.client.post(
        "/api/analyses", params={"wait": WAIT, "first": True}, json=request("encoder-decoder", generate=None)
    )
    assert answer.json()["state"] == "done"


def test_an_input_that_the_model_refuses(server: Live) -> None:
    status = server.start(model="tiny-encoder", text="the cat " * 40)
    assert status["state"] == "failed"
    assert "82 tokens, but the model has positions for 40. Shorten it." in status["error"]
    assert "truncation" not in status["error"]
    assert "header" not in status
    answer = server.client.get(f"/api/analyses/{status['id']}/header")
    assert answer.status_code == 409
    assert "82 tokens" in answer.json()["error"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "tiny-encoder"}, "The text is empty"),
        ({"model": "tiny-encoder", "text": "  \n "}, "The text is empty"),
        ({"model": "tiny-encoder", "text": "a", "target": "b"}, "takes no target"),
        ({"model": "tiny-encoder", "text": "a", "image": "b"}, "takes no picture"),
        ({"model": "tiny-encoder", "text": "a", "generate": 3}, "takes no number of tokens to generate"),
        ({"model": "tiny-encoder", "text": "a", "generate": 0}, "generate"),
        ({"model": "tiny-encoder", "text": "a", "generate": 10**9}, "generate"),
        ({"model": "tiny-encoder-decoder", "text": "a", "second": "b"}, "takes no second text"),
        ({"model": "tiny-encoder-decoder", "text": "a", "target": "b", "generate": 3}, "either a target or"),
        ({"model": "tiny-vision"}, "is a vision model"),
        ({"model": "tiny-vision", "text": "a", "image": "b"}, "takes no text"),
        ({"model": "../../etc/passwd", "text": "a"}, "No model '../../etc/passwd' is served"),
        ({"model": "bert-base-uncased", "text": "a"}, "Served: tiny-encoder, tiny-causal"),
        ({"model": "tiny-encoder", "text": "a" * 20_001}, "text: String should have at most 20000 characters"),
        ({"model": "tiny-encoder", "text": 5}, "text: "),
        ({"model": "tiny-encoder", "text": "a", "depth": 3}, "depth: Extra inputs are not permitted"),
        ({"text": "a"}, "model: Field required"),
        ([1, 2], "body: "),
    ],
)
def test_requests_that_make_no_sense(server: Live, given: object, message: str) -> None:
    answer = server.client.post("/api/analyses", json=given)
    assert answer.status_code == 422
    assert list(answer.json()) == ["error"]
    assert message in answer.json()["error"]


@pytest.mark.parametrize("wrong", ["?wait=-1", "?wait=61", "?wait=soon", "?wait=nan"])
def test_waits_that_are_too_long(server: Live, wrong: str) -> None:
    for answer in (
        server.client.post(f"/api/analyses{wrong}", json=request("encoder")),
        server.client.get(f"/api/analyses/{'0' * 32}{wrong}"),
    ):
        assert answer.status_code == 422
        assert "wait" in answer.json()["error"]


@pytest.mark.parametrize("picture", ["no base64!", "aGVsbG8=", png()[:200]])
def test_pictures_that_cannot_be_read(server: Live, picture: str) -> None:
    status = server.start(model="tiny-vision", image=picture)
    assert status["state"] == "failed"
    assert "picture" in status["error"]


def test_unknown_ids(server: Live) -> None:
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/header"),
        ("GET", "/cells?side=encoder&scope=ATTN-N"),
    ):
        answer = server.client.request(method, f"/api/analyses/{'0' * 32}{path}")
        assert answer.status_code == 404
        assert "Request it again" in answer.json()["error"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("side=nowhere&scope=ATTN-N", "Unknown side 'nowhere'"),
        ("side=encoder&scope=NONE", "No scope 'NONE'"),
        ("side=encoder&scope=heads/ATTN-W", "no head-level maps"),
        ("side=encoder&scope=ATTN-N&layer=7", "Layer 7"),
        ("side=encoder&scope=ATTN-N&layer=-1", "layer"),
        ("side=encoder&scope=ATTN-N&layer=x", "layer"),
        ("side=encoder", "scope: Field required"),
    ],
)
def test_missing_cells_are_refused(server: Live, query: str, message: str) -> None:
    status = server.start(**request("encoder"))
    answer = server.client.get(f"/api/analyses/{status['id']}/cells?{query}")
    assert answer.status_code == 422
    assert message in answer.json()["error"]


def test_the_api_describes_itself(server: Live) -> None:
    described = server.client.get("/api/openapi.json").json()
    assert set(described["paths"]) == {
        "/api/models",
        "/api/analyses",
        "/api/analyses/{id}",
        "/api/analyses/{id}/header",
        "/api/analyses/{id}/cells",
        "/api/explanations",
        "/api/explanations/{id}",
    }
    assert "HTTPValidationError" not in str(described)
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert server.client.get(path).status_code == 404


def test_progress_is_sent_while_it_changes() -> None:
    slow = Slow(5)
    with live(lenses(), run=slow) as server, ThreadPoolExecutor(1) as pool:
        waits = server.waits()
        status = server.client.post("/api/analyses", json=request("encoder")).json()
        assert status["state"] == "running"
        assert status["progress"] == 0
        path = f"/api/analyses/{status['id']}"
        assert server.client.get(f"{path}/header").status_code == 409
        assert server.client.get(f"{path}/cells?side=encoder&scope=ATTN-N").status_code == 409
        for step in range(1, 5):
            told = pool.submit(server.status, status["id"], wait=WAIT)
            assert waits.acquire(timeout=PATIENCE)  # the server has the question, and no news yet
            slow.let_go(1)
            assert told.result(PATIENCE)["progress"] == step / 6
        slow.let_go()
        assert server.until(status["id"], "done")["progress"] == 1


def test_a_short_wait_ends_with_what_is_known(slow: Slow) -> None:
    with live(lenses(), run=slow) as server:
        answer = server.client.post("/api/analyses?wait=0.1", json=request("encoder"))
        assert answer.status_code == 201
        assert answer.json()["state"] == "running"
        assert server.status(answer.json()["id"], 0.05)["state"] == "running"
        slow.let_go()


def test_an_accident_inside_an_analysis_is_not_spread() -> None:
    """The message may contain paths and secrets: the client only learns that the analysis failed."""

    def broken(*_: object) -> object:
        raise RuntimeError("/home/someone/secret")

    with live(lenses(), run=broken) as server:
        status = server.start(**request("encoder"))
        assert status["state"] == "failed"
        assert "secret" not in status["error"]
        assert server.start(**request("encoder"))["state"] == "failed"  # and is tried again


def test_nasty_texts_are_answered_as_they_are(server: Live) -> None:
    text = "</script><img src=x onerror=alert(1)>\u202e\u2028 \x00 & the"
    status = server.start(model="tiny-encoder", text=text)
    assert status["state"] == "done"
    assert status["header"]["text"] == text


def test_names_of_models() -> None:
    from normscope import Analyzer
    from normscope.view.server.analyses import models_by_name
    from tests.helpers.tiny import tiny

    first, second = toy_lens(), Analyzer(tiny("bert"), toy_lens().tokenizer)
    second.loaded.name = first.model_name
    assert list(models_by_name([first, second])) == [first.model_name, f"{first.model_name} (2)"]


def test_header_is_ascii(server: Live) -> None:
    status = server.start(**request("encoder"))
    answer = server.client.get(f"/api/analyses/{status['id']}/header")
    assert answer.content.isascii()
    assert document_header_to_json(answer.json()) == answer.text
