"""Peak memory of a fresh process: `python -m benchmarks.memory forward|attention|all SHAPE LAYERS TOKENS`, in bytes."""

from __future__ import annotations

import resource
import subprocess
import sys

THREADS = 2


def peak() -> int:
    """Peak resident memory of this process.

    On Linux, ru_maxrss is inherited through exec, so a child of a large process would seem large itself; the high-water
    mark in /proc starts from zero. ru_maxrss is used only without /proc.
    """
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_of(what: str, shape: str, layers: int, tokens: int) -> int:
    """Peak memory of a fresh process that runs the forward pass, or all scopes."""
    command = [sys.executable, "-m", "benchmarks.memory", what, shape, str(layers), str(tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _run(what: str, shape: str, layers: int, tokens: int) -> None:
    import torch

    from benchmarks import models
    from normscope import Analyzer

    torch.set_num_threads(THREADS)
    model = models.SHAPES[shape](layers)
    inputs = models.encoding(1, tokens)
    if what == "forward":
        with torch.inference_mode():
            model(**inputs)
    else:
        from benchmarks.measures import attention_names

        scopes = None if what == "all" else attention_names(model)
        list(Analyzer(model).stream(inputs, batch_size=1, scopes=scopes))
    print(peak())


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
