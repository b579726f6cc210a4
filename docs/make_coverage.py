"""Write docs/coverage.md: every model type of transformers with a text head, and what normscope makes of it.

`python -m docs.make_coverage` builds a tiny random model of each type (tests.helpers.zoo), analyses it and proves the
result: maps, maps without value biases and the flow must close at 1e-5.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import transformers

from normscope import Analyzer, NormscopeError
from normscope.derivation.prove import prove_description
from normscope.models.scopes import scope_names
from tests.helpers.zoo import CANNOT, model_types, tiny_model

PAGE = Path(__file__).parent / "coverage.md"
HEAD = """# Does it work with my model?

normscope knows some families by name (*described*), and describes other models by watching one short pass (*derived*):
it matches tensors until every sum in a layer is explained, and proves the description on the model itself. What is not
explained is refused, with the reason; nothing is guessed. [Any model](guides/any-model.md) explains how.

**{taken} of {built} model types are taken**, {described} described and {derived} derived: all types of transformers
{version} with a causal, masked or sequence-to-sequence head of which a tiny random model can be built
({total} types in all). The error is the worst completeness error of any scope and of the flow, with and without value
biases, alone and padded, in float32.

| model type | | layers | error, or why not |
| :--- | :--- | :--- | :--- |
"""


@dataclass(frozen=True)
class Coverage:
    """What normscope makes of one model type."""

    name: str
    status: str  # described, derived, refused, not built
    order: str  # the components of a layer
    detail: str

    def row(self) -> str:
        return f"| {self.name} | {self.status} | {self.order} | {self.detail} |"


def coverage_of(name: str) -> Coverage:
    """Build a tiny model of a type, analyse and prove it."""
    if name in CANNOT:
        return Coverage(name, "not built", "", CANNOT[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_model(name)
        try:
            lens = Analyzer(model)
            error = prove_description(lens.loaded)
        except NormscopeError as refusal:
            return Coverage(name, "refused", "", " ".join(str(refusal).split("|")).split(". ")[0].rstrip("."))
    orders = dict.fromkeys(scope_names(stack.blocks)[-1].removesuffix("-N") for stack in lens.loaded.stacks)
    status = "derived" if lens.family.derived else "described"
    return Coverage(name, status, ", ".join(orders), f"{error:.0e}")


def main() -> None:
    rows = [coverage_of(name) for name in sorted(model_types())]
    counts = {status: sum(row.status == status for row in rows) for status in ("described", "derived", "not built")}
    head = HEAD.format(
        taken=counts["described"] + counts["derived"],
        built=len(rows) - counts["not built"],
        described=counts["described"],
        derived=counts["derived"],
        total=len(rows),
        version=transformers.__version__,
    )
    PAGE.write_text(head + "\n".join(row.row() for row in rows) + "\n", encoding="utf-8")
    print(f"{PAGE}: {counts}")


if __name__ == "__main__":
    main()
