"""The gate in front of the app: who may ask, how much a request may hold, and what every answer says.

A page of another site must not reach the server through the reader's browser. Such a page can only use a foreign Host
(its own name, pointed at this machine) or a foreign Origin, so both are checked on every request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY = 12 * 2**20  # bytes of a request's body
PATIENCE = 30.0  # seconds for a body to arrive
NAMES = ("127.0.0.1", "localhost", "[::1]")


def hosts_of(port: int) -> frozenset[str]:
    """The Host headers of a server on this machine."""
    plain = NAMES if port == 80 else ()
    return frozenset([*plain, *(f"{name}:{port}" for name in NAMES)])


class Guard:
    """Refuses foreign hosts, foreign origins and bodies that are too large; adds headers to every answer."""

    def __init__(self, app: ASGIApp, *, port: int, policy: str, body: int = BODY, patience: float = PATIENCE) -> None:
        self.app, self.body, self.patience = app, body, patience
        self.hosts = hosts_of(port)
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
            await _refuse(guarded, 403, reason)
            return
        try:
            async with asyncio.timeout(self.patience):
                body = await self._read(scope, receive)
        except TimeoutError:
            await _refuse(guarded, 408, f"The request's body did not arrive within {self.patience:g} seconds.")
            return
        except _TooLargeError:
            await _refuse(guarded, 413, f"The request is larger than {self.body / 2**20:g} MB.")
            return
        if body is not None:
            await self.app(scope, _replay(body, receive), guarded)

    def _foreign(self, scope: Scope) -> str | None:
        """Why a request is not from this machine's own page or a script on it."""
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            return "This server answers to its own address only, such as http://127.0.0.1 with its port."
        for origin in _values(scope, b"origin"):
            if origin.lower().removeprefix("http://") not in self.hosts or not origin.lower().startswith("http://"):
                return "This server answers to its own page only, not to pages of other origins."
        if scope["path"].startswith("/api/") and _values(scope, b"sec-fetch-site") in (["cross-site"], ["same-site"]):
            return "This server answers to its own page only, not to pages of other sites."
        return None

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None where the client went away. Nothing is read of one that is announced too large."""
        for length in _values(scope, b"content-length"):
            if length.isdecimal() and int(length[:20]) > self.body:
                raise _TooLargeError
        pieces, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self.body:
                raise _TooLargeError
            if not message.get("more_body", False):
                return b"".join(pieces)


class _TooLargeError(Exception):
    pass


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key.lower() == name]


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then what comes after it."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


async def _refuse(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"error": reason}).encode()
    headers: Iterable[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status in (408, 413):  # what is left of the body is not read
        headers = [*headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
