"""A browser for each test file: an event loop that its driver leaves running would disturb other tests."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.helpers.tabs import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found
