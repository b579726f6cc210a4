"""`normscope serve`: the viewer in a browser on this machine."""

from __future__ import annotations

import socket
import threading
import webbrowser
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.errors import NormscopeError

if TYPE_CHECKING:
    from normscope import Analyzer

HOST = "127.0.0.1"  # this machine only; there is no option for another
PORT = 8642
MISSING = "`normscope serve` needs FastAPI and uvicorn: pip install 'normscope[serve]'."


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="M",
            help="Hub name or folder of a model; repeatable. 'default' is all-MiniLM-L6-v2.",
            show_default="default",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", "-p", metavar="P", min=0, max=65535, help="Port on 127.0.0.1; 0 is any free one.")
    ] = PORT,
    browse: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Show the viewer in a browser: type a sentence and see its maps. Stop it with Ctrl-C.

    Example: normscope serve --model default --model ./my-model
    """
    try:
        import uvicorn
        from fastapi import FastAPI  # noqa: F401
    except ImportError as error:
        raise NormscopeError(MISSING) from error
    listener = listen(port)
    try:
        from normscope.view.server import served
        from normscope.view.server.app import create_app

        bound = int(listener.getsockname()[1])
        app = create_app(served.by_name([_load(name) for name in model or ["default"]]), bound)
        address = f"http://{HOST}:{bound}/"
        server = uvicorn.Server(uvicorn.Config(app, **SETTINGS))
        _when_up(server, address, browse)
        server.run(sockets=[listener])
    finally:
        listener.close()


SETTINGS: dict[str, Any] = {
    "log_level": "warning",
    "access_log": False,
    "server_header": False,
    "ws": "none",
    "lifespan": "on",
    "limit_concurrency": 256,
    "timeout_graceful_shutdown": 2,
    "proxy_headers": False,
}


def listen(port: int) -> socket.socket:
    """A socket on this machine's own address. (asyncio sends without delay only where TCP is named.)"""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise NormscopeError(
            f"Cannot listen on port {port}: {error.strerror}. Give another with --port, or --port 0 for any free one."
        ) from error
    return listener


def _load(name: str) -> Analyzer:
    from transformers.utils import logging

    from normscope import Analyzer, default_model

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    typer.echo(f"loading {name}", err=True)
    return Analyzer.from_pretrained(default_model.find() if name == "default" else name)


def _when_up(server: Any, address: str, browse: bool) -> None:
    """Say where the page is, and open it, as soon as it can be had."""

    def wait() -> None:
        pause = threading.Event()
        while not server.started and not server.should_exit:
            pause.wait(0.02)
        if server.started:
            typer.echo(f"normscope is at {address} (Ctrl-C stops it)", err=True)
            if browse:
                webbrowser.open(address)

    threading.Thread(target=wait, daemon=True).start()
