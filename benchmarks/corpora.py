"""Corpus runs against what they are made of: a bare stream, one process, the start of Python and the model."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.measures import Row
from benchmarks.memory import peak
from normscope import Analyzer, corpus, default_model

NAME = "MiniLM"
SCOPES = ("weights", "attention", "attention-block")
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "its",
    "friend",
    "the",
    "old",
    "dog",
    "looked",
    "at",
    "red",
    "birds",
    "in",
    "tall",
    "green",
    "trees",
    "near",
    "town",
]


def corpus_rate(entries: int = 600) -> Row:
    """The rate of a run with measures only, over that of a bare loop over `stream` with the same entries."""
    lens = Analyzer.from_pretrained(default_model.default_model_folder())
    with tempfile.TemporaryDirectory() as folder:
        data = _data(Path(folder), entries)
        texts = data.read_text().splitlines()
        seconds: dict[str, list[float]] = {"stream": [], "run": []}
        for turn in range(3):
            begin = time.perf_counter()
            for _ in lens.stream(texts, scopes=SCOPES):
                pass
            seconds["stream"].append(time.perf_counter() - begin)
            summary = corpus.run(data, lens, Path(folder) / f"run{turn}", scopes=SCOPES)
            seconds["run"].append(summary.seconds)
    value = min(seconds["stream"]) / min(seconds["run"])
    return Row("rate of a corpus run / bare stream", NAME, f"{entries} entries", value, 0.9, True, seconds=seconds)


def ray_rate(entries: int = 800) -> Row:
    """The rate of two Ray workers of one thread each, over that of one process with one thread; from the first shard
    on, so that starting Ray does not count."""
    row = Row("rate of 2 Ray workers / 1 process", NAME, f"{entries} entries, 1 thread each", None, 1.4, True)
    try:
        import ray
    except ImportError:
        row.note = "Ray is not installed"
        return row
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = _data(Path(folder), entries)
            rates: dict[str, list[float]] = {"local": [], "ray": []}
            for turn in range(2):
                rates["local"].append(_steady(data, Path(folder) / f"local{turn}", "local"))
                rates["ray"].append(_steady(data, Path(folder) / f"ray{turn}", "ray"))
    finally:
        ray.shutdown()
        torch.set_num_threads(threads)
    row.value = max(rates["ray"]) / max(rates["local"])
    row.note = f"{max(rates['local']):.0f} and {max(rates['ray']):.0f} entries/s"
    return row


def start_up() -> Row:
    """From the start of Python to the first shard, over that to import torch and transformers and load the model."""
    with tempfile.TemporaryDirectory() as folder:
        data = _data(Path(folder), 64)
        model = str(default_model.default_model_folder())
        load = f"import torch, transformers; transformers.AutoModel.from_pretrained({model!r})"
        seconds: dict[str, list[float]] = {"load": [], "first": []}
        for turn in range(3):
            first = (
                "from normscope import corpus; "
                f"corpus.run({str(data)!r}, {model!r}, {str(Path(folder) / str(turn))!r}, shard_size=16, "
                "scopes=['attention'], progress=lambda done, total: done and __import__('os')._exit(0))"
            )
            for name, code in (("load", load), ("first", first)):
                begin = time.perf_counter()
                subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
                seconds[name].append(time.perf_counter() - begin)
    value = min(seconds["first"]) / min(seconds["load"])
    return Row("start to first result / import and load", NAME, "16 entries", value, 3.0, seconds=seconds)


def flat_memory() -> Row:
    """Peak memory of a run of 2000 entries over that of 200."""
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        for entries in (200, 2000):
            data = _data(Path(folder), entries)
            command = [sys.executable, "-m", "benchmarks.corpora", str(data), str(Path(folder) / str(entries))]
            peaks[str(entries)] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return Row("peak memory, 2000 / 200 entries", NAME, "", peaks["2000"] / peaks["200"], 1.1, bytes=peaks)


def _data(folder: Path, entries: int) -> Path:
    generator = random.Random(0)
    path = folder / f"{entries}.txt"
    path.write_text("\n".join(" ".join(generator.choices(WORDS, k=generator.randint(8, 40))) for _ in range(entries)))
    return path


def _steady(data: Path, out: Path, engine: str) -> float:
    """Entries per second after the first shards."""
    seen: list[tuple[float, int]] = []
    corpus.run(
        data,
        default_model.default_model_folder(),
        out,
        scopes=SCOPES,
        shard_size=32,
        engine=engine,  # type: ignore[arg-type]
        workers=2,
        progress=lambda done, total: seen.append((time.perf_counter(), done)),
    )
    (begin, before), (end, after) = seen[4], seen[-1]
    return (after - before) / (end - begin)


if __name__ == "__main__":
    corpus.run(sys.argv[1], default_model.default_model_folder(), sys.argv[2], scopes=SCOPES)
    print(peak())
