"""Targets and paths: scores of the tokens for a logit, and the path of a token through all layers."""

import contextlib
import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, expect

from normscope import Analyzer, NormscopeError, default_model
from tests.helpers.fakes import NASTY, fake, fake_flow, fake_picture
from tests.helpers.kinds import flow_of, lenses, result_of
from tests.helpers.live import Live, live
from tests.helpers.tabs import SCHEMES, SIZES, Tab, open_tab
from tests.helpers.tiny import tiny
from tests.helpers.toys import picture, toy_tokenizer

DEFAULT = "all-MiniLM-L6-v2"
TEXTS = {"tiny-causal": "the cat sat on a mat", DEFAULT: "Colin Fleming played the highway tiny soap opera."}
HACK = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    models = {name: lenses()[name] for name in ("tiny-causal", "tiny-encoder-decoder", "tiny-vision")}
    classifier = tiny("bert", "SequenceClassification", id2label={0: "bad", 1: HACK})
    models["classifier"] = Analyzer(classifier, toy_tokenizer())
    with contextlib.suppress(NormscopeError):
        models[DEFAULT] = Analyzer.from_pretrained(default_model.find())
    with live(models) as found:
        yield found


def visit(tab: Tab, server: Live, model: str, fragment: str = "") -> None:
    if model not in [info["name"] for info in server.client.get("/api/models").json()]:
        pytest.skip("the default model is not installed")
    tab.page.goto(f"{server.address}/{fragment}")
    expect(tab.part("input")).to_be_visible()
    tab.select("Model").select_option(model)


def overflow(tab: Tab) -> int:
    found: int = tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"[-+]?\d+(?:\.\d+)?(?:e-?\d+)?", text.replace("\u2212", "-"))]


@pytest.mark.parametrize("size", ["phone", "wide"])
def test_scores_for_a_target(browser: Browser, server: Live, size: str) -> None:
    with open_tab(browser, size) as tab:
        visit(tab, server, "tiny-causal")
        tab.page.get_by_label("Target", exact=True).check()
        tab.box("Target token").fill("cat")
        tab.box("instead of").fill("dog")
        tab.analyse(TEXTS["tiny-causal"])
        scores = tab.part("scores")
        expect(scores).to_contain_text("logit of 'cat' minus 'dog'")
        expect(scores).to_contain_text("Completeness")
        flow = lenses()["tiny-causal"].flow(TEXTS["tiny-causal"], target=("cat", "dog"))
        text = scores.locator(".sum").inner_text()
        assert numbers(text) == pytest.approx([float(flow.scores.sum()), flow.remainder, flow.value], abs=2e-3)
        token = scores.get_by_role("button", name=re.compile("^Token 3: cat, score "))
        token.hover()
        number = token.locator(".number")
        expect(number).to_be_visible()
        assert numbers(number.get_attribute("data-score") or "") == pytest.approx([float(flow.scores[2])], rel=1e-2)
        scores.get_by_text("Scores of the tokens").click()
        expect(tab.part("score-table").get_by_role("row")).to_have_count(len(flow.scores) + 1)
        assert overflow(tab) <= 0
        expect(tab.page).to_have_url(re.compile("logit=cat&instead=dog"))
        tab.page.reload()  # all of it is in the address
        expect(tab.part("scores")).to_contain_text("logit of 'cat' minus 'dog'")
        expect(tab.box("Target token")).to_have_value("cat")
        tab.page.get_by_label("Target", exact=True).uncheck()
        tab.button("Analyse").click()
        expect(tab.part("scores")).to_have_count(0)


