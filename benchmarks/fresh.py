"""Measuring in a process of its own.

The published algorithm makes and frees tensors of half a gigabyte, and two thirds of its time are page faults of them.
Where earlier measurements have left a hole of that size in the heap there are none, so that it needs a fresh process.
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
    """What `measure` finds in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start) as pool:
        return pool.submit(measure, *args, **kwargs).result()


def keeping_memory(measure: Callable[P, Row], *args: P.args, **kwargs: P.kwargs) -> Row:
    """The same in one that never gives memory back: large tensors cost page faults only once."""
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
