"""The viewer in a real browser: the time to the first map on screen, relative to the analysis itself."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.measures import Row
from benchmarks.timing import Neighbours, best
from normscope import Analyzer, NormscopeError, default_model
from normscope.analysis import Analysis
from normscope.labels import Label
from normscope.result_base import HeadMaps, Measured

NAME = "MiniLM"
BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FIRST = ("old", "young", "tall", "small", "quiet", "happy")
LAST = ("letter", "story", "song", "book")
# Click and wait until the viewer has drawn; returns milliseconds.
CLICK = """async () => {
    const button = document.querySelector("[data-testid=input] button[type=submit]"), start = performance.now();
    button.click();
    while (window.__normscope.firstMapAt === null) await new Promise(requestAnimationFrame);
    return window.__normscope.firstMapAt - start;
}"""


# Scroll from the top of the page to its end in small steps; returns the milliseconds of every frame.
SCROLL = """async () => {
    const frames = [];
    let last = performance.now();
    for (let place = 0; place < document.documentElement.scrollHeight; place += 60) {
        scrollTo(0, place);
        await new Promise(requestAnimationFrame);
        const now = performance.now();
        frames.push(now - last);
        last = now;
    }
    return frames;
}"""


def first_map(rounds: int = 12) -> Row:
    """Time from the click on "Analyse" to the first map, relative to `analyze` of a sentence of 30 tokens. The first
    map is that of the first layer, which is shown while the others are computed."""
    row = Row("first map on screen / analyze", NAME, "30 tokens", bar=1.3)
    seconds: dict[str, list[float]] = {"analyze": [], "first map": []}
    try:
        lens: Analyzer[Analysis] = Analyzer.from_pretrained(default_model.find())
        with _served(lens) as address, _browser() as browser:
            for text in _sentences(rounds):
                page = browser.new_page()  # a new page, without the map of another sentence
                page.goto(address)
                page.locator("[data-input]").fill(text)
                seconds["first map"].append(page.evaluate(CLICK) / 1000)
                page.close()
                begin = time.perf_counter()
                result = lens.analyze(text)
                seconds["analyze"].append(time.perf_counter() - begin)
                assert len(result.tokens) == 30
    except (_NoBrowserError, NormscopeError) as error:
        row.note = str(error)
        return row
    times = best(seconds)
    row.value, row.seconds = times["first map"] / times["analyze"], seconds
    row.note = f"{1000 * times['first map']:.0f} ms, analyze {1000 * times['analyze']:.0f} ms"
    return row


def large_maps(tokens: int = 512, layers: int = 6, scopes: int = 10) -> Iterator[Row]:
    """A page with 60 maps of 512 x 512: the time to draw one, and the frame times while scrolling."""
    shape = f"{layers * scopes} maps of {tokens} x {tokens}"
    draw = Row("map drawn", "made up", shape, bar=100.0, unit=" ms")
    scroll = Row("frame while scrolling, 95th percentile", "made up", shape, bar=50.0, unit=" ms")
    neighbours = Neighbours()  # shared by both rows, which are measured together
    try:
        with _browser() as browser, tempfile.TemporaryDirectory() as folder:
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(_made_up(tokens, layers, scopes).to_html(Path(folder) / "x.html").as_uri())
            page.locator("[data-testid=map]").wait_for(timeout=120_000)
            drawn = []
            for key in ("ArrowDown", "ArrowRight") * 5:
                page.keyboard.press(key)
                page.wait_for_timeout(400)
                drawn.append(page.evaluate("window.__normscope.lastDrawMs"))
            frames = page.evaluate(SCROLL)
    except _NoBrowserError as error:
        draw.note = scroll.note = str(error)
    else:
        draw.value, draw.seconds = sorted(drawn)[len(drawn) // 2], {"draw": [ms / 1000 for ms in drawn]}
        scroll.value, scroll.seconds = sorted(frames)[int(0.95 * len(frames))], {"frame": [ms / 1000 for ms in frames]}
    draw.neighbours = scroll.neighbours = neighbours.share()
    yield from (draw, scroll)


class _NoBrowserError(Exception):
    pass


@contextmanager
def _browser() -> Iterator[Any]:
    """A headless Chromium."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise _NoBrowserError("Chromium is not installed")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise _NoBrowserError("Playwright is not installed") from error
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def _made_up(tokens: int, layers: int, scopes: int) -> Analysis:
    """Random maps with a strong diagonal."""
    noise = torch.Generator().manual_seed(0)
    measured = {}
    for n in range(scopes):
        maps = torch.rand(layers, tokens, tokens, generator=noise) ** 8 + 3 * torch.eye(tokens)
        rows = torch.full((layers, tokens), 0.5)
        measured[f"{'ATTN' * (n + 1)}-N"] = Measured(maps, rows, rows, torch.full((layers,), 1e-7))
    labels = tuple(Label(f"token{k}", "encoder", k) for k in range(tokens))
    return Analysis(measured, labels, labels, tuple(range(layers)), {}, HeadMaps({}, {}), info={"model": "made up"})


def _sentences(count: int) -> Iterator[str]:
    """Different sentences of 30 tokens, so that none is in the server's cache."""
    for (first, last), _ in zip(product(FIRST, LAST), range(count), strict=False):
        yield (
            f"The {first} man wrote a long {last} to his friend in the north of the country while the rain fell on the "
            "roof and the dog slept."
        )


@contextmanager
def _served(lens: Analyzer) -> Iterator[str]:
    """The address of a server for this model, running in a thread."""
    import uvicorn

    from normscope.view.server.app import create_app
    from normscope.view.server.listening import SETTINGS, listen

    listener = listen(0)
    port = int(listener.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(create_app({NAME: lens}, port), **SETTINGS))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
