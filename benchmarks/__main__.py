"""`python -m benchmarks`: run the measurements, print a table, save the raw numbers.

`python -m benchmarks trust` compares methods by their faithfulness instead, `python -m benchmarks peers` other tools.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks import by_source, flow, long, models, papers, targets
from benchmarks.corpora import corpus_rate, flat_memory, ray_rate, start_up
from benchmarks.fresh import fresh, keeping_memory
from benchmarks.measures import (
    Row,
    against_published,
    attention_scopes,
    derivation,
    door,
    extra_memory,
    feed_forward_floor,
    least_work,
)
from benchmarks.memory import THREADS
from benchmarks.published import verify
from benchmarks.timing import Neighbours
from benchmarks.viewer import first_map, large_maps
from normscope import NormscopeError, __version__

BASE, MINILM, LLAMA = "BERT-base", "MiniLM", "Llama 1B"
WIDTH = 150
BUSY = 0.05  # share of the processors; if other work takes more, the ratios are unreliable
Measure = Callable[[], Row]


def core() -> Iterator[Measure]:
    """Scopes against the forward pass, the published algorithm and the machine's matrix-product rate; memory."""
    base = models.bert()
    bars = {(1, 128): 1.5, (16, 25): 1.5, (16, 128): 1.6, (1, 512): 2.0}
    for batch, length in [(1, 25), (16, 25), (1, 128), (16, 128), (1, 512)]:
        bar = bars.get((batch, length))
        yield lambda b=batch, n=length, bar=bar: attention_scopes(BASE, base, b, n, 10, bar)  # type: ignore[misc]
    yield lambda: attention_scopes(BASE, models.bert(2), 16, 512, 10)
    for batch, length, bar in [(1, 25, None), (16, 25, None), (1, 128, 20.0)]:
        yield partial(fresh, against_published, BASE, models.bert, batch, length, 6, bar)
    for ours in (False, True):
        yield partial(fresh, against_published, BASE, models.bert, 1, 128, 6, heads=(True, ours))
    yield partial(keeping_memory, against_published, BASE, models.bert, 1, 128, 6)
    yield partial(fresh, least_work, BASE, models.bert, 128, 20)
    # Several layers: the pass stops early, so with one layer its feed-forward network, half of the work, would not run.
    yield partial(fresh, against_published, BASE, partial(models.bert, 3), 1, 512, 40, 80.0)
    yield partial(fresh, against_published, BASE, partial(models.bert, 2), 1, 128, 15, 2.5, feed_forward=True)
    yield lambda: feed_forward_floor(BASE, base, 12, 128, 30, 1.4)
    yield lambda: feed_forward_floor(BASE, models.bert(2), 2, 512, 40, 1.15)
    yield from minilm(quick=False)
    yield lambda: extra_memory(BASE, "bert", 12, 512, 0.45)
    yield lambda: extra_memory(BASE, "bert", 2, 2048, 1.2, without_maps=True)


def corpora() -> Iterator[Measure]:
    """Corpus runs."""
    yield from (corpus_rate, ray_rate, start_up, flat_memory)


def viewer() -> Iterator[Measure]:
    """The viewer in Chromium."""
    yield first_map
    for row in large_maps():
        yield lambda row=row: row  # type: ignore[misc]


def quick() -> Iterator[Measure]:
    """The same with fewer layers and shapes: takes one or two minutes, and the ratios are rougher."""
    base = models.bert(3)
    for batch, length, bar in [(1, 128, 1.5), (16, 25, 1.5), (1, 512, 2.0)]:
        yield lambda b=batch, n=length, bar=bar: attention_scopes(BASE, base, b, n, 3, bar)  # type: ignore[misc]
    yield partial(fresh, against_published, BASE, partial(models.bert, 3), 1, 128, 3, 20.0)
    yield partial(fresh, against_published, BASE, partial(models.bert, 1), 1, 128, 3, 2.5, feed_forward=True)
    yield lambda: feed_forward_floor(BASE, base, 3, 128, 8, 1.4)
    yield from minilm(quick=True)
    yield lambda: extra_memory(BASE, "bert", 1, 512, 0.45)


