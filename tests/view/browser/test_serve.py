"""`normscope serve` as people use it: type, analyse, look, step, compare, save, on several models and window sizes."""

import csv
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from normscope import Analyzer, NormscopeError, default_model
from tests.helpers.kinds import lenses, picture
from tests.helpers.live import Live, Slow, eventually, live
from tests.helpers.tabs import SCHEMES, SIZES, Tab, open_tab

DEFAULT = "all-MiniLM-L6-v2"
OPUS = "opus-mt-en-fr"
SENTENCE = "Colin Fleming played the highway tiny soap opera."
HACK = "<img src=x onerror='window.hacked=1'></script><script>window.hacked=1</script>"
TEXTS = {
    DEFAULT: SENTENCE,
    "tiny-causal": "the cat sat on a mat",
    "tiny-encoder-decoder": "the cat sat",
    OPUS: "The cat sleeps on the old sofa.",
    HACK: "the cats sat on the mat",
}


def trained(name: str) -> Analyzer | None:
    """A real model, if it is installed."""
    folder = Path(os.environ.get("NORMSCOPE_TEST_DATA", "/nowhere")) / "models" / name
    try:
        path = default_model.find() if name == DEFAULT else folder
        return Analyzer.from_pretrained(path) if path.is_dir() else None
    except NormscopeError:
        return None


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    real = {name: trained(name) for name in (DEFAULT, OPUS)}
    tiny = {name: lenses()[name] for name in ("tiny-causal", "tiny-encoder-decoder", "tiny-vision")}
    models = {name: lens for name, lens in real.items() if lens} | tiny | {HACK: lenses()["tiny-encoder"]}
    with live(models) as found:
        yield found


def visit(tab: Tab, server: Live, model: str = DEFAULT, fragment: str = "") -> None:
    """Open the page and choose a model."""
    names = [info["name"] for info in server.client.get("/api/models").json()]
    if model not in names:
        where = (
            "the default model is not installed" if model == DEFAULT else f"NORMSCOPE_TEST_DATA has no models/{model}"
        )
        pytest.skip(where)
    tab.page.goto(f"{server.address}/{fragment}")
    expect(tab.part("input")).to_be_visible()
    tab.select("Model").select_option(model)


def start(tab: Tab, server: Live, model: str = DEFAULT) -> None:
    visit(tab, server, model)
    tab.analyse(TEXTS[model])


def choose(tab: Tab, group: str, option: int) -> None:
    """One of several ways to show maps, by its place among them."""
    tab.page.get_by_role("group", name=re.compile(group)).get_by_role("button").nth(option).click()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", [DEFAULT, "tiny-causal", "tiny-encoder-decoder", OPUS])
def test_a_tour(browser: Browser, server: Live, model: str, size: str) -> None:
    """Everything once, on every kind of text model and size of window."""
    with open_tab(browser, size) as tab:
        start(tab, server, model)
        assert tab.state["model"] == model
        assert tab.colours() > 3
        assert model in tab.page.inner_text("header")
        expect(tab.part("completeness")).to_contain_text(re.compile(r"\de\u2212\d|\b0\b"))

        tab.point(2, 1)
        expect(tab.part("tooltip")).to_contain_text("of the row")
        tab.click(2, 1)
        assert tab.state["cell"] == [2, 1]
        expect(tab.part("inspector")).to_contain_text("Comes from")

        first = tab.state
        tab.page.keyboard.press("ArrowRight")
        assert tab.until(lambda now: now["scope"] != first["scope"])["layer"] == first["layer"]
        tab.page.keyboard.press("ArrowDown")
        tab.until(lambda now: now["layer"] == first["layer"] + 1)
        expect(tab.part("status")).to_contain_text("Layer 2")

        tab.page.keyboard.press("d")
        against = tab.until(lambda now: now["against"] is not None)
        expect(tab.part("pairs")).to_contain_text("Most amplified")
        expect(tab.part("pairs")).to_contain_text("Most weakened")
        pair = tab.part("pairs").get_by_role("button").first
        pair.click()
        expect(pair).to_have_attribute("aria-pressed", "true")
        assert tab.state["cell"] is not None
        assert against["scope"] != against["against"]
        tab.page.keyboard.press("d")
        tab.until(lambda now: now["against"] is None)

        tab.select("Scope").select_option("ATTN-W")
        tab.button("Heads").click()
        expect(tab.part("heads").get_by_role("button", name=re.compile("^Head "))).not_to_have_count(0)
        tab.part("heads").get_by_role("button", name="Head 2", exact=True).click()
        assert tab.until(lambda now: now["head"] == 1)["scope"] == "ATTN-W"

        cells = tab.part("multiples").get_by_role("button")
        expect(cells).not_to_have_count(0)
        cells.last.click()
        last = tab.until(lambda now: now["head"] is None)
        expect(cells.last).to_have_attribute("aria-current", "true")
        assert last["scope"] in tab.label()

        overflow = tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0


