"""Chromium for the tests, and tabs that record everything that must not happen."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
SIZES = {"phone": (390, 844), "laptop": (1280, 800), "wide": (1920, 1080)}
SCHEMES = [  # a size and a colour scheme
    ("phone", "light"),
    ("wide", "dark"),
    *(pytest.param(*both, marks=pytest.mark.slow) for both in (("phone", "dark"), ("wide", "light"))),
]
PATIENCE = 180_000  # milliseconds until something counts as failed, however busy the machine is
AXE = Path(__file__).parents[2] / "web/node_modules/axe-core/axe.min.js"


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser; skips the test if none is installed."""
    wanted = os.environ.get("CHROMIUM")
    path = next(filter(None, map(shutil.which, [wanted] if wanted else NAMES)), None)
    if path is None:
        pytest.skip("Chromium is missing: `make browser` installs it")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments, timeout=PATIENCE)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page of the viewer and its record of errors, dialogs and requested URLs."""

    def __init__(self, context: BrowserContext) -> None:
        context.set_default_timeout(PATIENCE)
        self.page: Page = context.new_page()
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", self._refuse)

    def _note(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} {message.location}")

    def _refuse(self, dialog: Any) -> None:
        self.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def part(self, name: str) -> Locator:
        """A part of the viewer by its test id."""
        return self.page.get_by_test_id(name)

    def button(self, name: str | re.Pattern[str]) -> Locator:
        return self.page.get_by_role("button", name=name, exact=isinstance(name, str))

    def box(self, name: str) -> Locator:
        return self.page.get_by_role("textbox", name=name, exact=True)

    def select(self, name: str) -> Locator:
        return self.page.get_by_role("combobox", name=name, exact=True)

    @property
    def state(self) -> dict[str, Any]:
        """The state that the viewer reports."""
        found: dict[str, Any] = self.page.evaluate("window.__normscope ? window.__normscope.state() : {}")
        return found

    def until(self, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The state as soon as `good` accepts it."""
        found: dict[str, Any] = {}

        def is_good() -> bool:
            nonlocal found
            return good(found := self.state)

        self.wait(is_good, lambda: f"the state is {found}")
        return found

    def wait(self, good: Callable[[], object], reason: Callable[[], str] = lambda: "it did not happen") -> None:
        """Wait until `good()` is true. The test receives the page's requests in the meantime."""
        end = time.monotonic() + PATIENCE / 1000
        while not good():
            assert time.monotonic() < end, reason()
            self.page.wait_for_timeout(25)

    def wait_for_map(self) -> None:
        """Wait until a map is drawn."""
        expect(self.part("map")).to_be_visible()
        self.wait_until_drawn()

    def wait_until_drawn(self) -> None:
        """Wait until something is drawn. (Playwright's own wait would evaluate a string, which the page forbids.)"""
        self.wait(
            lambda: self.page.evaluate("window.__normscope && window.__normscope.firstMapAt !== null"),
            lambda: "nothing was drawn",
        )

    def analyse(self, text: str) -> None:
        """Type a text, start its analysis, and wait for the map."""
        self.box("Text").or_(self.box("Source text")).fill(text)
        self.button("Analyse").click()
        self.wait_for_map()
        self.until(lambda now: not now["busy"])  # the first layer is shown before the others are ready

    def cell(self, row: int, column: int) -> tuple[float, float]:
        """The position of a cell on the page; the map is scrolled into view."""
        self.part("map").scroll_into_view_if_needed()
        box = self.part("map").bounding_box()
        assert box is not None
        rows, columns = map(int, re.findall(r"(\d+) outputs by (\d+) inputs", self.label())[0])
        return box["x"] + (column + 0.5) * box["width"] / columns, box["y"] + (row + 0.5) * box["height"] / rows

    def label(self) -> str:
        return self.part("map").get_attribute("aria-label") or ""

    def point(self, row: int, column: int) -> None:
        self.page.mouse.move(*self.cell(row, column))

    def click(self, row: int, column: int) -> None:
        self.page.mouse.click(*self.cell(row, column))

    def colours(self) -> int:
        """The number of colours in the map: more than one if something is drawn."""
        found: int = self.part("map").evaluate(
            """canvas => {
                const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                return new Set(new Uint32Array(data.buffer)).size;
            }"""
        )
        return found

    def serious(self) -> list[str]:
        """The serious accessibility problems that axe-core finds."""
        return [text for impact, text in self._axe({}) if impact in ("serious", "critical")]

    def violations(self) -> list[str]:
        """Everything that axe-core finds against WCAG 2.2 A and AA and best practices."""
        self.page.evaluate("scrollTo(0, 0)")  # the header covers part of what has been scrolled under it
        tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
        return [text for _, text in self._axe({"runOnly": tags, "rules": {"target-size": {"enabled": True}}})]

    def _axe(self, options: dict[str, Any]) -> list[tuple[str, str]]:
        """The impact of every violation, and what it is."""
        if not AXE.is_file():
            pytest.skip("axe-core is not installed: `cd web && npm ci` does it")
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate("options => axe.run(document, {resultTypes: ['violations'], ...options})", options)
        return [
            (entry["impact"], f"{entry['id']}: {node['html'][:200]} {node['failureSummary'][:300]}")
            for entry in found["violations"]
            for node in entry["nodes"]
        ]


@contextmanager
def open_tab(browser: Browser, size: str = "laptop", **options: Any) -> Iterator[Tab]:
    """A new tab in a fresh profile; fails at the end if anything went wrong."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    try:
        tab = Tab(context)
        yield tab
        assert tab.errors == [], tab.errors  # explicit messages: pytest rewrites assertions in test files only
    finally:
        context.close()
