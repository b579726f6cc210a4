"""The viewer in a real browser: how much later than the analysis itself its first map is on the screen."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

from benchmarks.measures import Row
from benchmarks.timing import best
from normscope import Analyzer, NormscopeError, default_model

NAME = "MiniLM"
BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FIRST = ("old", "young", "tall", "small", "quiet", "happy")
LAST = ("letter", "story", "song", "book")
# Click, and wait until the viewer has drawn; milliseconds.
CLICK = """async () => {
    const button = document.querySelector("[data-testid=input] button[type=submit]"), start = performance.now();
    button.click();
    while (window.__normscope.firstMapAt === null) await new Promise(requestAnimationFrame);
    return window.__normscope.firstMapAt - start;
}"""


def first_map(rounds: int = 12) -> Row:
    """From the click on "Analyse" to the first map drawn, over `analyze` of a sentence of 30 tokens."""
    row = Row("first map on screen / analyze", NAME, "30 tokens", bar=1.3)
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright

        lens = Analyzer.from_pretrained(default_model.find())
    except (ImportError, NormscopeError) as error:
        row.note = str(error)
        return row
    if path is None:
        row.note = "Chromium is not installed"
        return row
    seconds: dict[str, list[float]] = {"analyze": [], "first map": []}
    with _served(lens) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for text in _sentences(rounds):
            page = browser.new_page()  # without a map of another sentence
            page.goto(address)
            page.locator("[data-input]").fill(text)
            seconds["first map"].append(page.evaluate(CLICK) / 1000)
            page.close()
            begin = time.perf_counter()
            result = lens.analyze(text)
            seconds["analyze"].append(time.perf_counter() - begin)
            assert len(result.tokens) == 30
        browser.close()
    times = best(seconds)
    row.value, row.seconds = times["first map"] / times["analyze"], seconds
    row.note = f"{1000 * times['first map']:.0f} ms, of which {1000 * times['analyze']:.0f} ms are the analysis"
    return row


def _sentences(count: int) -> Iterator[str]:
    """Different sentences of 30 tokens, so that none is found in the server's cache."""
    for (first, last), _ in zip(product(FIRST, LAST), range(count), strict=False):
        yield (
            f"The {first} man wrote a long {last} to his friend in the north of the country while the rain fell on the "
            "roof and the dog slept."
        )


@contextmanager
def _served(lens: Analyzer) -> Iterator[str]:
    """The address of a server of this model, in a thread."""
    import uvicorn

    from normscope.view.serve_command import SETTINGS, listen
    from normscope.view.server.app import create_app

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
