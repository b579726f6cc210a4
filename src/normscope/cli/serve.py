"""`normscope serve`: the viewer in a local browser."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.cli import completion, loading, options
from normscope.cli.progress import silence_library_progress
from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from normscope import Analyzer
    from normscope.models.source import ModelSource

PORT = 8642
MISSING = "`normscope serve` needs FastAPI and uvicorn: pip install 'normscope[serve]'."


def serve_command(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help=f"{options.MODEL_HELP} Repeatable.",
            show_default=False,
            autocompletion=completion.complete_model,
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option("--port", "-p", metavar="PORT", min=0, max=65535, help="Port on 127.0.0.1; 0 takes any free one."),
    ] = PORT,
    browse: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    device: options.Device = None,
    dtype: options.Dtype = None,
    revision: options.Revision = None,
    derive: options.Derive = True,
) -> None:
    """Open the viewer in a browser: type a sentence and see its maps. Ctrl-C stops it.

    Example: normscope serve --model default --model ./my-model
    """
    names = model or [options.DEFAULT]
    if revision is not None and len(names) > 1:
        raise NormscopeError("--revision applies to one model. Leave it out, or serve that model alone.")
    sources = [loading.find_model_source(name, device, dtype, revision, derive) for name in names]
    try:
        import uvicorn
        from fastapi import FastAPI  # noqa: F401
    except ImportError as error:
        raise NormscopeError(MISSING) from error
    from normscope.view.server.listening import HOST, SETTINGS, listen

    listener = listen(port)
    try:
        from normscope.view.server.analyses import models_by_name
        from normscope.view.server.app import create_app

        bound = int(listener.getsockname()[1])
        app = create_app(models_by_name(_load_served_models(names, sources)), bound)
        server = uvicorn.Server(uvicorn.Config(app, **SETTINGS))
        _announce_address(server, f"http://{HOST}:{bound}/", browse)
        server.run(sockets=[listener])
    finally:
        listener.close()


def _load_served_models(names: Sequence[str], sources: Sequence[ModelSource]) -> list[Analyzer]:
    lenses = []
    with silence_library_progress():
        for name, source in zip(names, sources, strict=True):
            typer.echo(f"loading {name}", err=True)
            lenses.append(loading.load_analyzer(source))
    return lenses


def _announce_address(server: Any, address: str, browse: bool) -> None:
    """Print the page's address and open it once the server has started."""

    def wait() -> None:
        pause = threading.Event()
        while not server.started and not server.should_exit:
            pause.wait(0.02)
        if server.started:
            typer.echo(f"normscope is at {address} (Ctrl-C stops it)", err=True)
            if browse:
                webbrowser.open(address)

    threading.Thread(target=wait, daemon=True).start()
