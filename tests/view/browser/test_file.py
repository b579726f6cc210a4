"""The exported file, opened from disk with the network off."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from normscope.labels import visible_label_text
from tests.helpers.fakes import NASTY, fake, fake_picture, fake_translation
from tests.helpers.kinds import KINDS, result_of
from tests.helpers.tabs import SIZES, Tab, open_tab
from tests.helpers.toys import picture

HACK = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"


def look(tab: Tab, path: Path, fragment: str = "") -> None:
    tab.page.context.set_offline(True)
    tab.page.goto(f"{path.as_uri()}{fragment}")
    tab.wait_for_map()


def alone(tab: Tab) -> bool:
    """True if the page requested only itself."""
    return [url.partition("#")[0] for url in tab.asked if not url.startswith(("data:", "blob:"))] == [
        tab.page.url.partition("#")[0]
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(browser: Browser, tmp_path: Path, kind: str, size: str) -> None:
    result: Any = result_of(kind, heads=True)
    path = result.to_html(tmp_path / "x.html", **({"image": picture()} if kind == "vision" else {}))
    with open_tab(browser, size) as tab:
        look(tab, path)
        assert tab.colours() > 3
        assert alone(tab)
        for part in ("components", "layers", "inspector", "completeness", "multiples", "mixing", "arcs", "status"):
            expect(tab.part(part)).to_be_attached()
        overflow = tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0


def test_cross_attention_alone_has_no_mixing_ratio(browser: Browser, tmp_path: Path) -> None:
    """It reads the encoder's tokens only: a ratio would be 100 % everywhere."""
    result: Any = result_of("encoder-decoder")
    path = result.to_html(tmp_path / "x.html")
    with open_tab(browser) as tab:
        for scope in (result.decoder.aliases["attention-residual"], "XATTN-N", "XATTN-W"):
            mixes = not scope.startswith("XATTN")
            look(tab, path, f"#side=decoder&scope={scope}")
            tab.until(lambda now, scope=scope: now["scope"] == scope)  # type: ignore[misc]
            tab.click(1, len(result.decoder.rows))
            expect(tab.part("inspector")).to_contain_text("remainder")
            assert ("mixing ratio" in tab.part("inspector").inner_text()) == mixes
            expect(tab.part("mixing")).to_have_count(int(mixes))
            expect(tab.page.locator("svg.mixing")).to_have_count(int(mixes))
            layer = tab.part("layers").get_by_role("button").first.get_attribute("aria-label") or ""
            assert ("mixing ratio" in layer) == mixes
            said = "is highlighted" if mixes else "reads only encoder tokens"
            expect(tab.part("mixing-layers")).to_contain_text(said)
            assert tab.serious() == []


def test_no_input_form_without_a_server(browser: Browser, tmp_path: Path) -> None:
    with open_tab(browser) as tab:
        look(tab, fake().to_html(tmp_path / "x.html"))
        expect(tab.part("input")).to_have_count(0)


def test_values_are_those_of_the_analysis(browser: Browser, tmp_path: Path) -> None:
    analysis = fake()
    with open_tab(browser) as tab:
        look(tab, analysis.to_html(tmp_path / "x.html"), "#layer=3&scope=ATTN-N")
        for row, column in ((4, 7), (0, 1), (10, 2)):
            tab.point(row, column)
            expect(tab.part("tooltip")).to_contain_text(analysis.rows[row].token)
            text = tab.part("tooltip").inner_text().replace("\u2212", "-")
            assert analysis.columns[column].token in text
            shown = float(re.findall(r"^([\d.e+-]+)", text.partition("\n")[2].strip(), re.M)[0])
            assert shown == pytest.approx(float(analysis["ATTN-N"][2, row, column]), rel=5e-3)