def test_an_empty_target_is_the_largest_logit(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        visit(tab, server, "tiny-causal")
        tab.page.get_by_label("Target", exact=True).check()
        tab.page.get_by_label("at token").fill("2")
        tab.analyse(TEXTS["tiny-causal"])
        expect(tab.part("scores")).to_contain_text("token 2")
        expect(tab.page).to_have_url(re.compile("logit=top&at=2"))


def test_classes_are_chosen_from_a_list(browser: Browser, server: Live) -> None:
    """Also a class whose name looks like a tag."""
    with open_tab(browser) as tab:
        visit(tab, server, "classifier")
        tab.page.get_by_label("Target", exact=True).check()
        expect(tab.page.get_by_label("at token")).to_have_count(0)
        tab.select("Class").select_option(HACK)
        tab.analyse("the cat sat")
        expect(tab.part("scores")).to_contain_text("window.hacked=1")
        assert tab.page.evaluate("window.hacked") is None


@pytest.mark.parametrize("model", [DEFAULT, "tiny-vision"])
def test_no_target_without_a_head(browser: Browser, server: Live, model: str) -> None:
    with open_tab(browser) as tab:
        visit(tab, server, model)
        expect(tab.page.get_by_label("Target", exact=True)).to_have_count(0)


def test_an_encoder_decoder_has_scores_of_both_sides(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        visit(tab, server, "tiny-encoder-decoder")
        tab.box("Target text").fill("le chat sur un tapis")
        tab.page.get_by_label("Target", exact=True).check()
        tab.analyse("the cat sat")
        tokens = tab.part("scores").get_by_role("button", name=re.compile("^Token "))
        expect(tokens).to_have_count(10)
        expect(tab.part("scores").get_by_role("button", name=re.compile(r"^Token 2: cat \(encoder\)"))).to_be_visible()
        tab.page.keyboard.press("p")
        expect(tab.part("path")).to_be_visible()
        expect(tab.page.locator("main")).to_contain_text("from the encoder")


def test_a_bad_target_is_reported_and_harmless(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        visit(tab, server, "tiny-causal")
        tab.analyse("the cat")
        tab.page.get_by_label("Target", exact=True).check()
        tab.box("Target token").fill(HACK)
        tab.button("Analyse").click()
        expect(tab.page.get_by_role("alert")).to_contain_text("is not in the vocabulary")
        expect(tab.page.get_by_role("alert")).to_contain_text("</script>")
        assert tab.page.evaluate("window.hacked") is None
        tab.box("Target token").fill("mat")
        tab.page.get_by_label("at token").fill("99")
        tab.button("Analyse").click()
        expect(tab.page.get_by_role("alert")).to_contain_text("There is no token 99: valid are 1 to 3")
        tab.page.get_by_label("at token").fill("")
        tab.button("Analyse").click()
        expect(tab.part("scores")).to_contain_text("logit of 'mat'")
        expect(tab.page.get_by_role("alert")).to_have_count(0)


def edges_of(lens: Analyzer, text: str, row: int, least: float) -> set[tuple[int, int, int]]:
    """(layer, from, to) by the definition."""
    result = lens.analyze(text, scopes=["layer"])
    maps = result["layer"].double().numpy()
    shares = maps / maps.sum(-1, keepdims=True)
    after = np.eye(len(shares[0]))[row]
    found = set()
    for layer in reversed(range(len(shares))):
        edges = after[:, None] * shares[layer]
        found |= {(layer + 1, int(j) + 1, int(i) + 1) for i, j in zip(*np.nonzero(edges >= least), strict=True)}
        after = edges.sum(0)
    return found


@pytest.mark.parametrize(
    ("model", "size"),
    [("tiny-causal", "wide"), (DEFAULT, "phone"), pytest.param("tiny-causal", "phone", marks=pytest.mark.slow)],
)
def test_a_path(browser: Browser, server: Live, model: str, size: str) -> None:
    with open_tab(browser, size) as tab:
        visit(tab, server, model)
        tab.analyse(TEXTS[model])
        tab.button("Path").click()
        expect(tab.part("path")).to_be_visible()
        expect(tab.part("map")).to_have_count(0)
        rows = len(server.start(model=model, text=TEXTS[model])["header"]["sides"][0]["rows"])
        output = rows - 1 if model == "tiny-causal" else 0

        slider = tab.page.get_by_role("slider", name="Show edges above")
        slider.focus()
        tab.page.keyboard.press("Home")
        tab.until(lambda now: now["least"] == 0.001)
        for _ in range(7):
            tab.page.keyboard.press("ArrowRight")
        least = tab.until(lambda now: now["least"] == 0.02)["least"]
        lens = lenses()[model] if model == "tiny-causal" else Analyzer.from_pretrained(default_model.find())
        expected = edges_of(lens, TEXTS[model], output, least)
        expect(tab.part("path").locator(".edges path")).to_have_count(len(expected))
        expect(tab.part("path-count")).to_contain_text(f"{len(expected)} edge")
        expect(tab.page).to_have_url(re.compile("path=1&edges=2"))

        tab.button("Export").click()
        with tab.page.expect_download() as waiting:
            tab.page.get_by_role("menuitem", name="CSV").click()
        lines = list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text(encoding="utf-8"))))
        saved = {(int(x["layer"]), int(x["input_position"]), int(x["output_position"])) for x in lines}
        assert saved == expected

        token = tab.part("arcs").locator("..").get_by_role("button", name=re.compile("^Token 2: "))
        token.click()
        expect(tab.part("path")).to_have_attribute("aria-label", re.compile("Path of (the|colin)"))
        expect(tab.part("inspector")).to_contain_text("Comes from, through all layers")
        assert overflow(tab) <= 0
        expect(tab.page).to_have_url(re.compile("token=\\w+(:|%3A)2"))  # the address follows a moment later
        address = tab.page.url
        tab.page.goto("about:blank")
        tab.page.goto(address)
        expect(tab.part("path")).to_have_attribute("aria-label", re.compile("Path of (the|colin)"))
        tab.page.keyboard.press("p")
        tab.wait_for_map()


