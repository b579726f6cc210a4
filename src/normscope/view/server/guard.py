"""Middleware in front of the app: checks hosts, origins and body sizes, and adds security headers.

Pages of other sites must not reach the server through the user's browser. Such a page can only use a foreign Host (its
own name, resolved to this machine) or a foreign Origin, so both are checked on every request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY = 12 * 2**20  # maximum bytes of a request's body
PATIENCE = 30.0  # seconds to wait for a body
NAMES = ("127.0.0.1", "localhost", "[::1]")


def guard_allowed_hosts(port: int) -> frozenset[str]:
    """The valid Host headers of a local server."""
    plain = NAMES if port == 80 else ()
    return frozenset([*plain, *(f"{name}:{port}" for name in NAMES)])


class Guard:
    """Refuses foreign hosts, foreign origins and large bodies; adds security headers to every response."""

    def __init__(self, app: ASGIApp, *, port: int, policy: str, body: int = BODY, patience: float = PATIENCE) -> None:
        self.app, self.body, self.patience = app, body, patience
        self.hosts = guard_allowed_hosts(port)
        self.headers = [
            (b"content-security-policy", f"{policy}; frame-ancestors 'none'".encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"x-frame-options", b"DENY"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self.headers]
            await send(message)

        reason = self._foreign(scope)
        if reason is not None:
            await _send_refusal(guarded, 403, reason)
            return
        try:
            async with asyncio.timeout(self.patience):
                body = await self._read(scope, receive)
        except TimeoutError:
            await _send_refusal(guarded, 408, f"The request's body did not arrive within {self.patience:g} seconds.")
            return
        except _BodyTooLargeError:
            await _send_refusal(guarded, 413, f"The request is larger than {self.body / 2**20:g} MB.")
            return
        if body is not None:
            await self.app(scope, _replayed_body(body, receive), guarded)

    def _foreign(self, scope: Scope) -> str | None:
        """Why a request is refused as foreign; None if it comes from the server's own page or a local script."""
        hosts = _header_values(scope, b"host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return "This server answers to its own address only, such as http://127.0.0.1 with its port."
        for origin in _header_values(scope, b"origin"):
            if origin.lower().removeprefix("http://") not in self.hosts or not origin.lower().startswith("http://"):
                return "This server answers to its own page only, not to pages of other origins."
        if scope["path"].startswith("/api/") and _header_values(scope, b"sec-fetch-site") in (
            ["cross-site"],
            ["same-site"],
        ):
            return "This server answers to its own page only, not to pages of other sites."
        return None

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client disconnected. A body announced as too large is not read."""
        for length in _header_values(scope, b"content-length"):
            if length.isdecimal() and int(length[:20]) > self.body:
                raise _BodyTooLargeError
        pieces, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self.body:
                raise _BodyTooLargeError
            if not message.get("more_body", False):
                return b"".join(pieces)


class _BodyTooLargeError(Exception):
    pass


def _header_values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key.lower() == name]


def _replayed_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body as one message, then passes on later messages."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _send_refusal(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason}).encode()
    headers: Iterable[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status in (408, 413):  # the rest of the body is not read
        headers = [*headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
