"""Checks of paths, and atomic writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normscope.errors import NormscopeError


def check_suffix(path: str | os.PathLike[str], *known: str) -> None:
    """Raise if the suffix of `path` belongs to another format. A path without a suffix is accepted."""
    suffix = Path(path).suffix.lower()
    if suffix and suffix not in known:
        raise NormscopeError(f"Cannot write {path}: its name must end in {' or '.join(known)}.")


def check_file(path: str | os.PathLike[str]) -> None:
    """Raise if `path` is not an existing file."""
    if not Path(path).is_file():
        reason = "it is a folder. Pass a file" if Path(path).is_dir() else "No such file or directory"
        raise NormscopeError(f"Cannot read {path}: {reason}.")


def check_output_folder(path: str | os.PathLike[str]) -> None:
    """Raise if a folder cannot be created or written to."""
    above = Path(path)
    while not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise NormscopeError(f"Cannot write to the folder {path}: {above} is a file.")
    if not os.access(above, os.W_OK):
        raise NormscopeError(f"Cannot write to the folder {path}: {above} is not writable.")


@contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces `path` if the block ends without an exception."""
    target = Path(path)
    folder = target.parent
    if not folder.is_dir():
        raise NormscopeError(f"Cannot write {target}: the folder {folder} does not exist. Create it first.")
    if target.is_dir():
        raise NormscopeError(f"Cannot write {target}: it is a folder. Pass a file name.")
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".{target.stem}-", suffix=target.suffix)
        os.close(handle)
    except OSError as error:
        raise NormscopeError(f"Cannot write {target}: {error.strerror}.") from error
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp creates a private file
        temporary.replace(target)
    except OSError as error:
        raise NormscopeError(f"Cannot write {target}: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)
