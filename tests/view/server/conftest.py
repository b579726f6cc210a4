"""Servers for the tests."""

from collections.abc import Iterator

import pytest

from tests.helpers.kinds import lenses
from tests.helpers.live import Live, Slow, live


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """One server of tiny models of every kind, for tests that do not change it."""
    with live(lenses()) as found:
        yield found


@pytest.fixture
def slow() -> Iterator[Slow]:
    """An analysis that blocks until it is released; all are released at the end."""
    made = Slow()
    yield made
    made.let_go()
