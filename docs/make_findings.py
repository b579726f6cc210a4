"""Write docs/findings from the folders of finished reports: `python -m docs.make_findings FOLDER`.

Each folder FOLDER/NAME that `normscope paper` or `normscope faithfulness` wrote becomes docs/findings/NAME (report.md,
its figures as SVG, numbers.csv), and docs/findings/README.md says of every claim of every paper whether it holds, with
our number, and how methods rank by faithfulness.
"""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FINDINGS = Path(__file__).parent / "findings"
PAPERS = {
    "emnlp2020": "Attention is Not Only a Weight (EMNLP 2020)",
    "emnlp2021": "Residual connections and layer normalisation (EMNLP 2021)",
    "ff": "Feed-forward blocks (ICLR 2024)",
    "layers": "Across layers (a study of our own)",
    "shapley": "Shapley values against integrated gradients (a study of our own)",
}
FAITHFULNESS = """## Which method to trust (a study of our own)

AOPC of every method, by masking: what the probability of the predicted token loses without the tokens that a method
ranks highest (comprehensiveness, the higher the better), and with nothing but them (sufficiency, the lower the better).
The interval is a 95 % bootstrap over texts; "above random" is the lead over random scores, paired by text.
"""
MARKS = {"true": "holds", "false": "does **not** hold", "": "undecided"}
HEAD = """# Findings

The three papers' experiments on models and corpora that they did not use, and studies of our own. For each claim, one
line for each corpus: whether it holds there, and our number beside the published one (BERT-base; see each report for
what it was measured on). The criteria are stated in the claims; nothing is tuned to agree. Every report has its exact
command (put your own copies in the place of its paths); where that has --limit, the report is of the first entries
only.

Models: all-MiniLM-L6-v2 (6 layers, a BERT encoder trained for sentence similarity), stories15M (6 layers, Llama,
trained on children's stories), opus-mt-en-fr (6 + 6 layers, translation). Corpora: the test split of WikiText-2 as
pairs of paragraphs, the validation splits of SST-2 and CoNLL-2003, 484 sentence pairs of the Canadian Hansards, and 100
stories that stories15M wrote itself (`python -m docs.make_stories models/stories15M stories.txt`).
"""


@dataclass(frozen=True)
class Claim:
    run: str
    text: str
    holds: str
    ours: str
    published: str


def main(source: Path) -> None:
    FINDINGS.mkdir(exist_ok=True)
    runs = sorted(path.parent.name for path in source.glob("*/report.md"))
    lines = [HEAD]
    for name in runs:
        _copy(source / name, FINDINGS / name)
    for paper, title in PAPERS.items():
        mine = [name for name in runs if name.split("-")[0] == paper]
        if mine:
            lines += [f"## {title}", "", ", ".join(f"[{name}]({name}/report.md)" for name in mine) + ".", ""]
            lines += _table([claim for name in mine for claim in _claims(source / name)])
    for name in runs:
        if name.split("-")[0] == "faithfulness":
            lines += [FAITHFULNESS, f"[{name}]({name}/report.md).", "", *_ranking(source / name)]
    (FINDINGS / "README.md").write_text("\n".join(lines).rstrip() + "\n")


def _copy(report: Path, into: Path) -> None:
    shutil.rmtree(into, ignore_errors=True)
    (into / "figures").mkdir(parents=True)
    shutil.copy(report / "numbers.csv", into)
    lines = (report / "report.md").read_text().splitlines()
    kept = [line for line in lines if not line.startswith("In full: [tables/")]  # the tables themselves are not kept
    (into / "report.md").write_text("\n".join(kept) + "\n")
    for path in sorted((report / "figures").glob("*.svg")):
        if f"figures/{path.name}" in (report / "report.md").read_text():
            shutil.copy(path, into / "figures" / path.name)


def _claims(report: Path) -> Iterator[Claim]:
    with (report / "claims.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            yield Claim(report.name, row["claim"], row["holds"], row["ours"], row["published"])


def _table(claims: list[Claim]) -> list[str]:
    """One row for every claim and report, equal claims together."""
    lines = ["| claim | report | | ours | published |", "| :--- | :--- | :--- | :--- | :--- |"]
    for text in dict.fromkeys(claim.text for claim in claims):
        for number, claim in enumerate(claim for claim in claims if claim.text == text):
            cells = ("" if number else text, claim.run, MARKS[claim.holds], claim.ours, claim.published)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _ranking(report: Path) -> list[str]:
    """Every method of a comparison, best first."""
    lines = ["| method | comprehensiveness | sufficiency | above random |", "| :--- | ---: | ---: | ---: |"]
    with (report / "tables" / "aopc-mask.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            low, high = (float(row[f"comp. {end}"]) for end in ("from", "to"))
            lead = f"{float(row['above random']):+.3f}" if row["above random"] else ""
            lines.append(
                f"| {row['method']} | {float(row['comp.']):.3f} ({low:.3f} to {high:.3f}) | {float(row['suff.']):.3f} "
                f"| {lead} |"
            )
    return [*lines, ""]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
