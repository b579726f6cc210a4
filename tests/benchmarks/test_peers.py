"""The harness for other tools, with a toy peer that needs neither a model nor the network."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.peers.environments import PeerError, last_words, make_environment
from benchmarks.peers.registry import PEERS, Peer
from benchmarks.peers.running import ADAPTERS, compare_peer, relative_difference
from docs.make_peers import PAGE, RESULTS, peers_page

TOY = Peer("Toy", "twice the ids", (), adapter="theirs", method="2", ours="ours")
JOB = {"model": "none", "ids": [3, 5], "target": 0, "repeats": 2}
TWICE = """
import sys; sys.path.insert(0, {common!r})
from common import measure, read_job, write_result
job = read_job()
found, cost = measure(job, lambda: [float({factor}) * one for one in job["ids"]])
write_result({{"scores": found, **cost}})
"""


def adapters(folder: Path, theirs: str, ours: str = "job['method']") -> Path:
    """A folder of two adapters, which multiply the ids by something."""
    for name, factor in (("theirs", theirs), ("ours", ours)):
        (folder / f"{name}.py").write_text(TWICE.format(common=str(ADAPTERS), factor=factor))
    return folder


def test_a_peer_that_agrees(tmp_path: Path) -> None:
    found = compare_peer(TOY, JOB, tmp_path / "environments", sys.executable, adapters(tmp_path, "2"))
    assert found.message == ""
    assert found.difference == 0
    assert found.tokens == 2
    assert found.seconds is not None
    assert found.memory is not None
    assert min(found.seconds) >= 0 <= min(found.memory)


def test_a_peer_that_differs(tmp_path: Path) -> None:
    found = compare_peer(TOY, JOB, tmp_path / "environments", sys.executable, adapters(tmp_path, "2.5"))
    assert found.difference == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ("(1 / 0)", "ZeroDivisionError"),
        ("__import__('no_such_package')", "No module named 'no_such_package'"),
        ("float('nan')", "not all numbers are finite"),
        ("sys.exit(3)", "failed: it said nothing"),
    ],
)
def test_a_peer_that_fails_is_reported(tmp_path: Path, theirs: str, message: str) -> None:
    found = compare_peer(TOY, JOB, tmp_path / "environments", sys.executable, adapters(tmp_path, theirs))
    assert message in found.message
    assert found.difference is None
    page = peers_page({"model": "none", "comparisons": [asdict(found)]})
    assert message.replace("|", "/") in page
    assert "Toy" in page


def test_a_peer_that_does_not_install_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    missing = replace(TOY, packages=("no-such-package-of-anyone==1.0",))
    found = compare_peer(missing, JOB, tmp_path / "environments", sys.executable, adapters(tmp_path, "2"))
    assert found.message.startswith("not installed: ")
    assert "no-such-package-of-anyone" in found.message
    assert found.version == "1.0"


def test_an_environment_reads_the_packages_of_this_one(tmp_path: Path) -> None:
    """PyTorch is not installed again, and the environment is made once."""
    python = make_environment(tmp_path / "one", (), ())
    assert python != Path(sys.executable)
    ask = "import importlib.util as u, sys; print(u.find_spec('torch').origin, sys.prefix)"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert "torch" in found
    assert str(tmp_path) in found
    touched = (tmp_path / "one" / "kept").write_text("")
    assert touched == 0
    make_environment(tmp_path / "one", (), ())
    assert (tmp_path / "one" / "kept").exists()


def test_other_shapes_do_not_compare() -> None:
    with pytest.raises(PeerError, match="the shape"):
        relative_difference([1.0, 2.0], [1.0])
    assert last_words("a\n\n b \nc\nd\n") == "b c d"
    assert last_words("\n") == "it said nothing"


def test_every_peer_is_pinned_and_has_its_adapters() -> None:
    for peer in PEERS:
        assert all("==" in one for one in peer.packages)
        for name in (peer.adapter, peer.ours):
            compile((ADAPTERS / f"{name}.py").read_text(), name, "exec")


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == peers_page(json.loads(RESULTS.read_text(encoding="utf-8")))