def llama() -> Iterator[Measure]:
    """A causal, gated model with grouped heads, 1024 tokens."""
    model = models.llama()
    yield lambda: attention_scopes(LLAMA, model, 1, 1024, 20, 3.0)
    yield lambda: feed_forward_floor(LLAMA, model, 1, 1024, 120, 1.35, causal=True, least=2)
    yield lambda: extra_memory(LLAMA, "llama", 2, 1024, 0.5, scopes="attention")
    yield lambda: extra_memory(LLAMA, "llama", 2, 1024, 2.5)


def minilm(quick: bool) -> Iterator[Measure]:
    """The default model. It has no bars, because those are for the BERT-base shape."""
    try:
        model = models.minilm()
    except NormscopeError as error:
        note = str(error)
        yield lambda: Row("all", MINILM, "", note=note)
        return
    shapes = [(1, 128)] if quick else [(1, 25), (16, 25), (1, 128), (16, 128), (1, 512), (16, 512)]
    for batch, length in shapes:
        yield lambda b=batch, n=length: attention_scopes(MINILM, model, b, n, 3)  # type: ignore[misc]
    yield lambda: door(MINILM, models.minilm, 6)
    yield lambda: derivation(MINILM, models.minilm, 6)
    yield partial(fresh, against_published, MINILM, models.minilm, 1, 128, 3)
    yield lambda: feed_forward_floor(MINILM, model, 2, 128, 3)
    if not quick:
        yield partial(fresh, against_published, MINILM, models.minilm, 1, 128, 5, feed_forward=True)
        yield lambda: feed_forward_floor(MINILM, model, 2, 512, 15)


PARTS: dict[str, Callable[[], Iterator[Measure]]] = {
    "core": core,
    "llama": llama,
    "corpora": corpora,
    "papers": papers.rows,
    "flow": flow.rows,
    "sources": by_source.rows,
    "targets": targets.rows,
    "long": long.rows,
    "viewer": viewer,
}

APART = ("trust", "peers")  # packages with options of their own


def table(rows: list[Row]) -> Table:
    """All measurements; "others" is the share of the processors used by other work at the same time."""
    result = Table(title="normscope, side by side")
    for heading in ("what", "model", "shape"):
        result.add_column(heading)
    for heading in ("measured", "bar"):
        result.add_column(heading, justify="right")
    for heading in ("verdict", "others", "note"):
        result.add_column(heading)
    for row in rows:
        sign = "≥" if row.at_least else "≤"
        colour = {"ok": "green", "over": "red", "under": "red"}.get(row.verdict, "yellow")
        result.add_row(
            row.what,
            row.model,
            row.shape,
            "" if row.value is None else f"{row.value:.2f}{row.unit}",
            "" if row.bar is None else f"{sign} {row.bar:g}{row.unit}",
            f"[{colour}]{row.verdict}[/]" if row.verdict else "",
            "" if row.neighbours is None else f"{row.neighbours:.0%}",
            row.note,
        )
    return result


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "normscope": __version__,
    }


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in APART:
        import_module(f"benchmarks.{sys.argv[1]}.__main__").main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Side-by-side measurements of normscope.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="the core with fewer layers and shapes: one or two minutes"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results.json"), help="file for the raw numbers")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; choose from {', '.join(PARTS)}")

    torch.set_num_threads(THREADS)
    transformers.utils.logging.disable_progress_bar()
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH  # wide enough for the whole table in a file
    about = machine()
    console.print(f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}")
    console.print(f"The baseline agrees with normscope to {verify():.1e}.")
    start = time.perf_counter()
    rows: list[Row] = []
    for measure in quick() if chosen.quick else chain.from_iterable(PARTS[name]() for name in chosen.parts or PARTS):
        neighbours = Neighbours()
        row = measure()
        if row.neighbours is None:
            row.neighbours = neighbours.share()
        rows.append(row)
        value = row.note if row.value is None else f"{row.value:.2f}{row.unit} {row.verdict}"
        console.print(f"{time.perf_counter() - start:5.0f} s  {row.what}, {row.model} {row.shape}: {value}")
        results = [asdict(row) | {"verdict": row.verdict} for row in rows]
        record = {"machine": about, "quick": chosen.quick, "results": results}
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    console.print(table(rows))
    disturbed = sum(bool(row.seconds) and (row.neighbours or 0) > BUSY for row in rows)
    if disturbed:
        console.print(
            f"[yellow]Other work used more than {BUSY:.0%} of the processors in {disturbed} measurements; run again.[/]"
        )
    console.print(f"Raw numbers: {chosen.json}")


if __name__ == "__main__":
    main()
