"""Write docs/coverage.md: every model type of transformers with text, images or sound, and what normscope makes of it.

`python -m docs.make_coverage` builds a tiny random model of each type (tests.helpers.zoo), analyses it and proves the
result: maps, maps without value biases and the flow must close at 1e-5.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers

from normscope import Analyzer, NormscopeError
from normscope.derivation.prove import prove_description
from normscope.models.scopes import scope_names
from tests.helpers.zoo import CANNOT, media_types, model_types, tiny_model

PAGE = Path(__file__).parent / "coverage.md"
HEAD = """# Does it work with my model?

normscope knows some families by name (*described*), and describes other models by watching one short pass (*derived*):
it matches tensors until every sum in a layer is explained, and proves the description on the model itself. What is not
explained is refused, with the reason; nothing is guessed. [Any model](guides/any-model.md) explains how.

**{taken} of {built} model types are taken**, {described} described and {derived} derived: all types of transformers
{version} with a causal, masked or sequence-to-sequence head of which a tiny random model can be built
({total} types in all). The error is the worst completeness error of any scope and of the flow, with and without value
biases, alone and padded, in float32. Of the types that read [images](#images) or [sound](#sound), {media} are taken.

## Text

"""
TABLE = """| model type | | layers | error, or why not |
| :--- | :--- | :--- | :--- |
"""
PART = """
## {title}

**{taken} of {built}**, {described} described and {derived} derived ({total} types in all).

"""
TITLES = {"image": "Images", "audio": "Sound"}


@dataclass(frozen=True)
class Coverage:
    """What normscope makes of one model type."""

    name: str
    status: str  # described, derived, refused, not built
    order: str  # the components of a layer
    detail: str

    def row(self) -> str:
        return f"| {self.name} | {self.status} | {self.order} | {self.detail} |"


def coverage_of(name: str, class_name: str | None = None) -> Coverage:
    """Build a tiny model of a type, analyse and prove it."""
    if name in CANNOT:
        return Coverage(name, "not built", "", CANNOT[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(name, class_name)
        except Exception as error:  # configs and models may raise anything
            if class_name is None:
                raise
            return Coverage(name, "not built", "", f"not built at a tiny size ({_first_sentence(error)})")
        try:
            lens = Analyzer(model)
            error = prove_description(lens.loaded)
        except NormscopeError as refusal:
            return Coverage(name, "refused", "", _first_sentence(refusal))
    orders = dict.fromkeys(scope_names(stack.blocks)[-1].removesuffix("-N") for stack in lens.loaded.stacks)
    status = "derived" if lens.family.derived else "described"
    return Coverage(name, status, ", ".join(orders), f"{error:.0e}")


def _first_sentence(error: Exception) -> str:
    """The first sentence of a message, without what a table cannot hold."""
    return " ".join(str(error).replace("|", " ").split()).split(". ")[0].rstrip(".")


def counts_of(rows: Sequence[Coverage]) -> dict[str, int]:
    """How many types are described, derived, taken, built, and in all."""
    found = {status: sum(row.status == status for row in rows) for status in ("described", "derived", "not built")}
    taken = found["described"] + found["derived"]
    return found | {"taken": taken, "built": len(rows) - found["not built"], "total": len(rows)}


def main() -> None:
    texts = [coverage_of(name) for name in sorted(model_types())]
    media = {
        kind: [coverage_of(name, class_name) for name, class_name in types.items()]
        for kind, types in media_types().items()
    }
    every = counts_of([row for rows in media.values() for row in rows])
    head = HEAD.format(
        **counts_of(texts), version=transformers.__version__, media=f"{every['taken']} of {every['built']}"
    )
    parts = [head, TABLE, *(f"{row.row()}\n" for row in texts)]
    for kind, rows in media.items():
        parts += [PART.format(title=TITLES[kind], **counts_of(rows)), TABLE, *(f"{row.row()}\n" for row in rows)]
    PAGE.write_text("".join(parts), encoding="utf-8")
    print(f"{PAGE}: {counts_of(texts)}, images and sound: {every}")


if __name__ == "__main__":
    main()