def test_nasty_tokens_are_shown_and_never_executed(browser: Browser, tmp_path: Path) -> None:
    tokens = (HACK, *NASTY)
    analysis = fake(tokens, heads=2, info={"model": HACK, "family": HACK})
    with open_tab(browser, "wide") as tab:
        look(tab, analysis.to_html(tmp_path / "x.html"))
        shown = tab.page.inner_text("body")
        assert "<script>window.hacked=1</script>" in shown  # the model's name
        names = tab.page.evaluate(
            "[...document.querySelectorAll('button[aria-label^=\"Token \"]')].map(b => b.getAttribute('aria-label'))"
        )
        assert len(names) == len(tokens)
        assert visible_label_text(NASTY[0]) in names[1]
        for row in range(len(tokens)):
            tab.point(row, 0)
            tab.click(row, row)
        tab.page.keyboard.press("d")
        tab.page.keyboard.press("h")
        tab.button("Share").click()
        tab.page.keyboard.press("Escape")
        assert tab.page.evaluate("window.hacked") is None
        assert tab.page.evaluate("document.querySelectorAll('#normscope img, #normscope script').length") == 0
        assert alone(tab)


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>.html", "a b&c'd.html", "שלום.html"])
def test_names_of_files(browser: Browser, tmp_path: Path, name: str) -> None:
    with open_tab(browser) as tab:
        look(tab, fake().to_html(tmp_path / name))
        tab.button("Share").click()
        expect(tab.page.get_by_label("Link to this view")).to_be_visible()


@pytest.mark.parametrize(
    "fragment",
    [
        "#layer=99&scope=NONE&token=x:1&cell=999,999",
        "#%%%",
        "#layer=-1&scope=<img src=x onerror=alert(1)>&text=<script>alert(1)</script>",
        "#scope=ATTN-N&against=ATTN-N&head=77&norm=__proto__&colour=constructor",
    ],
)
def test_nasty_addresses(browser: Browser, tmp_path: Path, fragment: str) -> None:
    with open_tab(browser) as tab:
        look(tab, fake().to_html(tmp_path / "x.html"), fragment)
        assert tab.state["layer"] == 0


def test_readers_without_scripts(browser: Browser, tmp_path: Path) -> None:
    path = fake_translation().to_html(tmp_path / "x.html")
    with open_tab(browser, java_script_enabled=False) as tab:
        tab.page.goto(path.as_uri())
        assert "Allow scripts to see them" in tab.page.locator("noscript").inner_text()
        expect(tab.page.locator("noscript ol")).to_have_count(2)
        expect(tab.page.locator("noscript ol").first).to_be_visible()


def test_a_foreign_script_in_the_page_does_not_run(browser: Browser, tmp_path: Path) -> None:
    """The policy lets the viewer run and nothing else, even if someone edits the file."""
    path = fake().to_html(tmp_path / "x.html")
    path.write_text(path.read_text().replace("</body>", "<script>window.hacked=1</script></body>"))
    width, height = SIZES["laptop"]
    context = browser.new_context(viewport={"width": width, "height": height})
    tab = Tab(context)
    look(tab, path)
    assert tab.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in error for error in tab.errors)
    context.close()


def test_a_large_page(browser: Browser, tmp_path: Path) -> None:
    """512 tokens: every map is drawn, and small multiples scroll. (How fast is for the benchmarks.)"""
    tokens = [f"token{k}" for k in range(512)]
    analysis = fake(tokens, layers=(0, 1), scopes=("ATTN-W", "ATTN-N", "ATTNRESLN-N"))
    with open_tab(browser) as tab:
        look(tab, analysis.to_html(tmp_path / "x.html"))
        for key in ("ArrowDown", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowDown", "ArrowRight"):
            before = tab.label()
            tab.page.keyboard.press(key)
            expect(tab.part("map")).not_to_have_attribute("aria-label", before)
            tab.wait(lambda: tab.colours() > 3)
        tab.part("multiples").scroll_into_view_if_needed()
        assert tab.colours() > 3


def test_right_to_left_tokens_stay_in_their_places(browser: Browser, tmp_path: Path) -> None:
    tokens = ("\u05e9\u05dc\u05d5\u05dd", "a", "\u0645\u0631\u062d\u0628\u0627", "b")
    with open_tab(browser) as tab:
        look(tab, fake(tokens).to_html(tmp_path / "x.html"))
        places = [
            tab.page.get_by_role("button", name=re.compile(f"^Token {n + 1}: ")).bounding_box()["x"]  # type: ignore[index]
            for n in range(4)
        ]
        assert places == sorted(places)


def test_a_picture(browser: Browser, tmp_path: Path) -> None:
    path = fake_picture().to_html(tmp_path / "x.html", image=picture(400, 600))
    with open_tab(browser) as tab:
        look(tab, path)
        assert alone(tab)
        assert tab.colours() > 3
