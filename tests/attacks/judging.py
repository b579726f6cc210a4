"""The judge's verdict on a case: the contributions in the model as given, called as its user would call it."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.attacks.encodings import without_padding
from tests.attacks.judge import Verdict, judge, plain
from tests.attacks.question import Question
from tests.attacks.recording import NoAnswer, callable_of
from tests.attacks.subject import Subject, around

NEAR = 1e-2  # a result that misses the model by no more than this may be given with a warning that says so


def judged(subject: Subject, question: Question) -> tuple[list[Verdict], str]:
    """What may be answered: one verdict, or two where the model computes something else with a cache than without; or
    none, and why."""
    found: list[Verdict] = []
    reasons: list[str] = []
    outputs: list[Tensor] = []
    spare: Any = None
    for options, whole in ways(subject):
        try:
            model, encoding = spare or a_copy(subject, whole)
            model, output = own_output(model, encoding, [] if whole else subject.contexts, options)
            if any(output.shape == one.shape and torch.equal(output, one) for one in outputs):
                spare = (model, encoding) if not half(subject.model) else None
                continue
            outputs.append(output)
            spare = None
            remainder = question.options.get("value_bias") == "remainder"
            found.append(judge(model, subject.name, encoding, output, remainder, **options))
            reasons.append(found[-1].reason_in(question.part))
        except NoAnswer as error:
            reasons.append(f"{' '.join(options)} {error}".strip())
    closed = [verdict for verdict in found if verdict.error_in(question.part) <= limit(subject)]
    if closed:
        return closed, ""
    near = [verdict for verdict in found if verdict.error_in(question.part) <= NEAR]
    return near, f"no answer: {'; '.join(reasons)}"


def ways(subject: Subject) -> list[tuple[dict[str, Any], bool]]:
    """The ways to call the model: unchanged, or without the cache, which an analysis does not need. One in half
    precision is also judged as a copy in float32 (True), which is what is analysed."""
    options: list[dict[str, Any]] = [{}]
    if hasattr(subject.inside.config, "use_cache"):
        options.append({"use_cache": False})
    return [(one, whole) for whole in ([False, True] if half(subject.model) else [False]) for one in options]


def a_copy(subject: Subject, whole: bool) -> tuple[Any, dict[str, Any]]:
    """The model and its input to judge by, in float32 or as they are."""
    encoding = without_padding(subject.encoding)
    try:
        model = copy.deepcopy(callable_of(subject.model))
    except Exception as error:
        raise NoAnswer(f"the model cannot be copied: {type(error).__name__}") from error
    for module in model.modules():  # an output with names is the same, and not all of transformers can do without
        if getattr(vars(module).get("config"), "return_dict", True) is False:
            module.config.return_dict = True
    if whole:
        model = model.float()
        encoding = {key: value.float() if floating(value) else value for key, value in encoding.items()}
    return model, encoding


def half(model: Any) -> bool:
    return any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())


def own_output(
    model: Any, encoding: dict[str, Any], contexts: list[Any], options: dict[str, Any]
) -> tuple[Any, Tensor]:
    """The output of the model as given, and the model: without its head if only the head fails."""
    try:
        with around(contexts):
            try:
                output = plain(model, encoding, **options)
            except Exception:
                if not isinstance(model, PreTrainedModel) or model.base_model is model:
                    raise
                model = model.base_model  # the layers may be right
                output = plain(model, encoding, **options)
    except Exception as error:
        raise NoAnswer(f"the model itself fails: {type(error).__name__} {error}") from error
    if contexts:  # autocast is half precision too: what counts is the model without it
        output = plain(model, encoding, **options)
    return model, output


def floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2


def limit(subject: Subject) -> float:
    """The limit for rounding errors."""
    exact = all(p.dtype == torch.float64 for p in subject.model.parameters() if p.is_floating_point())
    return 1e-5 if exact else 1e-4
