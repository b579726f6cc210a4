"""`python -m benchmarks peers`: install and run every peer beside normscope, and save what came out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

from benchmarks.peers.registry import PEERS
from benchmarks.peers.running import compare_peer

TEXT = "Once upon a time there was a little girl who lived in a small house near the forest with her dog"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__)
    parser.add_argument("--model", required=True, help="the folder of a causal language model")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--folder", type=Path, required=True, help="where the environments of the peers are")
    parser.add_argument("--peers", nargs="+", default=sorted({one.name for one in PEERS}), help="default: all")
    parser.add_argument("--repeats", type=int, default=3, help="calls of which the fastest counts")
    parser.add_argument("--remark", default="", help="a sentence for the page, such as what else the machine did")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results.json")
    given = parser.parse_args(arguments)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model)
    ids = tokenizer(given.text, return_tensors="pt")["input_ids"]
    target = int(model(ids).logits[0, -1].argmax())
    job = {
        "model": str(Path(given.model).resolve()),
        "ids": ids[0].tolist(),
        "target": target,
        "repeats": given.repeats,
    }
    name, known = Path(given.model).name, known_comparisons(given.json)
    for peer in PEERS:
        if peer.name in given.peers:
            found = asdict(compare_peer(peer, job, given.folder, sys.executable))
            print(found, flush=True)
            known[name, peer.name, peer.question] = found
            order = [known[name, one.name, one.question] for one in PEERS if (name, one.name, one.question) in known]
            record = {"model": name, "remark": given.remark, "comparisons": order}
            given.json.write_text(json.dumps(record, indent=1) + "\n")


def known_comparisons(path: Path) -> dict[tuple[str, str, str], Any]:
    """What earlier runs found, by model, peer and question: peers can be run one at a time."""
    if not path.exists():
        return {}
    given = json.loads(path.read_text())
    return {(given["model"], one["peer"], one["question"]): one for one in given["comparisons"]}


if __name__ == "__main__":
    main()
