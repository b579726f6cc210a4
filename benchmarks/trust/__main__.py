"""`python -m benchmarks trust`: score the sources of many questions by every method, and compare.

Every finished question is a line of a JSON-lines file. A run with the same settings goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track

from benchmarks.trust import metrics, tasks
from benchmarks.trust.asking import Asked, ask
from benchmarks.trust.scoring import ABLATION, RANDOM, SCORERS, Scored, random_scores, score_sources
from benchmarks.trust.summary import summary_tables
from normscope import Analyzer

SUBSETS = 32  # of the sources, for the linear datamodelling score
SOFT_SHARE, SOFT_DRAWS = 0.5, 4
METRICS = ("recovery", "ablation", "soft")


def measure_question(asked: Asked, scorers: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    """Every metric of every method for one question that the model answers right."""
    question = asked.question
    sources = len(question.sentences)
    subsets = metrics.random_subsets(sources, SUBSETS, sum(map(ord, question.name)))
    scored = {
        one.name: score_sources(asked.lens, one, question, asked.target) for one in SCORERS if one.name in scorers
    }
    tokens = max((len(one.tokens) for one in scored.values()), default=0)
    scored[RANDOM] = random_scores(question, tokens)
    drops: list[float] = []
    if "ablation" in wanted:
        start = time.process_time()
        asked.prepare([[n for n in range(sources) if n != gone] for gone in range(sources)])
        drops = metrics.leave_one_out(asked.log_probability, sources)
        scored[ABLATION] = Scored(tuple(drops), (), time.process_time() - start)
        asked.prepare(subsets)
    found: dict[str, Any] = {}
    for name, one in scored.items():
        if one.refusal:
            found[name] = {"refusal": one.refusal}
            continue
        found[name] = {"seconds": one.seconds, "scores": one.sources}
        found[name] |= _metrics_of_scores(asked, one, wanted, drops, subsets)
    return {"name": question.name, "kind": question.kind, "decoy_first": question.decoy_first, "methods": found}


def _metrics_of_scores(
    asked: Asked, one: Scored, wanted: Sequence[str], drops: list[float], subsets: Sequence[tuple[int, ...]]
) -> dict[str, float]:
    question = asked.question
    made = {
        "recovery": metrics.recovery(one.sources, question.gold),
        "over decoy": metrics.wins(one.sources, question.gold, question.decoys),
    }
    if "ablation" in wanted:
        odds = [metrics.log_odds(asked.log_probability(kept)) for kept in subsets]
        made |= {
            "leave-one-out": metrics.rank_correlation(one.sources, drops),
            "LDS": metrics.linear_datamodelling_score(one.sources, subsets, odds),
            "top-1 drop": metrics.top_drop(one.sources, asked.log_probability, 1),
            "top-2 drop": metrics.top_drop(one.sources, asked.log_probability, 2),
            "AOPC": metrics.comprehensiveness_area(one.sources, asked.log_probability),
        }
    if "soft" in wanted and one.tokens:
        for name, sign in (("soft-NS", 1), ("soft-NC", -1)):
            scores = [sign * score for score in one.tokens]
            made[name] = asked.soft_drop(scores, SOFT_SHARE, SOFT_DRAWS, seed=0)
    return made


def read_finished(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The questions of a file that are done, by name. A line that was cut off is done again."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings) + "\n")
        return {}
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    first, *lines = whole.splitlines()
    if json.loads(first) != settings:
        raise SystemExit(f"{path} was made with other settings ({first}). Choose another file, or the same settings.")
    return {one["name"]: one for one in map(json.loads, lines)}


def run_questions(
    lens: Analyzer, asked: Iterator[tasks.Question], path: Path, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """The records of all questions, those in the file and new ones."""
    done = read_finished(path, settings)
    found = []
    for question in asked:
        if question.name not in done:
            one = ask(lens, question)
            record: dict[str, Any] = {"name": question.name, "kind": question.kind, "right": one.right}
            if one.right:
                record |= measure_question(one, settings["methods"], settings["metrics"])
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            done[question.name] = record
        found.append(done[question.name])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks trust", description=__doc__)
    parser.add_argument("--model", required=True, help="a causal language model: a name or a folder")
    parser.add_argument("--gguf", help="the file of the folder with quantised weights")
    parser.add_argument("--prefix", default="", help="text before every prompt, such as <bos>")
    parser.add_argument("--items", type=int, default=100, help="questions of each kind that the model is asked")
    parser.add_argument("--kinds", nargs="+", choices=tuple(tasks.KINDS), default=list(tasks.KINDS))
    parser.add_argument("--fillers", type=int, default=4, help="sentences that have nothing to do with the question")
    parser.add_argument("--methods", nargs="+", default=[one.name for one in SCORERS], help="default: all")
    parser.add_argument("--metrics", nargs="+", choices=METRICS, default=list(METRICS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/trust.jsonl"))
    given = parser.parse_args(arguments)
    unknown = set(given.methods) - {one.name for one in SCORERS}
    if unknown:
        parser.error(f"unknown methods {sorted(unknown)}; choose from {[one.name for one in SCORERS]}")
    transformers.utils.logging.disable_progress_bar()
    options = {"gguf_file": given.gguf} if given.gguf else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, **options)
    lens: Analyzer = Analyzer(model, transformers.AutoTokenizer.from_pretrained(given.model, **options))
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}
    for name in ("output", "items"):  # a longer run begins with a shorter one
        del settings[name]
    asked = [
        tasks.with_prefix(one, given.prefix)
        for one in tasks.questions(given.items, given.seed, given.fillers, given.kinds)
    ]
    shown = track(asked, "questions", console=Console(stderr=True))
    records = run_questions(lens, iter(shown), given.output, settings)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in summary_tables(records):
        console.print(table)


if __name__ == "__main__":
    main()
