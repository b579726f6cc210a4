"""The part of a document about a target, and the files that contain it."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normscope import NormscopeError
from normscope.view.document import document_header, document_header_to_json, pack_document
from tests.helpers.fakes import NASTY, fake, fake_flow, fake_translation
from tests.helpers.kinds import LENSES, flow_of, result_of

SCORES = {
    *("method", "target", "position", "value", "remainder", "completeness", "columns", "scores", "layers"),
    "remainders",
}


@pytest.mark.parametrize("kind", ["causal", "encoder-decoder"])
def test_a_flow_in_the_header(kind: str) -> None:
    result, flow = result_of(kind), flow_of(kind)
    assert document_header(result)["flow"] is None
    described = json.loads(document_header_to_json(document_header(result, flow=flow)))
    found = described["flow"]
    assert set(found) == SCORES
    assert found["method"] == "exact"
    assert found["target"].startswith("logit of ")
    assert "position" not in found["target"]
    assert found["position"] == len(flow.rows) - 1
    assert sum(found["scores"]) + found["remainder"] == pytest.approx(found["value"], rel=1e-5)
    assert found["completeness"] < 1e-5
    assert found["columns"] == described["sides"][0]["columns"]  # the same tokens, in the same form
    for side, by_token in found["layers"].items():
        assert len(by_token) == len(found["remainders"][side]) == 3  # before both layers, and after the last
        own = [label for label in found["columns"] if label["side"] == side]
        assert all(len(row) == len(own) for row in by_token)
    assert set(found["layers"]) == {label["side"] for label in found["columns"]}
    packed_header, _ = pack_document(result, flow=flow)
    assert packed_header["flow"] == found


def test_a_method_without_a_remainder() -> None:
    """Its scores are not a decomposition: missing values are null."""
    found = document_header(result_of("causal"), flow=flow_of("causal", method="rollout"))["flow"]
    assert found["remainder"] is None
    assert found["completeness"] is None
    assert found["layers"] == found["remainders"] == {}
    assert all(math.isfinite(score) for score in found["scores"])


def test_a_difference_and_a_position() -> None:
    found = document_header(result_of("causal"), flow=flow_of("causal", target=("cat", "dog"), position=2))["flow"]
    assert found["target"] == "logit of 'cat' minus 'dog'"
    assert found["position"] == 2


def test_a_flow_without_a_target_is_refused() -> None:
    with pytest.raises(NormscopeError, match="shows flows to a target"):
        document_header(result_of("causal"), flow=flow_of("causal", target=None))


def test_a_flow_of_another_input_is_refused() -> None:
    other = LENSES["causal"]().flow("the dog ran", target="top")
    with pytest.raises(NormscopeError, match="different inputs: their decoder tokens differ"):
        document_header(result_of("causal"), flow=other)


def test_one_side_of_an_encoder_decoder_is_enough() -> None:
    both = result_of("encoder-decoder")
    flow = flow_of("encoder-decoder")
    for one in (replace(both, encoder=None), replace(both, decoder=None)):  # type: ignore[type-var]
        assert document_header(one, flow=flow)["flow"]["scores"]


def embedded(page: str) -> dict[str, Any]:
    found = re.search('id="normscope-header">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    parsed: dict[str, Any] = json.loads(found[1])
    return parsed


def test_pages_carry_a_flow(tmp_path: Path) -> None:
    analysis = fake()
    flow = fake_flow(analysis)
    page = analysis.to_html(tmp_path / "a.html", flow=flow).read_text()
    assert embedded(page)["flow"]["value"] == pytest.approx(flow.value)
    assert "Scores of the tokens for the <bdi>logit of &#x27;x&#x27;</bdi>" in page  # also without scripts
    assert embedded(analysis.to_html(tmp_path / "c.html").read_text())["flow"] is None
    two = fake_translation()
    path = two.to_html(tmp_path / "d.html", flow=fake_flow(two.decoder))
    assert len(embedded(path.read_text())["flow"]["scores"]) == 5


def test_targets_and_tokens_that_look_like_tags(tmp_path: Path) -> None:
    analysis = fake(NASTY)
    hack = "</script><script>alert(1)</script>\u202e\u2028"
    page = analysis.to_html(tmp_path / "x.html", flow=fake_flow(analysis, f"logit of {hack}")).read_text()
    assert "alert(1)</script>" not in page
    target = embedded(page)["flow"]["target"]
    assert target == "logit of </script><script>alert(1)</script>\\u202e\\u2028"


def test_a_widget_carries_a_flow() -> None:
    pytest.importorskip("anywidget")
    from normscope.view.widget import widget

    analysis = fake()
    assert widget(analysis, fake_flow(analysis)).header["flow"]["method"] == "exact"
    assert widget(analysis).header["flow"] is None
