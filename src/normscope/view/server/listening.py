"""The server's socket and settings. It listens on the local machine only."""

from __future__ import annotations

import socket
from typing import Any

from normscope.errors import NormscopeError

HOST = "127.0.0.1"  # deliberately not configurable
SETTINGS: dict[str, Any] = {  # for uvicorn
    "log_level": "warning",
    "access_log": False,
    "server_header": False,
    "ws": "none",
    "lifespan": "on",
    "limit_concurrency": 256,
    "timeout_graceful_shutdown": 2,
    # Longer than clients keep idle connections (httpx, Node and uvicorn's default: 5 s), because a request sent while
    # the server closes its connection is lost.
    "timeout_keep_alive": 30,
    "proxy_headers": False,
}


def listen(port: int) -> socket.socket:
    """A socket on the loopback address. IPPROTO_TCP is explicit because asyncio sets TCP_NODELAY only then."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        listener.close()
        raise NormscopeError(
            f"Cannot listen on port {port}: {error.strerror}. Choose another with --port; --port 0 takes any free one."
        ) from error
    return listener
