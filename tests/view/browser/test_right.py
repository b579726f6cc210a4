"""What the page says is what is shown: exports, heads, bands, means, addresses, the keyboard and paper."""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Browser, expect

from normscope import Analyzer
from tests.helpers.fakes import fake, fake_flow, fake_picture
from tests.helpers.kinds import lenses, picture, result_of
from tests.helpers.live import Live, live
from tests.helpers.tabs import Tab, open_tab
from tests.helpers.tiny import tiny
from tests.helpers.toys import toy_tokenizer

TEXT = "the cats sat on the mat"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live({"tiny": lenses()["tiny-encoder"], "vision": lenses()["tiny-vision"]}) as found:
        yield found


def start(tab: Tab, server: Live, fragment: str = "") -> None:
    tab.page.goto(f"{server.address}/#model=tiny&text={TEXT}{fragment}")
    tab.wait_for_map()
    tab.until(lambda now: not now["busy"])


def save(tab: Tab, kind: str, path: Path) -> str:
    tab.button("Export").click()
    with tab.page.expect_download() as waiting:
        tab.page.get_by_role("menuitem", name=kind).click()
    waiting.value.save_as(path)
    return path.read_text(encoding="utf-8").removeprefix("\ufeff")


def rgb(colour: str) -> NDArray[np.float64]:
    return np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)], dtype=float)


def read_figure(svg: str) -> NDArray[np.float64]:
    """The values of a map from the colours of its cells, the sizes of its discs, and its legend alone."""
    rects = [
        (float(x), float(y), float(high), fill)
        for x, y, high, fill in re.findall(
            r'<rect x="([\d.]+)" y="([\d.]+)" width="[\d.]+" height="([\d.]+)" fill="(#\w{6})"/>', svg
        )
    ]
    discs = [tuple(map(float, found)) for found in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)"', svg)]
    side = max(high for _, _, high, _ in rects if 8 < high < 40)
    below = max(y for _, y, high, _ in rects if high == side) + side
    strip = [fill for _, y, high, fill in rects if high == 8 and y > below][:64]
    numbers = [
        (float(x), float(text.removesuffix(" %")) / (100 if "%" in text else 1))
        for x, y, text in re.findall(
            r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="middle"[^>]*>([\d.e-]+(?: %)?)</text>', svg
        )
        if float(y) > below
    ]
    end = numbers[2][1]  # of the scale, after 0 and the middle
    legend = [disc for disc in discs if disc[1] > below]
    own = dict(zip((x for x, *_ in legend), (value for x, value in numbers[3:]), strict=True))
    largest_x, _, largest = legend[-1]
    # The discs of the legend have 24 pixels for a cell, those of the map the side of a cell.
    # The discs of the legend have 24 pixels for a cell, those of the map the side of a cell.
    cells = tuple(sorted({rect[axis] for rect in rects if rect[2] == side}) for axis in (1, 0))
    found = np.full((len(cells[0]), len(cells[1])), np.nan)
    table = np.array([rgb(fill) for fill in strip])
    for x, y, high, fill in rects:
        if high == side:
            place = np.abs(table - rgb(fill)).sum(1).argmin() / 63
            found[cells[0].index(y), cells[1].index(x)] = place * end
    for x, y, radius in discs:
        if y < below:
            row = int(np.abs(np.array(cells[0]) + side / 2 - y).argmin())
            column = int(np.abs(np.array(cells[1]) + side / 2 - x).argmin())
            found[row, column] = own[largest_x] * (radius / side) ** 2 / (largest / 24) ** 2
    return found


@pytest.mark.parametrize("norm", ["raw", "row"])
def test_a_figure_read_back_equals_the_table(browser: Browser, server: Live, tmp_path: Path, norm: str) -> None:
    """The diagonal too, which is on a scale of its own."""
    with open_tab(browser) as tab:
        start(tab, server, f"&norm={norm}&scope=ATTNRES-N&scale=map&diagonal=own")
        svg = save(tab, "SVG", tmp_path / "map.svg")
        rows = list(csv.DictReader(io.StringIO(save(tab, "CSV", tmp_path / "map.csv"))))
    size = int(max(row["input_position"] for row in rows))
    table = np.array([float(row["value"]) for row in rows]).reshape(-1, size)
    read = read_figure(svg)
    others = ~np.eye(size, dtype=bool)
    assert np.abs(read - table)[others].max() < 0.03 * table[others].max()
    assert np.abs(read - table).diagonal().max() < 0.06 * table.diagonal().max()
    assert "discs: own" in svg
    assert ("share of the row" in svg) == (norm == "row")


