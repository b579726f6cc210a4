"""The models of a server, and one analysis of them: checked, run and described."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscope.analyzer import Analyzer
from normscope.engine.request import Options, requests_for
from normscope.engine.run import run_batch
from normscope.errors import NormscopeError, did_you_mean
from normscope.flow.resolve import TargetRequest
from normscope.flow.result import Flow
from normscope.flow.run import run_flow
from normscope.flow.target_names import target_class_names
from normscope.inputs.encode import encode
from normscope.inputs.item import Item
from normscope.models.scopes import scope_names
from normscope.view.document import Result, document_arrays_size, document_header, document_header_to_json, sides_of
from normscope.view.server.jobs import ProgressReport
from normscope.view.server.pictures import decode_server_picture
from normscope.view.server.schemas import AnalysisRequest, FlowRequest, Kind, ModelInfo, Targets
from normscope.view.wording import VIEWER

PART_SECONDS = 0.25  # from one part of a result to the next
LAYERS_PER_FLOW_LAYER = 4  # decomposing this many layers takes as long as the flow through one


@dataclass(frozen=True)
class Shown:
    """A result and its JSON header, made in the analysis' thread so that the server is not blocked."""

    result: Result
    header: bytes

    @property
    def layers(self) -> set[int]:
        return {layer for one in sides_of(self.result).values() for layer in one.layers}

    @property
    def size(self) -> int:
        return document_arrays_size(self.result) + len(self.header)


def models_by_name(lenses: Sequence[Analyzer]) -> dict[str, Analyzer]:
    """The models by display name: the last part of a folder's path, numbered if it occurs twice."""
    found: dict[str, Analyzer] = {}
    for lens in lenses:
        if model_kind(lens) is None:
            raise NormscopeError(
                f"{lens.model_name} is a speech model, which the viewer does not support. Leave it out."
            )
        name = base = short_model_name(lens.model_name)
        number = 1
        while name in found:
            number += 1
            name = f"{base} ({number})"
        found[name] = lens
    if not found:
        raise NormscopeError("No model to serve. Give at least one.")
    return found


def short_model_name(name: str) -> str:
    return Path(name).name if Path(name).is_dir() and Path(name).name else name


def model_kind(lens: Analyzer) -> Kind | None:
    """The kind of a model; None if it takes neither text nor pictures."""
    if lens.family.input == "audio":
        return None
    if lens.family.input == "image":
        return "vision"
    if lens.two_sided:
        return "encoder-decoder"
    return "causal" if lens.loaded.stacks[0].side == "decoder" else "encoder"


def describe_model(name: str, lens: Analyzer) -> ModelInfo:
    kind = model_kind(lens)
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
        targets=target_kind(lens),
        classes=[name for _, name in sorted(target_class_names(lens.loaded).items())]
        if target_kind(lens) == "classes"
        else [],
        positions=target_kind(lens) == "tokens" or "TokenClassification" in type(lens.model).__name__,
    )


def target_kind(lens: Analyzer) -> Targets:
    """What the logits of a model's head stand for; "none" if it has no head with logits."""
    if lens.model is lens.loaded.base:
        return "none"
    if "Classification" in type(lens.model).__name__:
        return "classes"
    return "none" if lens.model.get_output_embeddings() is None else "tokens"


def find_model_by_name(models: Mapping[str, Analyzer], name: str) -> Analyzer:
    lens = models.get(name)
    if lens is None:
        known = ", ".join(models)
        raise NormscopeError(f"No model {name!r} is served.{did_you_mean(name, models)} Served: {known}.")
    return lens


def find_served_model(models: Mapping[str, Analyzer], request: AnalysisRequest) -> Analyzer:
    """The model that a request for an analysis names, which can use its input."""
    lens = find_model_by_name(models, request.model)
    _check_request(model_kind(lens), request)
    if request.flow is not None and target_kind(lens) == "none":
        raise NormscopeError("This model has no head, so it has no logits to explain. Leave out the flow.")
    return lens


def _check_request(kind: Kind | None, request: AnalysisRequest) -> None:
    """Raise if a model of this kind cannot use some input of the request."""
    given: dict[str, Any] = {}
    if kind == "vision":
        if request.image is None:
            raise NormscopeError("This is a vision model. Choose a picture.")
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


def server_analysis_request_id(request: AnalysisRequest) -> str:
    """The id of a request; equal requests have the same id."""
    return hashlib.sha256(request.model_dump_json().encode("utf-8", "surrogatepass")).hexdigest()[:32]


def run_server_analysis(lens: Analyzer, request: AnalysisRequest, report: ProgressReport[Shown]) -> Shown:
    """Run the analysis of a request. Error messages are translated for the viewer."""

    def shown(result: Result, flow: Flow | None = None) -> Shown:
        header = document_header(result, image=picture, text=text, name=request.model, flow=flow)
        return Shown(result, document_header_to_json(header).encode("ascii"))

    picture = None if request.image is None else decode_server_picture(request.image)
    given: Any = request.text if picture is None else picture
    text = None if picture is not None else request.text
    if request.second:
        given = (request.text, request.second)
    if request.target and request.target.strip():
        given = (request.text, request.target)
    try:
        # Shared by maps and flow, so that text is generated only once.
        (item,) = encode(lens.loaded, given, generate=request.generate)
        requests = requests_for(lens.loaded, Options(heads=request.heads))
        # Maps first: they refuse inputs that are too large before anything runs.
        progress = report if request.flow is None else _leave_room_for_flow(report)
        # No layers in advance with a flow, whose target may still be refused.
        layers = None if request.flow is not None else _publish_layers(lambda result: report.first(shown(result)))
        result: Result = run_batch(lens.loaded, [item], requests, lens.workspace, progress, layers)[0]
        flow = None if request.flow is None else run_server_analysis_flow(lens, item, request.flow)
    except NormscopeError as error:
        raise NormscopeError(VIEWER.reword(str(error))) from error
    return shown(result, flow)


def _publish_layers(publish: Callable[[Result], None]) -> Callable[[Callable[[], list[Result]]], None]:
    """Publishes the first layer at once, and then the layers so far whenever `PART_SECONDS` have passed."""
    last = -math.inf

    def so_far(results: Callable[[], list[Result]]) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PART_SECONDS:
            publish(results()[0])
            last = now

    return so_far


def _leave_room_for_flow(progress: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """A progress callback that reserves the share of the flow that follows."""
    return lambda done, total: progress(done, total + max(1, total // LAYERS_PER_FLOW_LAYER))


def run_server_analysis_flow(lens: Analyzer, item: Item, asked: FlowRequest) -> Flow:
    target = asked.target if asked.against is None else (asked.target, asked.against)
    position = asked.position
    if position is None and lens.loaded.stacks[-1].side == "decoder":
        position = -1  # the analysed text as it stands, without a continuation
    return run_flow(lens.loaded, item, asked.method, TargetRequest(target, position), "ig", lens.workspace)