def test_a_path_by_keys_and_pointer(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        visit(tab, server, "tiny-causal")
        tab.analyse(TEXTS["tiny-causal"])
        tab.page.keyboard.press("p")
        path = tab.part("path")
        expect(path).to_be_visible()
        path.focus()
        tab.page.keyboard.press("Shift+ArrowUp")  # the output itself
        expect(tab.part("status")).to_have_text(re.compile("^mat after layer 2: 100"))
        tab.page.keyboard.press("Shift+ArrowUp")
        tab.page.keyboard.press("Shift+ArrowLeft")
        expect(tab.part("status")).to_have_text(re.compile("^a after layer 1: "))
        expect(tab.part("path-tip")).to_contain_text("after layer 1")
        tab.page.keyboard.press("Enter")
        tab.until(lambda now: now["token"] == "decoder:5")
        tab.page.keyboard.press("Escape")
        tab.until(lambda now: now["token"] is None)
        edge = path.locator(".hits path").last
        edge.hover(force=True)
        expect(tab.part("path-tip")).to_contain_text("of the output")
        tab.page.keyboard.press("?")
        expect(tab.page.get_by_role("dialog")).to_contain_text("path of a token through all layers")
        tab.page.keyboard.press("Escape")
        tab.page.keyboard.press("ArrowRight")  # a scope: back to the maps
        tab.until(lambda now: not now["path"])
        tab.wait_for_map()


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_picture_of_a_path(browser: Browser, tmp_path: Path, kind: str) -> None:
    analysis = fake((HACK, *NASTY))
    with open_tab(browser) as tab:
        tab.page.goto(f"{analysis.to_html(tmp_path / 'x.html', flow=fake_flow(analysis, HACK)).as_uri()}#path=1")
        expect(tab.part("path")).to_be_visible()
        tab.button("Export").click()
        with tab.page.expect_download() as waiting:
            tab.page.get_by_role("menuitem", name=kind.upper()).click()
        data = Path(waiting.value.path()).read_bytes()
        assert data.startswith(b"\x89PNG" if kind == "png" else b"<svg")
        assert b"<script" not in data
        assert tab.page.evaluate("window.hacked") is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["causal", "encoder-decoder"])