def test_a_picture_after_a_text(browser: Browser, server: Live, tmp_path: Path) -> None:
    from PIL import Image

    Image.fromarray(picture(64, 64)).save(tmp_path / "x.png")
    with open_tab(browser) as tab:
        start(tab, server)
        tab.select("Model").select_option("vision")
        tab.page.get_by_label("Image").set_input_files(tmp_path / "x.png")
        tab.button("Analyse").click()
        tab.until(lambda now: now["model"] == "vision")
        expect(tab.page.get_by_role("alert")).to_have_count(0)


def test_a_head_has_no_mixing_ratio_of_the_layer(browser: Browser, tmp_path: Path) -> None:
    path = fake(heads=2).to_html(tmp_path / "x.html")
    with open_tab(browser) as tab:
        tab.page.goto(f"{path.as_uri()}#scope=ATTN-N&heads=1&token=encoder:3")
        tab.wait_for_map()
        expect(tab.part("mixing")).to_be_attached()
        expect(tab.part("inspector")).to_contain_text("mixing ratio")
        tab.part("heads").get_by_role("button", name="Head 2", exact=True).click()
        expect(tab.part("mixing")).to_have_count(0)
        expect(tab.part("inspector")).not_to_contain_text("mixing ratio")
        expect(tab.part("inspector")).not_to_contain_text("remainder")
        expect(tab.part("layers")).not_to_contain_text("mixing")
        expect(tab.part("mixing-layers")).to_contain_text("a single head has no mixing ratio")


