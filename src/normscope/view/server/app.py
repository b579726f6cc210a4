"""The web app: the viewer's page and the API behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Path, Query
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request

from normscope._version import __version__
from normscope.analyzer import Analyzer
from normscope.errors import NormscopeError
from normscope.view import bundle, document, page
from normscope.view.server import jobs, served
from normscope.view.server.guard import BODY, Guard
from normscope.view.server.schemas import WAIT, AnalysisRequest, ModelInfo, Refusal, Started, Status

Wait = Annotated[float, Query(ge=0, le=WAIT, description="seconds to wait for an answer that says more")]
First = Annotated[bool, Query(description="wait no longer than for the first layer; its cells can be had at once")]
Id = Annotated[str, Path(max_length=64)]
Run = Callable[[Analyzer, AnalysisRequest, jobs.Report[served.Shown]], served.Shown]


def create_app(
    models: Mapping[str, Analyzer],
    port: int,
    *,
    at_once: int = jobs.AT_ONCE,
    waiting: int = jobs.WAITING,
    cache: int = jobs.CACHE,
    body: int = BODY,
    run: Run = served.analysed,
) -> FastAPI:
    """An app that serves these models, by the names that people see, to the machine that it runs on."""
    running: jobs.Jobs[served.Shown] = jobs.Jobs(
        lambda shown: shown.size, at_once=at_once, waiting=waiting, cache=cache
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        running.close()

    app = FastAPI(
        title="normscope",
        version=__version__,
        description="Attribution maps of Transformers: what the viewer of `normscope serve` uses, for scripts too.",
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.jobs = running
    app.add_middleware(Guard, port=port, policy=page.served_policy(), body=body)
    app.add_exception_handler(NormscopeError, _refused)
    app.add_exception_handler(StarletteHTTPException, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    _add_files(app)
    _add_api(app, models, running, run)
    return app


def _add_api(app: FastAPI, models: Mapping[str, Analyzer], running: jobs.Jobs[served.Shown], run: Run) -> None:
    infos = [served.describe(name, lens) for name, lens in models.items()]
    refusals: Any = {
        404: {"model": Refusal, "description": "No such analysis, or not any more: ask for it again"},
        422: {"model": Refusal, "description": "A request that makes no sense"},
    }
    unfinished: Any = {409: {"model": Refusal, "description": "The analysis is not done"}}

    def found(id: str) -> jobs.Job[served.Shown]:
        job = running.get(id)
        if job is None:
            raise HTTPException(404, "There is no such analysis (any more). Ask for it again.")
        return job

    def done(id: str) -> served.Shown:
        job = found(id)
        if job.result is None:
            raise HTTPException(409, f"The analysis is not done. {job.error or f'It is {job.state}.'}")
        return job.result

    @app.get("/api/models", tags=["models"])
    async def models_() -> list[ModelInfo]:
        """The models that were chosen when the server was started."""
        return infos

    @app.post(
        "/api/analyses",
        status_code=201,
        response_model=Started,
        tags=["analyses"],
        responses={
            422: refusals[422],
            400: {"model": Refusal, "description": "A body that is no JSON"},
            413: {"model": Refusal, "description": "A body that is too large"},
            429: {"model": Refusal, "description": "Too many analyses are waiting"},
        },
    )
    async def start(request: AnalysisRequest, wait: Wait = 0, first: First = False) -> Response:
        """Ask for an analysis. Equal requests have the same id, and are computed once."""
        lens = served.chosen(models, request)
        try:
            job = running.submit(served.identity(request), partial(run, lens, request))
        except jobs.BusyError as error:
            raise HTTPException(429, str(error)) from error
        await running.finished(job, wait, first)
        return Response(_status(job, job.result or (job.first if first else None)), 201, media_type="application/json")

    @app.get("/api/analyses/{id}", response_model=Status, tags=["analyses"], responses=refusals)
    async def status(id: Id, wait: Wait = 0) -> Response:
        """How far an analysis is; with `wait`, as soon as that changes."""
        job = found(id)
        await running.changed(job, wait)
        return Response(_status(job), media_type="application/json")

    @app.delete("/api/analyses/{id}", response_model=Status, tags=["analyses"], responses=refusals)
    async def cancel(id: Id) -> Response:
        """Cancel an analysis. Where others have asked for the same one, it goes on for them."""
        job = found(id)
        running.cancel(job)
        return Response(_status(job), media_type="application/json")

    @app.get("/api/analyses/{id}/header", tags=["results"], responses=refusals | unfinished)
    async def header(id: Id) -> dict[str, Any]:
        """What was analysed: tokens, layers, scopes, measures ("normscope-view-1")."""
        return Response(done(id).header, media_type="application/json")  # type: ignore[return-value]

    @app.get(
        "/api/analyses/{id}/cells",
        response_class=Response,
        tags=["results"],
        responses={
            **refusals,
            **unfinished,
            200: {"content": {"application/octet-stream": {}}, "description": "Little-endian float32"},
        },
    )
    async def cells(
        id: Id,
        side: Annotated[str, Query(description="encoder or decoder")],
        scope: Annotated[str, Query(description="a scope, or heads/ and one of head_scopes")],
        layer: Annotated[int | None, Query(ge=0, description="the model's layer, counted from 0; none: all")] = None,
    ) -> Response:
        """The map of a side, a scope and a layer, row by row; without a layer, those of all layers one after another.
        A scope that begins with heads/ has heads x rows x columns."""
        first = found(id).first
        shown = first if first is not None and layer in first.layers else done(id)
        return Response(document.cells(shown.result, side, scope, layer), media_type="application/octet-stream")


def _add_files(app: FastAPI) -> None:
    """The page and the viewer, from memory: no path of a request ever reaches the disk."""
    kept = {"/": (page.served_page(), "text/html"), "/viewer.js": (bundle.read("viewer.js"), "text/javascript")}
    if bundle.has("viewer.css"):
        kept["/viewer.css"] = (bundle.read("viewer.css"), "text/css")

    for path, (content, kind) in kept.items():
        app.add_api_route(path, _answering(content.encode(), kind), include_in_schema=False, response_model=None)


def _answering(content: bytes, kind: str) -> Callable[[], Any]:
    async def answer() -> Response:
        return Response(content, media_type=kind)

    return answer


def _status(job: jobs.Job[served.Shown], shown: served.Shown | None = None) -> bytes:
    status = {"id": job.id, "state": job.state, "progress": job.progress, "error": job.error}
    text = json.dumps(status).encode("ascii")
    return text if shown is None else text[:-1] + b',"header":' + shown.header + b"}"


async def _refused(request: Request, error: Exception) -> Response:
    return _answer(422, str(error))


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    return _answer(error.status_code, str(error.detail), error.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    """The first things that are wrong with a request, without repeating what it said."""
    assert isinstance(error, RequestValidationError)
    entries = error.errors()
    if any(entry["type"] == "json_invalid" for entry in entries):
        return _answer(400, "The request's body is no JSON.")
    reasons = (f"{'.'.join(map(str, entry['loc'][1:])) or 'body'}: {entry['msg']}" for entry in entries[:5])
    return _answer(422, "; ".join(reasons))


def _answer(status: int, error: str, headers: Mapping[str, str] | None = None) -> Response:
    # ASCII, because half a surrogate pair in a request cannot be encoded otherwise.
    body = json.dumps({"error": error}).encode("ascii")
    return Response(body, status, dict(headers or {}), media_type="application/json")
