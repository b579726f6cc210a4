"""The models of a server, and what one analysis of them is: checked, run, described."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope.analyzer import Analyzer
from normscope.engine.request import Options, requests_for
from normscope.engine.run import run_batch
from normscope.errors import NormscopeError, did_you_mean
from normscope.flow.result import Flow
from normscope.flow.run import flow as flow_of
from normscope.flow.targets import classes_of
from normscope.inputs.encode import encode
from normscope.inputs.item import Item
from normscope.models.scopes import scope_names
from normscope.view import document
from normscope.view.document import Result
from normscope.view.server.jobs import Report
from normscope.view.server.pictures import decoded
from normscope.view.server.schemas import AnalysisRequest, FlowRequest, Kind, ModelInfo, Targets
from normscope.view.wording import VIEWER

FLOW = 4  # layers that are decomposed in the time in which a flow passes one


@dataclass(frozen=True)
class Shown:
    """A result with its header in JSON, made where it does not hold up the server."""

    result: Result
    header: bytes

    @property
    def layers(self) -> set[int]:
        return {layer for one in document.sides_of(self.result).values() for layer in one.layers}

    @property
    def size(self) -> int:
        return document.size_of(self.result) + len(self.header)


def by_name(lenses: Sequence[Analyzer]) -> dict[str, Analyzer]:
    """The models by the names that people see: of a folder the last part; the same name twice is numbered."""
    found: dict[str, Analyzer] = {}
    for lens in lenses:
        if kind_of(lens) is None:
            raise NormscopeError(f"{lens.model_name} listens to sounds, which the viewer cannot take. Leave it out.")
        name = base = short_name(lens.model_name)
        number = 1
        while name in found:
            number += 1
            name = f"{base} ({number})"
        found[name] = lens
    if not found:
        raise NormscopeError("There is no model to serve.")
    return found


def short_name(name: str) -> str:
    return Path(name).name if Path(name).is_dir() and Path(name).name else name


def kind_of(lens: Analyzer) -> Kind | None:
    """What a model reads and writes; None where it takes neither text nor pictures."""
    if lens.family.input == "audio":
        return None
    if lens.family.input == "image":
        return "vision"
    if lens.two_sided:
        return "encoder-decoder"
    return "causal" if lens.loaded.stacks[0].side == "decoder" else "encoder"


def describe(name: str, lens: Analyzer) -> ModelInfo:
    kind = kind_of(lens)
    assert kind is not None
    scopes = dict.fromkeys(scope for stack in reversed(lens.loaded.stacks) for scope in scope_names(stack.blocks))
    return ModelInfo(
        name=name,
        family=lens.family.name,
        kind=kind,
        layers=lens.depth,
        heads=max(lens.loaded.head_counts),
        scopes=list(scopes),
        max_tokens=None if kind == "vision" else lens.loaded.limits.positions,
        targets=targets_of(lens),
        classes=[name for _, name in sorted(classes_of(lens.loaded).items())] if targets_of(lens) == "classes" else [],
        positions=targets_of(lens) == "tokens" or "TokenClassification" in type(lens.model).__name__,
    )


def targets_of(lens: Analyzer) -> Targets:
    """What the logits of a model's head are of; "none" where it has no head, or one without logits to explain."""
    if lens.model is lens.loaded.base:
        return "none"
    if "Classification" in type(lens.model).__name__:
        return "classes"
    return "none" if lens.model.get_output_embeddings() is None else "tokens"


def chosen(models: Mapping[str, Analyzer], request: AnalysisRequest) -> Analyzer:
    """The model of a request, which must be one of those that were chosen at the start."""
    lens = models.get(request.model)
    if lens is None:
        known = ", ".join(models)
        raise NormscopeError(
            f"No model {request.model!r} is served.{did_you_mean(request.model, models)} Served: {known}."
        )
    _refuse_misfit(kind_of(lens), request)
    if request.flow is not None and targets_of(lens) == "none":
        raise NormscopeError("This model has no head, so there is no logit to explain. Leave the flow out.")
    return lens


def _refuse_misfit(kind: Kind | None, request: AnalysisRequest) -> None:
    """Refuse what a model of this kind has no use for, before anything is run."""
    given: dict[str, Any] = {}
    if kind == "vision":
        if request.image is None:
            raise NormscopeError("This model looks at pictures: choose one.")
        given |= {"text": request.text.strip(), "second text": request.second}
    else:
        if not request.text.strip():
            raise NormscopeError("The text is empty. Give at least one word.")
        given |= {"picture": request.image}
    given |= {"second text": request.second} if kind == "encoder-decoder" else {"target": request.target}
    if kind in ("encoder", "vision"):
        given["number of tokens to generate"] = request.generate
    for what, value in given.items():
        if value:
            raise NormscopeError(f"This model takes no {what}. Leave it out.")
    if request.target and request.generate:
        raise NormscopeError("Give either a target or a number of tokens to generate.")


def identity(request: AnalysisRequest) -> str:
    """The id of a request: equal requests are one analysis."""
    return hashlib.sha256(request.model_dump_json().encode("utf-8", "surrogatepass")).hexdigest()[:32]


def analysed(lens: Analyzer, request: AnalysisRequest, report: Report[Shown]) -> Shown:
    """The analysis that a request asks for; errors are worded for people who cannot pass options."""

    def shown(result: Result, flow: Flow | None = None) -> Shown:
        header = document.header(result, image=picture, text=text, name=request.model, flow=flow)
        return Shown(result, document.as_json(header).encode("ascii"))

    picture = None if request.image is None else decoded(request.image)
    given: Any = request.text if picture is None else picture
    text = None if picture is not None else request.text
    if request.second:
        given = (request.text, request.second)
    if request.target and request.target.strip():
        given = (request.text, request.target)
    try:
        (item,) = encode(
            lens.loaded, given, generate=request.generate
        )  # for both: what a model writes itself is written once
        requests = requests_for(lens.loaded, Options(heads=request.heads))
        # The maps first: they refuse a text that is too large before anything is run.
        progress = report if request.flow is None else _followed(report)
        # Not before a flow: its target may be refused, and nobody wants a first layer then.
        first = None if request.flow is not None else lambda results: report.first(shown(results[0]))
        result: Result = run_batch(lens.loaded, [item], requests, lens.workspace, progress, first)[0]
        flow = None if request.flow is None else flowing(lens, item, request.flow)
    except NormscopeError as error:
        raise NormscopeError(VIEWER.reword(str(error))) from error
    return shown(result, flow)


def _followed(progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """The progress of something that a flow comes after."""
    return lambda done, total: progress(done, total + max(1, total // FLOW))


def flowing(lens: Analyzer, item: Item, asked: FlowRequest) -> Flow:
    target = asked.target if asked.against is None else (asked.target, asked.against)
    return flow_of(lens.loaded, item, asked.method, target, asked.position, "ig", lens.workspace)
