"""The first thirty seconds: a finished example, one sentence with computed numbers, everything in one window."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Route, expect

from normscope import Analyzer, NormscopeError, default_model
from tests.helpers.kinds import lenses
from tests.helpers.live import Live, live
from tests.helpers.tabs import Tab, open_tab

EXAMPLE = "Colin Fleming played the highway tiny soap opera."
STOPS = 8  # tab stops to the map


@pytest.fixture(scope="module")
def lens() -> Analyzer:
    try:
        return Analyzer.from_pretrained(default_model.find())
    except NormscopeError:
        pytest.skip("the default model is not installed")


@pytest.fixture(scope="module")
def server(lens: Analyzer) -> Iterator[Live]:
    with live({"MiniLM": lens, "tiny-causal": lenses()["tiny-causal"]}) as found:
        yield found


def opened(tab: Tab, server: Live, fragment: str = "") -> None:
    tab.page.goto(f"{server.address}/{fragment}")
    tab.wait_for_map()
    tab.until(lambda now: not now["busy"])


def test_the_sentence_has_the_numbers_of_the_library(browser: Browser, server: Live, lens: Analyzer) -> None:
    result = lens.analyze(EXAMPLE)
    tokens = [label.token for label in result.rows]
    norms, weights = (result[scope][0] / result[scope][0].sum(-1, keepdim=True) for scope in ("ATTN-N", "ATTN-W"))
    inner = norms[1:-1, 1:-1].clone().fill_diagonal_(0)
    row, column = divmod(int(inner.argmax()), len(inner))
    share, weight = (100 * float(one[row + 1, column + 1]) for one in (norms, weights))
    with open_tab(browser) as tab:
        opened(tab, server)
        expect(tab.part("insight")).to_have_text(
            f"{tokens[column + 1]} gives {tokens[row + 1]} {share:.0f} % of its attention output, "
            f"but only {weight:.0f} % of its weight."
        )
        tab.page.keyboard.press("d")
        expect(tab.part("insight")).to_contain_text("From attention to + residual")
        tab.page.keyboard.press("d")
        tab.page.keyboard.press("p")
        expect(tab.part("insight")).to_contain_text("Traced back through all layers")


@pytest.mark.parametrize("fragment", ["", "#layer=3&scope=ATTNRESLNFF-N"])
def test_sentence_components_and_map_are_seen_without_scrolling(browser: Browser, server: Live, fragment: str) -> None:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    tab = Tab(context)
    opened(tab, server, f"#text={EXAMPLE}&{fragment[1:]}" if fragment else "")
    bottom = 0.0
    for part in ("insight", "arcs", "components", "map"):
        box = tab.part(part).bounding_box()
        assert box is not None
        assert box["y"] >= bottom - 1, part  # in this order
        bottom = box["y"] + box["height"]
        assert bottom <= 900, part
    controls = tab.page.get_by_role("group", name="Map", exact=True)
    assert controls.evaluate("one => one.getBoundingClientRect().height") < 40  # one row
    assert tab.page.evaluate("scrollY") == 0
    context.close()


@pytest.mark.parametrize("model", ["MiniLM", "tiny-causal"])
def test_few_tab_stops_lead_to_the_map(browser: Browser, server: Live, model: str) -> None:
    with open_tab(browser) as tab:
        opened(tab, server, f"#model={model}&text=the cat sat")
        tab.page.evaluate("document.activeElement.blur()")
        names = []
        while len(names) < 30 and (not names or names[-1] != "map"):
            tab.page.keyboard.press("Tab")
            names.append(tab.page.evaluate("document.activeElement.dataset.testid || document.activeElement.innerText"))
        assert names[-1] == "map"
        assert len(names) <= STOPS, names
        tab.page.evaluate("document.activeElement.blur()")
        tab.page.keyboard.press("Shift+Tab")  # from the start of the page
        tab.page.evaluate("document.activeElement.blur()")
        skip = tab.button("Skip to the map")
        skip.focus()
        expect(skip).to_be_in_viewport()
        tab.page.keyboard.press("Enter")
        expect(tab.part("map")).to_be_focused()


@pytest.mark.parametrize("size", ["phone", "laptop"])
def test_no_problem_at_all_for_people_with_disabilities(browser: Browser, server: Live, size: str) -> None:
    """Every rule of axe for WCAG 2.2 A and AA, the size of targets included."""
    with open_tab(browser, size, bypass_csp=True) as tab:
        opened(tab, server)
        assert tab.violations() == []
        tab.click(3, 2)
        tab.button("Display").click()
        assert tab.violations() == []
        tab.page.keyboard.press("Escape")
        tab.page.keyboard.press("p")
        expect(tab.part("path-count")).to_be_visible()
        assert tab.violations() == []


def test_raw_values_are_one_key_away(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        opened(tab, server)
        assert tab.state["norm"] == "row"
        expect(tab.part("legend")).to_contain_text("share of the row")
        tab.page.keyboard.press("n")
        tab.until(lambda now: now["norm"] == "raw")
        expect(tab.part("legend")).not_to_contain_text("share of the row")


def test_a_choice_made_while_the_example_runs_is_kept(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        held: list[Route] = []
        tab.page.route("**/api/analyses?*", lambda route: held.append(route))
        tab.page.goto(server.address)
        tab.wait(lambda: held)
        tab.select("Model").select_option("tiny-causal")
        tab.box("Text").fill("the mat")
        held[0].continue_()
        tab.wait_for_map()
        tab.until(lambda now: not now["busy"])
        expect(tab.select("Model")).to_have_value("tiny-causal")
        expect(tab.box("Text")).to_have_value("the mat")


def test_nothing_is_analysed_over_what_is_typed(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        tab.page.route("**/api/models", lambda route: (tab.box("Text").fill("the mat"), route.continue_()))
        tab.page.goto(server.address)
        expect(tab.page.get_by_label("Model")).to_be_visible()
        expect(tab.box("Text")).to_have_value("the mat")
        assert not any(re.search("/api/analyses", url) for url in tab.asked)
