"""A browser for every file of tests: its driver leaves an event loop behind that other tests could not stand."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.helpers.tabs import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found