def test_one_mean_without_special_tokens(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        start(tab, server, "&special=0")
        said = tab.part("layers").get_by_role("button").first.get_attribute("aria-label") or ""
        chart = tab.part("mixing-layers").get_by_role("img").get_attribute("aria-label") or ""
        assert re.findall(r"mixing ratio ([\d.]+ %)", said) == re.findall(r"layer 1: ([\d.]+ %)", chart)


def test_the_cross_band_has_neither_own_tokens_nor_mixing(browser: Browser, tmp_path: Path) -> None:
    path = result_of("encoder-decoder").to_html(tmp_path / "x.html")
    with open_tab(browser) as tab:
        tab.page.goto(f"{path.as_uri()}#side=cross")
        tab.wait_for_map()
        tab.page.keyboard.press("ArrowRight")
        tab.page.keyboard.press("ArrowRight")
        expect(tab.page.locator("svg.mixing")).to_have_count(0)
        expect(tab.part("mixing")).to_have_count(0)
        expect(tab.part("legend")).not_to_contain_text("own tokens")
        assert re.search(r"\d+ encoder \+ \d+ decoder tokens", tab.page.inner_text("header"))


def test_patches_have_a_scale_of_their_own(browser: Browser, tmp_path: Path) -> None:
    """However large the score of [CLS] is."""
    result = fake_picture()
    flow = fake_flow(result)
    flow.to.scores[0] = 1000 * flow.to.scores.abs().max()  # type: ignore[union-attr]
    path = result.to_html(tmp_path / "x.html", image=picture(64, 64), flow=flow)
    with open_tab(browser) as tab:
        tab.page.goto(path.as_uri())
        tab.wait_for_map()
        places = tab.part("scores").locator("[data-place]")
        expect(places).not_to_have_count(0)
        found = [float(place) for place in places.evaluate_all("all => all.map(one => one.dataset.place)")]
        assert max(map(abs, found)) == 1


def test_enter_of_an_input_method_does_not_submit(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        start(tab, server)
        before = len([url for url in tab.asked if "/api/analyses?" in url])
        box = tab.box("Text")
        box.fill("the mat")
        box.dispatch_event("keydown", {"key": "Enter", "isComposing": True, "bubbles": True, "cancelable": True})
        box.dispatch_event("keydown", {"key": "Enter", "keyCode": 229, "bubbles": True, "cancelable": True})
        box.press("Enter")
        expect(tab.part("map")).to_have_attribute("aria-label", re.compile("4 outputs"))
        assert len([url for url in tab.asked if "/api/analyses?" in url]) == before + 1
        expect(tab.part("map")).to_be_focused()  # its keys work at once


def test_an_address_changed_by_hand_changes_both_sides(browser: Browser, server: Live) -> None:
    with open_tab(browser, "wide") as tab:
        start(tab, server, "&beside=linked&model2=tiny&text2=the mat")
        expect(tab.part("map-2")).to_have_attribute("aria-label", re.compile("4 outputs"))
        tab.page.evaluate("location.hash = location.hash.replace(/text2=the(\\+|%20| )mat/, 'text2=the+cat+sat')")
        expect(tab.part("map-2")).to_have_attribute("aria-label", re.compile("5 outputs"))
        tab.page.evaluate("location.hash = location.hash.replace(/&model2=.*/, '')")
        expect(tab.part("map-2")).to_have_attribute("aria-label", tab.label())


def test_back_and_forward(browser: Browser, server: Live) -> None:
    with open_tab(browser) as tab:
        start(tab, server)
        first = tab.label()
        tab.page.keyboard.press("ArrowDown")
        tab.page.wait_for_url(re.compile("layer=2"))
        tab.analyse("the mat")
        tab.page.wait_for_url(re.compile("text=the(\\+|%20)mat"))
        tab.page.go_back()
        expect(tab.part("map")).to_have_attribute("aria-label", re.compile("layer 2: 9 outputs"))
        tab.until(lambda now: not now["busy"])
        tab.page.go_back()
        expect(tab.part("map")).to_have_attribute("aria-label", first)
        tab.page.go_forward()
        tab.page.go_forward()
        expect(tab.part("map")).to_have_attribute("aria-label", re.compile("layer 2: 4 outputs"))
        expect(tab.box("Text")).to_have_value("the mat")


def test_paper_has_every_map(browser: Browser, tmp_path: Path) -> None:
    """Nothing is blank, and nothing is wider than the paper."""
    lens = Analyzer(tiny("bert", num_hidden_layers=6), toy_tokenizer())
    path = lens.analyze(TEXT).to_html(tmp_path / "x.html")
    with open_tab(browser) as tab:
        tab.page.goto(path.as_uri())
        tab.wait_for_map()
        maps = tab.page.locator("canvas")
        blank = """all => all.filter(canvas => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size < 3;
        }).length"""
        tab.wait(lambda: maps.count() > 50)
        assert maps.evaluate_all(blank) > 0  # those below the window are not drawn yet
        tab.page.wait_for_timeout(2500)  # small documents load all maps when the page is at rest
        assert tab.page.pdf(format="A4").startswith(b"%PDF")
        assert maps.evaluate_all(blank) == 0
        tab.page.emulate_media(media="print")
        tab.page.set_viewport_size({"width": 718, "height": 1000})  # A4 with margins of 1 cm
        expect(tab.part("input")).to_be_hidden()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 718
        cut = tab.page.locator("section, .scroll, .room").evaluate_all(
            """all => all.filter(one => getComputedStyle(one).overflowX !== "visible"
                && one.scrollWidth > one.clientWidth + 1).length"""
        )
        assert cut == 0


@pytest.mark.parametrize(
    "fragment", ["&scope=ATTNRES-N&layer=2", "&scope=ATTN-N&norm=raw", "&scope=ATTN-N&against=ATTN-W&per=input"]
)
def test_the_python_of_a_view_makes_what_is_shown(
    browser: Browser, server: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fragment: str
) -> None:
    with open_tab(browser) as tab:
        start(tab, server, fragment)
        rows = list(csv.DictReader(io.StringIO(save(tab, "CSV", tmp_path / "map.csv"))))
        tab.button("Share").click()
        code = tab.part("python").inner_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Analyzer, "from_pretrained", lambda name: lenses()["tiny-encoder"])
    made: dict[str, Any] = {}
    exec(code, made)
    name = next(name for name in ("change", "shares", "maps") if name in made)
    values = [float(row["value"]) for row in rows]
    np.testing.assert_allclose(made[name].double().flatten(), values, rtol=1e-4, atol=1e-6)
    assert (tmp_path / "map.pdf").exists() == ("against" not in fragment)
