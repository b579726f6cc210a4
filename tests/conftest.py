"""Fixtures for every test, and the summary at the end of the output."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.attacks.outcome import Outcome
from tests.attacks.tally import report

# The time to draw and run an example depends on the machine and its load.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


# A shell that starts a suite in the background makes it ignore Ctrl-C, which some tests send.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def the_same_numbers_every_time() -> None:
    """Every test starts from the same random state, independent of the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def no_description_is_kept() -> Iterator[None]:
    """Derived descriptions are not written to the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NORMSCOPE_CACHE", "")
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The outcomes of the attacks, from all processes that ran any."""
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, ())]
    packed = [some for one in reports for name, some in one.user_properties if name == "attacks"]
    if packed:
        terminalreporter.section("attacks")
        terminalreporter.write_line(report([Outcome.unpacked(*one) for some in packed for one in some]))


@pytest.fixture(autouse=os.environ.get("NORMSCOPE_TEST_POISON") == "1")
def memory_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory and reused working memory hold NaN, so that a read before the first write shows.
    `make test-poisoned` runs the tests like this."""
    from normscope.decompose.state import Scratch

    take = Scratch.take

    def poisoned(self: Scratch, name: str, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> torch.Tensor:
        taken = take(self, name, shape, *args, **kwargs)
        begins = kwargs.get("begin") if "begin" in kwargs else (args[2] if len(args) > 2 else None)
        return taken if begins is not None else taken.fill_(float("nan"))

    monkeypatch.setattr(Scratch, "take", poisoned)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
