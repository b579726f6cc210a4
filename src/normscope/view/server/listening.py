"""Where the server listens, and with which settings: on this machine only."""

from __future__ import annotations

import socket
from typing import Any

from normscope.errors import NormscopeError

HOST = "127.0.0.1"  # there is no option for another
SETTINGS: dict[str, Any] = {  # of uvicorn
    "log_level": "warning",
    "access_log": False,
    "server_header": False,
    "ws": "none",
    "lifespan": "on",
    "limit_concurrency": 256,
    "timeout_graceful_shutdown": 2,
    # Longer than clients keep an idle connection (httpx and Node: 5 s, as uvicorn): a request sent while the server
    # closes one is lost.
    "timeout_keep_alive": 30,
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
