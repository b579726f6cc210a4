"""The web app: the viewer's page and its API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, HTTPException, Path, Query
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request

from normscope._version import __version__
from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError
from normscope.view.document import document_map_bytes
from normscope.view.html import has_static_file, read_static_file, server_page, server_policy
from normscope.view.server import jobs
from normscope.view.server.analyses import (
    Shown,
    describe_model,
    find_model_by_name,
    find_served_model,
    run_server_analysis,
    server_analysis_request_id,
)
from normscope.view.server.explanations import (
    ToldExplanation,
    check_explanation_request,
    explanation_request_id,
    run_server_explanation,
)
from normscope.view.server.guard import BODY, Guard
from normscope.view.server.schemas import (
    WAIT,
    AnalysisRequest,
    ErrorMessage,
    ExplanationRequest,
    ModelInfo,
    Started,
    StartedExplanation,
    Status,
)

Wait = Annotated[float, Query(ge=0, le=WAIT, description="seconds to wait for the analysis to progress")]
First = Annotated[bool, Query(description="return the layers that are done; their cells are available at once")]
Id = Annotated[str, Path(max_length=64)]
T = TypeVar("T")
Run = Callable[[Analyzer, AnalysisRequest, jobs.ProgressReport[Shown]], Shown]
EXPLANATIONS = 64 * 2**20  # bytes of cached explanations
REFUSALS: Any = {
    404: {"model": ErrorMessage, "description": "No such analysis, or it has been dropped: request it again"},
    422: {"model": ErrorMessage, "description": "Invalid request"},
}
STARTING: Any = {
    422: REFUSALS[422],
    400: {"model": ErrorMessage, "description": "The body is not JSON"},
    413: {"model": ErrorMessage, "description": "The body is too large"},
    429: {"model": ErrorMessage, "description": "Too many requests are waiting"},
}
UNFINISHED: Any = {409: {"model": ErrorMessage, "description": "The analysis is not finished"}}


def create_app(
    models: Mapping[str, Analyzer],
    port: int,
    *,
    at_once: int = jobs.AT_ONCE,
    waiting: int = jobs.WAITING,
    cache: int = jobs.CACHE,
    body: int = BODY,
    run: Run = run_server_analysis,
) -> FastAPI:
    """An app that serves these models, given by display name, to the local machine."""
    running: jobs.Jobs[Shown] = jobs.Jobs(lambda shown: shown.size, at_once=at_once, waiting=waiting, cache=cache)

    explained: jobs.Jobs[ToldExplanation] = jobs.Jobs(
        lambda told: told.size, at_once=1, waiting=waiting, cache=EXPLANATIONS
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        running.close()
        explained.close()

    app = FastAPI(
        title="normscope",
        version=__version__,
        description="Attribution maps of Transformers: the API of the viewer, which scripts can use too.",
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.jobs = running
    app.state.explanations = explained
    app.add_middleware(Guard, port=port, policy=server_policy(), body=body)
    app.add_exception_handler(NormscopeError, _refusal_response)
    app.add_exception_handler(StarletteHTTPException, _http_error_response)
    app.add_exception_handler(RequestValidationError, _invalid_request_response)
    _add_viewer_files(app)
    _add_analysis_routes(app, models, running, run)
    _add_result_routes(app, running)
    _add_explanation_routes(app, models, explained)
    return app


def _add_analysis_routes(app: FastAPI, models: Mapping[str, Analyzer], running: jobs.Jobs[Shown], run: Run) -> None:
    """Routes that list models, and start, watch and cancel analyses."""
    infos = [describe_model(name, lens) for name, lens in models.items()]

    @app.get("/api/models", tags=["models"])
    async def models_() -> list[ModelInfo]:
        """The models of this server."""
        return infos

    @app.post(
        "/api/analyses",
        status_code=201,
        response_model=Started,
        tags=["analyses"],
        responses=STARTING,
    )
    async def start(request: AnalysisRequest, wait: Wait = 0, first: First = False) -> Response:
        """Start an analysis. Equal requests have the same id and are computed once."""
        lens = find_served_model(models, request)
        try:
            job = running.submit(server_analysis_request_id(request), partial(run, lens, request))
        except jobs.BusyError as error:
            raise HTTPException(429, str(error)) from error
        await running.finished(job, wait, first)
        return Response(
            _status_json(job, job.result or (job.first if first else None)), 201, media_type="application/json"
        )

    @app.get("/api/analyses/{id}", response_model=Status, tags=["analyses"], responses=REFUSALS)
    async def status(id: Id, wait: Wait = 0) -> Response:
        """The progress of an analysis; with `wait`, the response is sent once it changes."""
        job = _job_or_404(running, id)
        await running.changed(job, wait)
        return Response(_status_json(job), media_type="application/json")

    @app.delete("/api/analyses/{id}", response_model=Status, tags=["analyses"], responses=REFUSALS)
    async def cancel(id: Id) -> Response:
        """Cancel an analysis. It continues if other clients requested the same one."""
        job = _job_or_404(running, id)
        running.cancel(job)
        return Response(_status_json(job), media_type="application/json")


def _add_explanation_routes(
    app: FastAPI, models: Mapping[str, Analyzer], explained: jobs.Jobs[ToldExplanation]
) -> None:
    """Routes that start, watch and cancel explanations of what a model writes."""
    tags: Any = ["explanations"]

    @app.post(
        "/api/explanations",
        status_code=201,
        response_model=StartedExplanation,
        tags=tags,
        responses=STARTING,
    )
    async def explain(request: ExplanationRequest, wait: Wait = 0) -> Response:
        """Explain every token of an answer by the tokens that the model had read."""
        lens = find_model_by_name(models, request.model)
        check_explanation_request(lens, request)
        try:
            job = explained.submit(explanation_request_id(request), partial(run_server_explanation, lens, request))
        except jobs.BusyError as error:
            raise HTTPException(429, str(error)) from error
        await explained.finished(job, wait)
        return Response(_explanation_json(job), 201, media_type="application/json")

    @app.get("/api/explanations/{id}", response_model=StartedExplanation, tags=tags, responses=REFUSALS)
    async def explanation(id: Id, wait: Wait = 0) -> Response:
        """The explanation, or its progress; with `wait`, the response is sent once it changes."""
        job = _job_or_404(explained, id)
        await explained.changed(job, wait)
        return Response(_explanation_json(job), media_type="application/json")

    @app.delete("/api/explanations/{id}", response_model=Status, tags=tags, responses=REFUSALS)
    async def stop_explanation(id: Id) -> Response:
        """Cancel an explanation. It continues if other clients requested the same one."""
        job = _job_or_404(explained, id)
        explained.cancel(job)
        return Response(_explanation_json(job), media_type="application/json")


def _explanation_json(job: jobs.Job[ToldExplanation]) -> bytes:
    status = {"id": job.id, "state": job.state, "progress": job.progress, "error": job.error}
    text = json.dumps(status).encode("ascii")
    return text if job.result is None else text[:-1] + b',"explanation":' + job.result.body + b"}"


def _add_result_routes(app: FastAPI, running: jobs.Jobs[Shown]) -> None:
    """Routes that return the header and the cells of a result."""

    @app.get("/api/analyses/{id}/header", tags=["results"], responses=REFUSALS | UNFINISHED)
    async def header(id: Id, first: First = False) -> dict[str, Any]:
        """The header of the result: tokens, layers, scopes, measures ("normscope-view-1")."""
        part = _job_or_404(running, id).first if first else None
        shown = _finished_result(running, id) if part is None else part
        return Response(shown.header, media_type="application/json")  # type: ignore[return-value]

    @app.get(
        "/api/analyses/{id}/cells",
        response_class=Response,
        tags=["results"],
        responses={
            **REFUSALS,
            **UNFINISHED,
            200: {"content": {"application/octet-stream": {}}, "description": "Little-endian float32"},
        },
    )
    async def cells(
        id: Id,
        side: Annotated[str, Query(description="encoder or decoder")],
        scope: Annotated[str, Query(description="a scope, or heads/ followed by one of head_scopes")],
        layer: Annotated[
            int | None, Query(ge=0, description="the model's layer, counted from 0 (default: all)")
        ] = None,
    ) -> Response:
        """The map of a side, scope and layer, row by row; without a layer, the maps of all layers in order.

        A scope that begins with heads/ has heads x rows x columns."""
        first = _job_or_404(running, id).first
        shown = first if first is not None and layer in first.layers else _finished_result(running, id)
        return Response(document_map_bytes(shown.result, side, scope, layer), media_type="application/octet-stream")


def _job_or_404(running: jobs.Jobs[T], id: str) -> jobs.Job[T]:
    job = running.get(id)
    if job is None:
        raise HTTPException(404, "No such analysis, or it has been dropped. Request it again.")
    return job


def _finished_result(running: jobs.Jobs[Shown], id: str) -> Shown:
    job = _job_or_404(running, id)
    if job.result is None:
        raise HTTPException(409, f"The analysis is not finished. {job.error or f'It is {job.state}.'}")
    return job.result


def _add_viewer_files(app: FastAPI) -> None:
    """Serve the page and the viewer from memory: no request path ever reaches the disk."""
    kept = {"/": (server_page(), "text/html"), "/viewer.js": (read_static_file("viewer.js"), "text/javascript")}
    if has_static_file("viewer.css"):
        kept["/viewer.css"] = (read_static_file("viewer.css"), "text/css")

    for path, (content, kind) in kept.items():
        app.add_api_route(path, _constant_route(content.encode(), kind), include_in_schema=False, response_model=None)


def _constant_route(content: bytes, kind: str) -> Callable[[], Any]:
    async def answer() -> Response:
        return Response(content, media_type=kind)

    return answer


def _status_json(job: jobs.Job[Shown], shown: Shown | None = None) -> bytes:
    ready = job.result or job.first
    layers = 0 if ready is None else len(ready.layers)
    status = {"id": job.id, "state": job.state, "progress": job.progress, "error": job.error, "layers": layers}
    text = json.dumps(status).encode("ascii")
    return text if shown is None else text[:-1] + b',"header":' + shown.header + b"}"


async def _refusal_response(request: Request, error: Exception) -> Response:
    return _error_response(422, str(error))


async def _http_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    return _error_response(error.status_code, str(error.detail), error.headers)


async def _invalid_request_response(request: Request, error: Exception) -> Response:
    """Report the first errors of an invalid request, without echoing its content."""
    assert isinstance(error, RequestValidationError)
    entries = error.errors()
    if any(entry["type"] == "json_invalid" for entry in entries):
        return _error_response(400, "The request's body is not JSON.")
    reasons = (f"{'.'.join(map(str, entry['loc'][1:])) or 'body'}: {entry['msg']}" for entry in entries[:5])
    return _error_response(422, "; ".join(reasons))


def _error_response(status: int, error: str, headers: Mapping[str, str] | None = None) -> Response:
    # ASCII, because UTF-8 cannot encode lone surrogates.
    body = json.dumps({"error": error}).encode("ascii")
    return Response(body, status, dict(headers or {}), media_type="application/json")
