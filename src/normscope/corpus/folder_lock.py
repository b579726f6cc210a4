"""The lock of a run folder: one process writes at a time. The system releases it when that process ends in any way."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from normscope.errors import NormscopeError, NormscopeWarning

fcntl: Any
try:
    fcntl = import_module("fcntl")
except ImportError:  # Windows
    fcntl = None

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def lock_folder(folder: Path, file: Path) -> Iterator[None]:
    """Hold the lock `file` of a folder; raise if another process, or another run in this one, holds it.

    The file stays empty and in place. Where the file system has no locks, a warning says so.
    """
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise NormscopeError(f"Cannot write to the folder {folder}: {error.strerror}.") from error
    try:
        _take_lock(handle, folder)
        yield
    finally:
        os.close(handle)  # releases the lock


def _take_lock(handle: int, folder: Path) -> None:
    if fcntl is None:
        _warn_without_lock(folder, "this system has no file locks")
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            _warn_without_lock(folder, f"its file system has no locks: {error.strerror}")
            return
        raise NormscopeError(
            f"Another run is writing to the folder {folder}. Wait until it has finished or stop it; "
            "then run the same command again. For a run beside it, choose another folder."
        ) from error


def _warn_without_lock(folder: Path, reason: str) -> None:
    warnings.warn(
        f"The folder {folder} cannot be locked ({reason}). Make sure that no other run writes to it.",
        NormscopeWarning,
        stacklevel=4,
    )
