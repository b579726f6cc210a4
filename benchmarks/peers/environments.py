"""An environment for each peer. It reads the packages of this one where it has none of its own, so that PyTorch is the
pinned build and is not installed again."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

TAIL = 400  # characters of a message that are kept


class PeerError(Exception):
    """A peer could not be installed or did not run; the message is its own."""


def make_environment(folder: Path, packages: Sequence[str], extras: Sequence[str]) -> Path:
    """The Python of an environment with these packages, without what they require; made once."""
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    marker = folder / "installed.txt"
    wanted = "\n".join([*packages, *extras])
    if marker.exists() and marker.read_text() == wanted:
        return python
    venv.create(folder, with_pip=False, clear=True)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    shared = dict.fromkeys([sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("-packages"))])
    Path(own.stdout.strip(), "shared.pth").write_text("\n".join(shared) + "\n")
    if packages:
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
        made = subprocess.run([*install, *packages, *extras], capture_output=True, text=True, check=False)
        if made.returncode:
            raise PeerError(f"not installed: {last_words(made.stderr)}")
    marker.write_text(wanted)
    return python


def last_words(text: str) -> str:
    """The end of what a process said, without empty lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[-3:])[-TAIL:] if lines else "it said nothing"