def test_first_visit(browser: Browser, server: Live) -> None:
    """The page opens on a finished example."""
    with open_tab(browser) as tab:
        tab.page.goto(server.address)
        tab.wait_for_map()
        assert tab.state["model"] == server.client.get("/api/models").json()[0]["name"]
        expect(tab.box("Text")).to_have_value(SENTENCE)
        tab.analyse("the cat")  # and goes on
        expect(tab.button(re.compile("^Token 2: the"))).to_be_attached()


def test_hovering_shows_both_tokens_and_the_value(browser: Browser, server: Live) -> None:
    result = lenses()["tiny-encoder"].analyze(TEXTS[HACK])
    with open_tab(browser) as tab:
        start(tab, server, HACK)
        shown = tab.state
        for row, column in ((1, 3), (4, 0)):
            tab.point(row, column)
            expect(tab.part("tooltip")).to_contain_text(result.rows[row].token.removeprefix("##"))
            text = tab.part("tooltip").inner_text().replace("\u2212", "-")
            value = float(re.findall(r"^([\d.e+-]+)", text.partition("\n")[2].strip(), re.M)[0])
            expected = result[shown["scope"]][result.layer_position(shown["layer"]), row, column]
            assert value == pytest.approx(float(expected), rel=5e-3)
            tab.page.mouse.move(0, 0)
            expect(tab.part("tooltip")).to_have_count(0)


def test_tokens_have_arcs(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        start(tab, server)
        token = tab.button(re.compile("^Token 8: soap"))
        token.click()
        expect(token).to_have_attribute("aria-pressed", "true")
        expect(tab.part("arcs").locator("path")).not_to_have_count(0)
        expect(tab.part("inspector")).to_contain_text("soap")
        expect(tab.part("inspector")).to_contain_text("Goes to")
        tab.page.keyboard.press("Escape")
        tab.until(lambda now: now["token"] is None)


def test_keys_alone(browser: Browser, server: Live) -> None:
    """From the input to a pinned cell without a mouse; help names the keys."""
    with open_tab(browser) as tab:
        visit(tab, server, "tiny-causal")
        tab.page.keyboard.press("/")
        tab.page.keyboard.type("the cat sat on a mat")
        tab.page.keyboard.press("Enter")
        tab.wait_for_map()
        tab.part("map").focus()
        for key in ("Shift+ArrowDown", "Shift+ArrowDown", "Shift+ArrowRight", "Enter"):
            tab.page.keyboard.press(key)
        assert tab.until(lambda now: now["cell"] is not None)["token"]
        seen = {tab.state["norm"]}
        for _ in range(2):
            tab.page.keyboard.press("n")
            seen.add(tab.state["norm"])
        assert len(seen) == 3
        before = tab.state["diagonal"]
        tab.page.keyboard.press("g")
        tab.until(lambda now: now["diagonal"] != before)
        tab.page.keyboard.press("?")
        expect(tab.page.get_by_role("dialog")).to_contain_text("previous and next scope")
        tab.page.keyboard.press("Escape")
        expect(tab.page.get_by_role("dialog")).to_have_count(0)


def test_everything_is_reached_by_tab_with_visible_focus(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        start(tab, server, "tiny-causal")
        tab.page.keyboard.press("Escape")
        seen: list[str] = []
        invisible = []
        rounds = 0
        while rounds < 2 and len(seen) < 500:  # from where the focus is to the end, and once from the start
            tab.page.keyboard.press("Tab")
            name, outline, done = tab.page.evaluate(
                """() => {
                    const at = document.activeElement, style = getComputedStyle(at);
                    const ring = parseFloat(style.outlineWidth) > 0 && style.outlineStyle !== "none";
                    const name = at.dataset.testid || at.getAttribute("aria-label") || at.innerText || at.tagName;
                    return [name, ring, at === document.body];
                }"""
            )
            rounds += done
            seen.append(name)
            if not outline and not done:
                invisible.append(name)
        text = " ".join(seen)
        for wanted in (
            "map",
            "Analyse",
            "Play",
            "Difference",
            "Heads",
            "Export",
            "Share",
            "Help",
            "Layer 1",
            "Token 1",
        ):
            assert wanted in text, seen
        assert invisible == []


def test_playing(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        tab.page.clock.install()
        start(tab, server, "tiny-causal")
        first = tab.state["scope"]
        tab.part("map").focus()
        tab.page.clock.pause_at(tab.page.evaluate("Date.now()") + 60_000)  # from here on time stands still
        tab.page.keyboard.press("Space")
        assert tab.state["playing"]
        assert tab.state["scope"] == first
        tab.page.clock.run_for(1200)  # milliseconds: one picture
        second = tab.state["scope"]
        assert second != first
        tab.button(re.compile("Stop")).click()
        assert not tab.state["playing"]
        tab.page.clock.run_for(10_000)
        assert tab.state["scope"] == second


def test_how_maps_are_shown(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        start(tab, server)
        rows = int(re.findall(r"(\d+) outputs", tab.label())[0])
        choose(tab, "Values", 1)
        tab.button("Display").click()
        tab.page.get_by_label("Special tokens").uncheck()
        expect(tab.part("map")).to_have_attribute("aria-label", re.compile(f"{rows - 2} outputs by {rows - 2} inputs"))
        choose(tab, "Colour", 1)
        choose(tab, "Diagonal", 1)
        choose(tab, "[Ss]cale", 2)
        now = tab.state
        assert (now["norm"], now["log"], now["diagonal"], now["reach"], now["special"]) == (
            "raw",
            True,
            "hide",
            "all",
            False,
        )
        assert tab.colours() > 3


def test_the_url_contains_the_view(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        start(tab, server)
        tab.select("Scope").select_option("ATTNRESLNFF-N")
        tab.page.keyboard.press("ArrowDown")
        tab.page.get_by_role("button", name=re.compile("^Token 8: soap")).click()
        tab.button("Display").click()
        choose(tab, "Colour", 1)
        expect(tab.page).to_have_url(re.compile("colour=log"))
        address, shown = tab.page.url, tab.state
        with open_tab(browser, "wide") as other:
            other.page.goto(address)
            other.wait_for_map()
            assert {k: v for k, v in other.state.items() if k != "playing"} == {
                k: v for k, v in shown.items() if k != "playing"
            }
            expect(other.box("Text")).to_have_value(SENTENCE)


@pytest.mark.parametrize("kind", ["svg", "png", "csv"])
def test_saving_what_is_shown(browser: Browser, server: Live, kind: str, tmp_path: Path) -> None:
    with open_tab(browser) as tab:
        start(tab, server, HACK)
        tab.button("Export").click()
        with tab.page.expect_download() as waiting:
            tab.page.get_by_role("menuitem", name=kind.upper()).click()
        name = waiting.value.suggested_filename
        assert re.fullmatch(r"[\w.-]+", name)
        assert name.endswith(f".{kind}")
        path = tmp_path / "saved"
        waiting.value.save_as(path)
        data = path.read_bytes()
        if kind == "png":
            assert data.startswith(b"\x89PNG")
        elif kind == "svg":
            text = data.decode()
            assert text.lstrip().startswith("<svg")
            assert "<script" not in text
            assert "<img" not in text
            assert "cat" in text
        else:
            rows = list(csv.reader(io.StringIO(data.decode().removeprefix("\ufeff"))))
            assert len(rows) > 8
            result = lenses()["tiny-encoder"].analyze(TEXTS[HACK])
            assert any(row.count("cat") for row in rows)
            assert len(rows) >= len(result.rows)


def test_two_sentences_side_by_side(browser: Browser, server: Live) -> None:
    with open_tab(browser, "wide") as tab:
        start(tab, server)
        tab.button("Compare").click()
        expect(tab.part("map-2")).to_be_visible()
        tab.select("Analyse for").select_option("as B")
        tab.box("Text").fill("The old dog slept.")
        tab.button("Analyse").click()
        expect(tab.part("map-2")).to_have_attribute("aria-label", re.compile("7 outputs by 7 inputs"))
        expect(tab.part("map")).to_have_attribute("aria-label", re.compile("1[0-9] outputs"))


def test_two_models_side_by_side(browser: Browser, server: Live) -> None:
    with open_tab(browser, "wide") as tab:
        start(tab, server)
        tab.button("Compare").click()
        tab.select("Model").select_option("tiny-causal")
        tab.select("Analyse for").select_option("as B")
        tab.box("Text").fill("the cat sat")
        tab.button("Analyse").click()
        expect(tab.part("map-2")).to_have_attribute("aria-label", re.compile("LN|ATTN"))
        expect(tab.page.locator("main")).to_contain_text("tiny-causal")


def test_a_pair(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        visit(tab, server)
        tab.page.get_by_label("Pair").check()
        tab.box("Second text").fill("He played tennis.")
        tab.analyse("Colin is tired.")
        expect(tab.button(re.compile(r"^Token \d+: tennis"))).to_be_attached()


def test_source_and_target(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        visit(tab, server, "tiny-encoder-decoder")
        tab.box("Target text").fill("le chat sur un tapis")
        tab.analyse("the cat sat")
        expect(tab.button(re.compile(r"^Token \d+: chat"))).to_be_attached()
        for place, band in enumerate(("encoder", "decoder", "cross")):
            choose(tab, "Side", place)
            tab.until(lambda now, band=band: now["band"] == band)  # type: ignore[misc]
            assert tab.colours() > 3


def test_generation(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        visit(tab, server, "tiny-causal")
        tab.analyse("the cat")
        short = tab.label()
        tab.page.get_by_label("Tokens to generate").fill("3")
        tab.button("Analyse").click()
        expect(tab.part("map")).not_to_have_attribute("aria-label", short)


def test_a_picture(browser: Browser, server: Live, tmp_path: Path) -> None:
    """With a file name that looks like a tag."""
    from PIL import Image

    file = tmp_path / "<img src=x onerror=window.hacked=1>.png"
    Image.fromarray(picture(200, 300)).save(file)
    with open_tab(browser) as tab:
        visit(tab, server, "tiny-vision")
        tab.page.get_by_label("Image").set_input_files(file)
        expect(tab.part("input")).to_contain_text(file.name)
        tab.button("Analyse").click()
        tab.wait_until_drawn()
        tab.until(lambda now: now["phase"] == "ready")
        assert tab.page.evaluate("window.hacked") is None
        tab.button("Display").click()
        tab.page.get_by_label("Matrix").check()
        tab.wait_for_map()
        assert tab.colours() > 3


def test_nasty_texts_and_names_are_shown_and_never_executed(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        visit(tab, server, HACK)
        tab.analyse(f"{HACK} \u202e the \u05e9\u05dc\u05d5\u05dd &amp; cat")
        expect(tab.page.locator("header")).to_contain_text(HACK)
        tab.page.reload()  # the text is in the address now
        tab.wait_for_map()
        assert tab.page.evaluate("window.hacked") is None
        assert tab.page.evaluate("document.querySelectorAll('#normscope img, #normscope script').length") == 0


def test_only_the_server_itself_is_asked(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        start(tab, server)
        tab.page.keyboard.press("h")
        expect(tab.part("heads").get_by_role("button", name=re.compile("^Head "))).to_have_count(12)
        foreign = [url for url in tab.asked if not url.startswith((server.address, "data:", "blob:"))]
        assert foreign == []


def test_a_text_that_is_too_long(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        visit(tab, server)
        tab.box("Text").fill("the cat " * 300)
        tab.button("Analyse").click()
        expect(tab.page.get_by_role("alert")).to_contain_text("602 tokens, but the model has positions for 512")
        tab.analyse("the cat")  # and goes on
        expect(tab.page.get_by_role("alert")).to_have_count(0)


@pytest.mark.filterwarnings("ignore:The input has 81 tokens:normscope.errors.NormscopeWarning")
def test_a_text_that_is_longer_than_the_model_was_made_for(browser: Browser, server: Live) -> None:
    """Its positions are computed: it is analysed, and the page says so."""
    with open_tab(browser) as tab:
        visit(tab, server, "tiny-causal")
        tab.analyse("the cat " * 40)
        expect(tab.page.get_by_role("note")).to_contain_text("81 tokens, more than the 40")
        tab.analyse("the cat")
        expect(tab.page.get_by_role("note")).to_have_count(0)


def test_text_typed_before_the_models_load_is_kept(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        held: list[Route] = []
        tab.page.route("**/api/models", lambda route: held.append(route))
        tab.page.goto(server.address)
        tab.box("Text").fill("the cat")
        tab.wait(lambda: held)
        assert len(held) == 1
        held[0].continue_()
        expect(tab.page.get_by_label("Model")).to_be_visible()  # the models are loaded
        expect(tab.box("Text")).to_have_value("the cat")
        tab.button("Analyse").click()
        tab.wait_for_map()


def waiting_for(server: Live, slow: Slow, tab: Tab) -> None:
    tab.page.goto(f"{server.address}/#text=the cats sat on the mat")
    expect(tab.page.get_by_role("progressbar")).to_be_visible()
    eventually(lambda: slow.begun == 1)


def with_slow(check: Callable[[Live, Slow], None]) -> None:
    slow = Slow()
    with live({"tiny": lenses()["tiny-encoder"]}, run=slow) as server:
        try:
            check(server, slow)
        finally:
            slow.let_go()


def test_progress_is_shown(browser: Browser) -> None:
    def check(server: Live, slow: Slow) -> None:
        with open_tab(browser) as tab:
            waiting_for(server, slow, tab)
            tab.wait(lambda: any(re.search(r"/api/analyses/\w+\?wait=", url) for url in tab.asked))  # it polls
            slow.let_go(2)
            expect(tab.page.locator("main")).to_contain_text("40 %")
            slow.let_go()
            tab.wait_for_map()

    with_slow(check)


def test_cancelling(browser: Browser) -> None:
    def check(server: Live, slow: Slow) -> None:
        with open_tab(browser) as tab:
            waiting_for(server, slow, tab)
            tab.button("Cancel").click()
            expect(tab.page.get_by_role("progressbar")).to_have_count(0)
            jobs = server.app.state.jobs
            eventually(lambda: [job.state for job in jobs.jobs.values()] == ["cancelled"])
            slow.let_go()
            eventually(lambda: not jobs.active)
            tab.button("Analyse").click()
            tab.wait_for_map()

    with_slow(check)


def test_a_tab_that_is_closed_while_it_waits(browser: Browser) -> None:
    def check(server: Live, slow: Slow) -> None:
        with open_tab(browser) as tab:
            waiting_for(server, slow, tab)
        assert server.client.get("/api/models").status_code == 200
        slow.let_go()
        eventually(lambda: not server.app.state.jobs.active)

    with_slow(check)


def test_a_server_that_is_gone(browser: Browser) -> None:
    context = browser.new_context()
    tab = Tab(context)
    with live({"tiny": lenses()["tiny-encoder"]}) as server:
        tab.page.goto(server.address)
        tab.analyse("the cat")
    tab.box("Text").fill("the mat")
    tab.button("Analyse").click()
    expect(tab.page.get_by_role("alert")).to_contain_text("is not responding")
    context.close()


def test_several_tabs_at_once(browser: Browser, server: Live) -> None:
    with open_tab(browser) as first, open_tab(browser, "phone") as second:
        for tab, text in ((first, "the cat sat"), (second, "the dog ran")):
            visit(tab, server, "tiny-causal")
            tab.box("Text").fill(text)
        for tab in (first, second):
            tab.button("Analyse").click()
        for tab, word in ((first, "sat"), (second, "ran")):
            tab.wait_for_map()
            expect(tab.button(re.compile(f"^Token 4: {word}"))).to_be_attached()


@pytest.mark.parametrize(("size", "scheme"), SCHEMES)
def test_no_serious_problem_for_people_with_disabilities(
    browser: Browser, server: Live, size: str, scheme: str
) -> None:
    with open_tab(browser, size, color_scheme=scheme, bypass_csp=True) as tab:
        visit(tab, server)
        assert tab.serious() == []
        tab.analyse(SENTENCE)
        tab.click(3, 2)
        assert tab.serious() == []
        tab.page.keyboard.press("d")
        expect(tab.part("pairs")).to_be_visible()
        assert tab.serious() == []
        tab.page.keyboard.press("d")
        tab.page.keyboard.press("h")
        tab.page.keyboard.press("?")
        expect(tab.page.get_by_role("dialog")).to_be_visible()
        assert tab.serious() == []
