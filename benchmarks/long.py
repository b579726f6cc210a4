"""Long inputs: the scores of a logit and single rows of the maps against a forward pass, on a small Llama, with their
memory. One thread, because the ratios of the bars are for one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks import models
from benchmarks.measures import Row
from benchmarks.memory import peak
from normscope import Analyzer

SHAPE = "Llama 4 x 512"
ATTENTION = "attention-block"
WORK = ("forward", "flow", "attention row", "all row")


def language_model() -> PreTrainedModel:
    """4 layers of width 512, 8 query and 4 key-value heads, with a head for 4,000 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2**15,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("sdpa")
    model.eval()
    return model


def work(what: str, model: PreTrainedModel, lens: Analyzer, length: int) -> Callable[[], object]:
    """One of WORK, as a function without arguments."""
    inputs = models.encoding(1, length)

    def forward() -> object:
        with torch.no_grad():
            return model(**inputs)

    def row(scopes: str | None) -> object:
        return lens.analyze(inputs, rows=[-1], scopes=scopes)

    tasks: dict[str, Callable[[], object]] = {
        "forward": forward,
        "flow": lambda: lens.flow(inputs, target="top").scores,
        "attention row": lambda: row(ATTENTION),
        "all row": lambda: row(None),
    }
    return tasks[what]


def times(names: tuple[str, ...], length: int, rounds: int) -> dict[str, list[float]]:
    """Processor seconds of some of WORK, in turn: on a shared machine they vary less than the time on the clock."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = language_model()
        lens = Analyzer(model)
        tasks = {name: work(name, model, lens, length) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, task in tasks.items():
                begin = time.process_time()
                task()
                seconds[name].append(time.process_time() - begin)
        return seconds
    finally:
        torch.set_num_threads(threads)


def ratio(name: str, length: int, rounds: int, bar: float) -> Row:
    """The time of one of WORK relative to the forward pass."""
    seconds = times(("forward", name), length, rounds)
    value = min(seconds[name]) / min(seconds["forward"])
    return Row(f"{LABELS[name]} / forward", SHAPE, f"1 x {length}", value, bar, seconds=seconds)


def memory(name: str, length: int, bar: float | None) -> Row:
    """Peak memory of one of WORK beyond that of a forward pass, each in a process of its own."""
    peaks = {what: _peak(what, length) for what in ("nothing", "forward", name)}
    extra = (peaks[name] - peaks["forward"]) / 1e9
    note = f"the forward pass takes {(peaks['forward'] - peaks['nothing']) / 1e9:.2f} GB"
    what = f"extra memory of {LABELS[name]}"
    return Row(what, SHAPE, f"1 x {length}", extra, bar, unit=" GB", note=note, bytes=peaks)


LABELS = {
    "flow": "scores of a logit",
    "attention row": "one row, attention-block scopes",
    "all row": "one row, all scopes",
}


def rows() -> Iterator[Callable[[], Row]]:
    """Every measurement with its bar."""
    for name, length, rounds, bar in [
        ("flow", 1024, 8, 3.5),
        ("flow", 4096, 3, 4.5),
        ("attention row", 4096, 3, 1.2),
        ("all row", 4096, 3, 2.0),
    ]:
        yield lambda what=name, n=length, k=rounds, b=bar: ratio(what, n, k, b)  # type: ignore[misc]
    for name, length, limit in [
        ("flow", 4096, 0.4),
        ("flow", 16384, 1.5),
        ("attention row", 4096, 0.15),
        ("all row", 4096, 0.15),
    ]:
        yield lambda what=name, n=length, b=limit: memory(what, n, b)  # type: ignore[misc]


def _peak(what: str, length: int) -> int:
    command = [sys.executable, "-m", "benchmarks.long", what, str(length)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _measured(what: str, length: int) -> int:
    torch.set_num_threads(1)
    model = language_model()
    lens = Analyzer(model)  # with its proof
    if what != "nothing":
        work(what, model, lens, length)()
    return peak()


if __name__ == "__main__":  # runs in the process whose memory is measured
    print(_measured(sys.argv[1], int(sys.argv[2])))
