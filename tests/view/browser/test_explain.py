"""Explain in the viewer: from a prompt to the probabilities, the answer, and what each word rests on."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from normscope.explain.result import Explanation
from tests.helpers.kinds import lenses
from tests.helpers.live import Live, live
from tests.helpers.tabs import Tab, open_tab

TEXT = "the cat sat on"
SOURCE = "the cat sat"
HACK = "<img src=x onerror='window.hacked=1'></script><script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    names = {"encoder": "tiny-encoder", "writer": "tiny-causal", "translator": "tiny-encoder-decoder"}
    with live({name: lenses()[long] for name, long in names.items()}) as found:
        yield found


def start(tab: Tab, server: Live, model: str = "writer", text: str = TEXT, generate: int = 3) -> None:
    tab.page.goto(f"{server.address}/#model={model}&text={text}&explain={generate}")
    expect(tab.part("explain")).to_be_visible()


def value_of(text: str) -> float:
    return float(text.replace("\u2212", "-").replace("+", ""))


def first_explanation() -> Explanation:
    return lenses()["tiny-causal"].explain(TEXT, generate=3, alternatives=10)


def test_the_numbers_are_those_of_the_library(browser: Browser, server: Live) -> None:
    told = first_explanation()
    with open_tab(browser) as tab:
        start(tab, server)
        for row, token in enumerate(told.tokens):
            tab.button(re.compile(f"^Answer token {row + 1}: ")).click()
            expect(tab.part("insight")).to_contain_text(token.lstrip("\u2581\u0120"))
            shown = value_of(tab.part("explained-value").inner_text())
            assert shown == pytest.approx(float(told.values[row]), rel=1e-3)
            order = sorted(range(len(told.columns)), key=lambda k: -abs(float(told.scores[row, k])))
            first = tab.part("sources").get_by_role("listitem").first.locator(".number").inner_text()
            assert value_of(first) == pytest.approx(float(told.scores[row, order[0]]), rel=1e-2)
            listed = tab.part("probabilities").get_by_role("button")
            assert listed.count() == 10
        assert tab.errors == []


def test_another_word_is_explained_against_the_written_one(browser: Browser, server: Live) -> None:
    told = first_explanation()
    lens = lenses()["tiny-causal"]
    other = told.alternatives[0][4].token
    ids = lens.loaded.tokenizer.get_vocab()
    flow = lens.flow(TEXT, target=(ids[other], ids[told.tokens[0]]), position=-1)
    assert flow.to is not None
    with open_tab(browser) as tab:
        start(tab, server)
        tab.part("probabilities").get_by_role("button").nth(4).click()
        expect(tab.button(re.compile("^Back to"))).to_be_visible()
        shown = value_of(tab.part("explained-value").inner_text())
        assert shown == pytest.approx(flow.to.value, rel=1e-3)
        tab.button(re.compile("^Back to")).click()
        expect(tab.button(re.compile("^Back to"))).to_have_count(0)
        assert value_of(tab.part("explained-value").inner_text()) == pytest.approx(float(told.values[0]), rel=1e-3)


def test_scores_are_added_up(browser: Browser, server: Live) -> None:
    told = first_explanation()
    with open_tab(browser) as tab:
        start(tab, server)
        for grain in ("word", "sentence", "line", "token"):
            tab.page.get_by_role("group", name="Added up by").get_by_role("button", name=grain, exact=True).click()
            groups = told.grouped(inputs=grain)
            expected = [score for score in groups.scores[0].tolist() if score != 0]
            expect(tab.part("sources").get_by_role("listitem")).to_have_count(min(12, len(expected)))
        tab.button("Whole answer").click()
        assert value_of(tab.part("explained-value").inner_text()) == pytest.approx(told.value, rel=1e-3)


def test_from_the_form_and_back_to_the_maps(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        tab.page.goto(f"{server.address}/#model=writer&text={TEXT}")
        tab.wait_for_map()
        tab.page.get_by_label("Tokens to generate").fill("2")
        tab.button("Explain").click()
        expect(tab.button(re.compile("^Answer token 2"))).to_be_visible()
        expect(tab.page).to_have_url(re.compile("explain=2"))
        tab.page.reload()
        expect(tab.button(re.compile("^Answer token 2"))).to_be_visible()
        tab.button("Analyse").click()
        tab.wait_for_map()
        expect(tab.part("explain")).to_have_count(0)
        tab.button("Explain").click()
        tab.button("Back to the maps").click()
        expect(tab.part("map")).to_be_visible()
        tab.select("Model").select_option("encoder")
        expect(tab.button("Explain")).to_have_count(0)


def test_a_translation(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        start(tab, server, "translator", SOURCE, 4)
        tab.button(re.compile("^Answer token 1: ")).click()
        expect(tab.part("explain")).to_contain_text("After the rule: what it had written so far")


def test_nasty_texts_are_shown_and_never_executed(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        tab.page.goto(server.address)
        tab.select("Model").select_option("writer")
        tab.box("Text").fill(f"{HACK} \u202e the cat")
        tab.button("Explain").click()
        expect(tab.part("explain")).to_be_visible()
        assert tab.page.evaluate("window.hacked") is None
        assert tab.page.evaluate("document.querySelectorAll('#normscope img, #normscope script').length") == 0


@pytest.mark.parametrize("size", ["phone", "wide"])
def test_no_problem_at_all_for_people_with_disabilities(browser: Browser, server: Live, size: str) -> None:
    with open_tab(browser, size, bypass_csp=True) as tab:
        start(tab, server)
        assert tab.violations() == []
        overflow = tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0
