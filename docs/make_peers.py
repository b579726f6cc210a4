"""Write docs/peers.md from the results of `python -m benchmarks peers`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "peers.md"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "peers" / "results.json"
HEAD = """# Beside other tools

Other tools on the same weights and inputs as normscope, run by `python -m benchmarks peers`, which installs each in an
environment of its own. Where both define the same quantity the largest difference is given, relative to the largest
number; where they do not, nothing is compared but the cost. Times are of the processor, in one thread, the best of
several calls; memory is what the process grew by at its peak. A ratio above 1 means that the other tool is slower. What
could not be installed or did not run is listed with its message.

Model: {model}. {remark}

| tool | question | tokens | difference | seconds, theirs | ours | ratio | memory, theirs | ours |
| :--- | :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""


def peers_page(results: Mapping[str, Any]) -> str:
    """The whole page."""
    rows = results["comparisons"]
    table = "".join(f"{_row(one)}\n" for one in rows)
    notes = dict.fromkeys(f"- {one['peer']}, {one['question']}: {one['note']}." for one in rows if one["note"])
    tail = f"\n## Notes\n\n{_lines(list(notes))}" if notes else ""
    return HEAD.format(model=results["model"], remark=results.get("remark", "")) + table + tail


def _row(one: Mapping[str, Any]) -> str:
    name = f"{one['peer']} {one['version']}".strip()
    if one["message"]:
        return f"| {name} | {one['question']} | {one['tokens']} | {_plain(one['message'])} | | | | | |"
    (theirs, ours), memory = one["seconds"], one["memory"]
    difference = f"{one['difference']:.0e}" if one["same"] else "not the same"
    cells = [difference, f"{theirs:.3f}", f"{ours:.3f}", f"{theirs / ours:.2f}", *(f"{m / 1e6:.0f} MB" for m in memory)]
    return f"| {name} | {one['question']} | {one['tokens']} | {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Text that a cell of a table can hold."""
    return text.replace("|", "/").replace("<", "(").replace(">", ")")


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


def main() -> None:
    PAGE.write_text(peers_page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
