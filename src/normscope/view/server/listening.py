"""The server's socket, connections and settings. It listens on the local machine only."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from normscope.errors import NormscopeError

HOST = "127.0.0.1"  # deliberately not configurable
SILENT = 64  # connections whose client has not sent a whole request


class ImpatientProtocol(H11Protocol):
    """Closes the oldest connection that waits for the head of a request, if there are too many of them.

    uvicorn waits for such clients without end, and its limit on connections then refuses everyone else.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        silent = [one for one in self.connections if isinstance(one, ImpatientProtocol) and one.waits_for_request]
        if len(silent) > SILENT:
            min(silent, key=lambda one: one.since).transport.abort()

    @property
    def waits_for_request(self) -> bool:
        """True until the head of a request has arrived, and again once the request is answered."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return not self.transport.is_closing() and (cycle is None or cycle.response_complete)


SETTINGS: dict[str, Any] = {  # for uvicorn
    "http": ImpatientProtocol,
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