def test_files_with_a_flow(browser: Browser, tmp_path: Path, kind: str, size: str) -> None:
    result: Any = result_of(kind)
    path = result.to_html(tmp_path / "x.html", flow=flow_of(kind))
    with open_tab(browser, size) as tab:
        tab.page.context.set_offline(True)
        tab.page.goto(path.as_uri())
        tab.wait_for_map()
        expect(tab.part("scores")).to_be_visible()
        tab.page.keyboard.press("p")
        expect(tab.part("path").locator(".edges path")).not_to_have_count(0)
        for band in ("encoder", "cross", "decoder") if kind == "encoder-decoder" else ():
            tab.page.get_by_role("group", name="Side").get_by_role("button", name=band).click()
            tab.until(lambda now, band=band: now["band"] == band and now["path"])  # type: ignore[misc]
            expect(tab.part("path").locator(".edges path")).not_to_have_count(0)
        assert overflow(tab) <= 0


@pytest.mark.parametrize("size", ["phone", "laptop"])
def test_scores_over_a_picture(browser: Browser, tmp_path: Path, size: str) -> None:
    result: Any = result_of("vision")
    path = result.to_html(tmp_path / "x.html", image=picture(), flow=fake_flow(result))
    with open_tab(browser, size) as tab:
        tab.page.goto(path.as_uri())
        drawn = tab.part("scores").get_by_role("img", name="Scores of 9 patches")
        expect(drawn).to_be_visible()
        expect(drawn.locator("image")).to_have_attribute("href", re.compile("^data:image/"))
        expect(drawn.locator("title")).to_have_count(9)
        assert len({rect.get_attribute("style") for rect in drawn.locator("rect:has(title)").all()}) > 3
        expect(tab.part("scores")).to_contain_text("[CLS]")
        assert overflow(tab) <= 0


def test_many_tokens(browser: Browser, tmp_path: Path) -> None:
    """More than can be read: tokens that carry nothing are left out, and bars share one line."""
    tokens = [f"token{k}" for k in range(180)]
    analysis = fake(tokens, layers=(0, 1, 2), scopes=("ATTN-N", "ATTNRESLNFFRESLN-N"))
    with open_tab(browser) as tab:
        tab.page.goto(f"{analysis.to_html(tmp_path / 'x.html', flow=fake_flow(analysis)).as_uri()}#path=1")
        expect(tab.page.locator("main")).to_contain_text("carry no such edge are left out")
        assert tab.part("path").locator(".nodes circle").count() < 4 * len(tokens)
        expect(tab.part("scores").get_by_role("img", name=re.compile("180 tokens"))).to_be_visible()
        tab.page.get_by_role("slider").focus()
        tab.page.keyboard.press("Home")
        expect(tab.part("path-count")).to_contain_text("edges")
        assert overflow(tab) <= 0


def test_documents_without_a_path(browser: Browser, tmp_path: Path) -> None:
    with open_tab(browser) as tab:
        tab.page.goto(f"{fake_picture().to_html(tmp_path / 'a.html').as_uri()}#path=1")
        tab.wait_until_drawn()
        expect(tab.button("Path")).to_have_count(0)
        tab.page.goto(f"{fake(layers=(0, 3)).to_html(tmp_path / 'b.html').as_uri()}#path=1")
        tab.wait_for_map()
        expect(tab.button("Path")).to_be_disabled()
        tab.page.keyboard.press("p")
        assert tab.state["path"] is False


@pytest.mark.parametrize(("size", "scheme"), SCHEMES)
def test_no_serious_problem_for_people_with_disabilities(
    browser: Browser, server: Live, size: str, scheme: str
) -> None:
    with open_tab(browser, size, color_scheme=scheme, bypass_csp=True) as tab:
        visit(tab, server, "tiny-encoder-decoder")
        tab.page.get_by_label("Target", exact=True).check()
        tab.box("Target text").fill("le chat sur un tapis")
        tab.analyse("the cat sat")
        tab.part("scores").get_by_text("Scores of the tokens").click()
        assert tab.serious() == []
        tab.part("scores").get_by_role("button", name=re.compile("^Token 2: ")).first.click()
        tab.page.keyboard.press("p")
        expect(tab.part("path")).to_be_visible()
        assert tab.serious() == []
