"""A fresh copy of the project, and commands run in a clean environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copy_project(into: Path) -> Path:
    """Copy what a clone would contain: files tracked by git, and untracked files that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # skip files deleted in the working tree
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    return into


def environment(home: Path, programs: Path | None = None) -> dict[str, str]:
    """An empty home and no other Python environment; `programs` come first on the path."""
    home.mkdir(exist_ok=True)
    left_out = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "NORMSCOPE_TEST_DATA", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    path = os.pathsep.join(part for part in kept["PATH"].split(os.pathsep) if not part.startswith(str(ROOT)))
    settings = Path.home() / ".config" / "pip" / "pip.conf"
    if settings.is_file():
        kept.setdefault("PIP_CONFIG_FILE", str(settings))
    return kept | {"HOME": str(home), "PATH": f"{programs}{os.pathsep}{path}" if programs else path}


def run(words: Sequence[str | os.PathLike[str]], cwd: Path, env: Mapping[str, str], timeout: float = 1800) -> str:
    """The output of a command; raises with the output if it fails."""
    done = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{' '.join(map(str, words))} exits with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout
