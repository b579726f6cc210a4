"""Measure in a fresh process.

The published algorithm allocates and frees tensors of half a gigabyte, and two thirds of its time are page faults on
them. If earlier measurements have left a free block of that size in the heap, the page faults do not occur.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec
from unittest.mock import patch

from benchmarks.measures import Row
from benchmarks.memory import THREADS

P = ParamSpec("P")
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}  # glibc


def fresh(measure: Callable[P, Row], *args: P.args, **kwargs: P.kwargs) -> Row:
    """The result of `measure` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start) as pool:
        return pool.submit(measure, *args, **kwargs).result()


def keeping_memory(measure: Callable[P, Row], *args: P.args, **kwargs: P.kwargs) -> Row:
    """The same in a process that never returns memory, so large tensors cause page faults only once."""
    with patch.dict(os.environ, KEPT):
        row = fresh(measure, *args, **kwargs)
    if row.value is not None:
        row.note = "without page faults"
    return row


def _start() -> None:
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    transformers.utils.logging.disable_progress_bar()
