"""What the library is asked in a case, and its answer."""

import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normscope import Analyzer
from tests.attacks.comparing import Difference
from tests.attacks.families import family_stacks, scope_names
from tests.attacks.judge import Part
from tests.attacks.subject import Subject, around


@dataclass
class Question:
    """What the library is asked."""

    kind: str = "analyze"  # or "stream", "again" (after another input), "vectors" (of a result), "flow"
    options: dict[str, Any] = field(default_factory=dict)
    late: bool = False  # the attacks come after the Analyzer was made
    warm: bool = False  # and after a first analysis
    target: bool = False  # of a flow
    dtype: torch.dtype | None = None  # of the decomposition

    @property
    def part(self) -> Part:
        """What is asked for."""
        return Part(self.options.get("layers"), self.options.get("rows"), self.options.get("scopes"))

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        notes = {
            " to a logit": self.target,
            " of an Analyzer made before": self.late,
            " that was used": self.warm,
            " in float64": self.dtype is not None,
        }
        return f"{self.kind}({options}){''.join(note for note, holds in notes.items() if holds)}"


def drawn(rng: random.Random, subject: Subject) -> Question:
    question = Question(rng.choices(["analyze", "stream", "again", "vectors", "flow"], [52, 20, 6, 7, 15])[0])
    question.late = rng.random() < 0.2
    question.warm = question.late and rng.random() < 0.5
    if subject.dtype == torch.float32 and not question.late and rng.random() < 0.2:
        question.dtype = torch.float64
    if question.kind == "flow":
        question.target = subject.head is not None and rng.random() < 0.5
        return question
    if question.kind == "vectors":
        question.options["layers"] = [rng.randrange(2)]
        return question
    if rng.random() < 0.3:
        question.options["heads"] = rng.choice([True, True, [0], [0, 2]])
    if rng.random() < 0.15 and len(family_stacks(subject.name)) == 1:
        names = scope_names(next(iter(family_stacks(subject.name).values())))
        question.options["scopes"] = sorted(rng.sample(names, rng.choice([1, 1, 2])), key=names.index)
    if rng.random() < 0.2:
        question.options["rows"] = rng.choice([[-1], [0, -1]])
    if rng.random() < 0.2:
        question.options["layers"] = sorted({rng.randrange(2), rng.choice([0, 1, 1, 1, 2, 3])})
    if rng.random() < 0.15:
        question.options["value_bias"] = "remainder"
    return question


def asked(rng: random.Random, lens: Any, subject: Subject, question: Question) -> tuple[Any, list[str]]:
    """What the library gives, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught, around([*subject.surroundings, *subject.contexts]):
        warnings.simplefilter("always")
        lens = lens or Analyzer(subject.model, dtype=question.dtype)
        made = answer(rng, lens, subject, question)
    return made, [str(one.message) for one in caught]


def answer(rng: random.Random, lens: Analyzer, subject: Subject, question: Question) -> Any:
    given = subject.encoding
    if question.kind == "flow":
        if not question.target:
            found = lens.flow(given)
        else:
            several = subject.head != "SequenceClassification" and subject.head != "ImageClassification"
            found = lens.flow(given, target=rng.choice([0, 1]), position=-1 if several else None)
        return found, found.maps
    if question.kind == "vectors":
        (layer,) = question.options["layers"]
        result = main_side(subject.earlier or lens.analyze(given))
        scope = rng.choice([one for one in result.scopes if one.endswith("-N")])
        return result, scope, result.parts(scope, layer)
    if question.kind == "stream":
        others = [other_input(rng, given) for _ in range(rng.choice([1, 2, 3]))]
        place = rng.randrange(len(others) + 1)
        results = list(lens.stream([*others[:place], given, *others[place:]], **question.options))
        if len(results) != len(others) + 1:
            raise Difference(f"{len(results)} results of {len(others) + 1} inputs")
        return results[place]
    if question.kind == "again":
        return twice(rng, lens, given, question)
    return lens.analyze(given, **question.options)


def twice(rng: random.Random, lens: Analyzer, given: dict[str, Any], question: Question) -> Any:
    """Another input first, of the same length or not; what was said of it must stay, also when its tensors are
    overwritten by those of this one."""
    first = copied(given) if rng.random() < 0.5 else other_input(rng, given)
    key = next(iter(first))
    first[key] = first[key].flip(-1)
    one = lens.analyze(first, **question.options)
    scope = one.scopes[-1]
    kept = one[scope].clone()
    for name, value in first.items():
        if isinstance(value, Tensor) and value.shape == given[name].shape:
            value.copy_(given[name])
    made = lens.analyze(given, **question.options)
    if not torch.equal(one[scope], kept):
        raise Difference("the first result changed with the second")
    return made


def main_side(result: Any) -> Any:
    return getattr(result, "main", result)


def other_input(rng: random.Random, given: dict[str, Any]) -> dict[str, Any]:
    """An input of another length, with the same keys."""
    grow = rng.choice([0, 1, 3])
    made = {}
    for key, value in given.items():
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] + grow <= 40 and key != "task_ids":
            value = torch.cat([value, value[:, :1].expand(-1, grow)], 1)
        made[key] = value.clone() if isinstance(value, Tensor) else value
    return made


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in given.items()}
