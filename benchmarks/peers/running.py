"""Run an adapter in a process of its own, and compare what two of them found."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.peers.environments import PeerError, last_words, make_environment
from benchmarks.peers.registry import Peer

ADAPTERS = Path(__file__).parent / "adapters"
PATIENCE = 1800  # seconds
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Comparison:
    """A peer beside normscope on one input; either the numbers or a message."""

    peer: str
    version: str
    question: str
    tokens: int
    same: bool
    note: str
    difference: float | None = None  # the largest, relative to the largest score
    seconds: tuple[float, float] | None = None  # theirs, ours: processor time
    memory: tuple[int, int] | None = None
    message: str = ""


def run_adapter(python: Path | str, script: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """The result of an adapter; raises `PeerError` with its last words."""
    with TemporaryDirectory() as folder:
        given, made = Path(folder, "job.json"), Path(folder, "result.json")
        given.write_text(json.dumps(job))
        try:
            done = subprocess.run(
                [python, script, given, made],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
                env={**os.environ, **ONE_THREAD},
            )
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"took more than {PATIENCE} s") from error
        if done.returncode or not made.exists():
            raise PeerError(f"failed: {last_words(done.stderr)}")
        found: dict[str, Any] = json.loads(made.read_text())
        return found


def compare_peer(
    peer: Peer, job: Mapping[str, Any], folder: Path, python: Path | str, adapters: Path = ADAPTERS
) -> Comparison:
    """Put a question to a peer, installed in `folder`, and to normscope, which runs in `python`."""
    job = {**job, "method": peer.method}
    version = peer.packages[0].partition("==")[2] if peer.packages else ""
    about = Comparison(peer.name, version, peer.question, len(job["ids"]), peer.same, peer.note)
    try:
        own = make_environment(folder / peer.name.lower(), peer.packages, peer.extras)
        theirs = run_adapter(own, adapters / f"{peer.adapter}.py", job)
        ours = run_adapter(python, adapters / f"{peer.ours}.py", job)
        difference = relative_difference(theirs["scores"], ours["scores"])
    except PeerError as error:
        return replace(about, message=str(error))
    seconds, memory = (theirs["seconds"], ours["seconds"]), (theirs["memory"], ours["memory"])
    return replace(about, difference=difference, seconds=seconds, memory=memory)


def relative_difference(theirs: Any, ours: Any) -> float:
    """The largest difference, relative to the largest number; raises `PeerError` for other shapes or NaN."""
    a, b = np.asarray(theirs, dtype=np.float64), np.asarray(ours, dtype=np.float64)
    if a.shape != b.shape:
        raise PeerError(f"its result has the shape {a.shape}, not {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise PeerError("not all numbers are finite")
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
