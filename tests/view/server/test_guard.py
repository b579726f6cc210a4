"""Allowed clients, limits on requests, and the headers of every answer."""

import http.client
import json
import socket
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from normscope.view.server.listening import listen
from tests.helpers.kinds import lenses
from tests.helpers.live import PATIENCE, Live, live

GOOD = {"model": "tiny-encoder", "text": "the cat"}


def raw(server: Live, data: bytes) -> bytes:
    """The server's answer to these bytes, until it is complete or the connection closes."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        said = b""
        with suppress(BrokenPipeError, ConnectionResetError):  # it may close before everything is sent
            connection.sendall(data)
        with suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                said += piece
                head, _, body = said.partition(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if length and len(body) >= int(length[0].split(b":")[1]):
                    break
        return said


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_own_hosts(server: Live, host: str) -> None:
    answer = server.client.get("/api/models", headers={"Host": host.format(port=server.port)})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost.evil.example:{port}",
        "evil.example#127.0.0.1:{port}",
        "0.0.0.0:{port}",
        "127.0.0.2:{port}",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/", "/viewer.js", "/api/models", "/api/openapi.json"])
def test_foreign_hosts(server: Live, host: str, path: str) -> None:
    answer = server.client.get(path, headers={"Host": host.format(port=server.port)})
    assert answer.status_code == 403
    assert "own address" in answer.json()["error"]


def test_no_host_and_two_hosts(server: Live) -> None:
    assert raw(server, b"GET /api/models HTTP/1.0\r\n\r\n").split()[1] in (b"400", b"403")
    hosts = f"Host: 127.0.0.1:{server.port}\r\nHost: evil.example\r\n".encode()
    assert raw(server, b"GET /api/models HTTP/1.1\r\n" + hosts + b"\r\n").split()[1] in (b"400", b"403")


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1", "127.0.0.1:{port}", ""]
)
def test_foreign_origins(server: Live, method: str, origin: str) -> None:
    headers = {"Origin": origin.format(port=server.port)}
    answer = server.client.request(method, "/api/analyses", headers=headers, json=GOOD)
    assert answer.status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_own_origin(server: Live) -> None:
    for name in ("127.0.0.1", "localhost"):
        headers = {"Origin": f"http://{name}:{server.port}"}
        answer = server.client.post("/api/analyses", headers=headers, json=GOOD)
        assert answer.status_code == 201
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_requests_that_another_site_caused(server: Live) -> None:
    assert server.client.get("/api/models", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert server.client.get("/api/models", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200
    assert server.client.get("/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200  # a link to the page


@pytest.mark.parametrize("path", ["/", "/viewer.js", "/api/models", "/nowhere", "/api/analyses/x"])
def test_headers_of_every_answer(server: Live, path: str) -> None:
    headers = server.client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    assert "server" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/..%2f..%2fetc/passwd",
        "/static/viewer.js",
        "/viewer.js/../page.py",
        "/%2e%2e/page.py",
        "//etc/passwd",
        "/viewer.js%00.html",
        "/widget.js",
    ],
)
def test_nothing_else_is_served(server: Live, path: str) -> None:
    said = raw(server, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
    assert said.split()[1] == b"404"


def test_methods(server: Live) -> None:
    assert server.client.post("/").status_code == 405
    assert server.client.put("/api/analyses", json=GOOD).status_code == 405
    assert "error" in server.client.put("/api/analyses", json=GOOD).json()


@pytest.fixture(scope="module")
def small() -> Any:
    """A server that accepts 4 kB."""
    with live(lenses(), body=4096) as found:
        yield found


def test_a_body_that_is_announced_too_large(small: Live) -> None:
    head = f"POST /api/analyses HTTP/1.1\r\nHost: 127.0.0.1:{small.port}\r\nContent-Type: application/json\r\n"
    said = raw(small, f"{head}Content-Length: 5000\r\n\r\n".encode())  # the body never comes
    assert said.split()[1] == b"413"
    assert b'{"error": "The request is larger than' in said
    said = raw(small, f"{head}Content-Length: {'9' * 30}\r\n\r\n".encode())
    assert said.split()[1] in (b"400", b"413")


def test_a_body_without_a_length_that_is_too_large(small: Live) -> None:
    """Refused while it is read, however long it goes on."""
    connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=PATIENCE)
    sent = 0

    def pieces() -> Any:
        nonlocal sent
        for _ in range(100_000):
            sent += 1024
            yield b"x" * 1024

    try:
        connection.request("POST", "/api/analyses", pieces(), {"Content-Type": "application/json"}, encode_chunked=True)
    except (BrokenPipeError, ConnectionResetError):
        pass
    else:
        pytest.fail("everything was taken")
    assert sent < 50_000_000
    assert small.client.get("/api/models").status_code == 200


def test_a_chunked_body_that_fits(small: Live) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=PATIENCE)
    text = json.dumps(GOOD).encode()
    connection.request(
        "POST", "/api/analyses", iter([text[:10], text[10:]]), {"Content-Type": "application/json"}, encode_chunked=True
    )
    assert connection.getresponse().status == 201


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"\xff\xfe",
        b"[" * 4000,
        b'{"model": "tiny-encoder", "text": "\\ud800"}',
        b'{"model": "tiny-encoder", "text": "a", "\\ud800": 1}',
        b'{"model": "tiny-encoder", "text": "a", "generate": ' + b"9" * 2000 + b"}",
        b'{"model": "tiny-encoder", "text": "a", "generate": NaN}',
        b'{"model": "tiny-encoder", "text": "a", "generate": 1e999}',
        b'{"model": "tiny-encoder"} trailing',
    ],
)
def test_malformed_bodies(small: Live, body: bytes) -> None:
    answer = small.client.post("/api/analyses", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert list(answer.json()) == ["error"]


def test_bodies_of_another_kind(small: Live) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = small.client.post("/api/analyses", content=json.dumps(GOOD), headers={"Content-Type": kind})
        assert answer.status_code in (400, 415, 422)


def test_a_client_that_disconnects_while_sending(small: Live) -> None:
    head = f"POST /api/analyses HTTP/1.1\r\nHost: 127.0.0.1:{small.port}\r\nContent-Length: 100\r\n\r\n".encode()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", small.port)) as connection:
            connection.sendall(head + b"{")
    assert small.client.get("/api/models").status_code == 200


def test_a_body_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.view.server.guard.Guard.__init__.__kwdefaults__", {"body": 4096, "patience": 0.2})
    with live(lenses()) as server:
        head = f"POST /api/analyses HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: 100\r\n\r\n"
        said = raw(server, head.encode() + b"{")
        assert said.split()[1] == b"408"
        assert b"did not arrive within 0.2 seconds" in said
        assert server.client.get("/api/models").status_code == 200


def test_only_this_machine() -> None:
    """The server listens on the loopback address alone, and sends without delay."""
    with listen(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.proto == socket.IPPROTO_TCP


def test_answers_are_not_held_back(server: Live) -> None:
    """Without TCP_NODELAY every answer would take 40 ms."""
    assert server.client.get("/api/models").status_code == 200  # the connection is kept
    found = [one.transport.get_extra_info("socket") for one in list(server.server.server_state.connections)]
    assert found
    assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in found)


def test_an_idle_connection_is_kept(server: Live) -> None:
    """Clients drop a connection after 5 s without use; a server that closes first sometimes loses a request."""
    assert server.server.config.timeout_keep_alive > 2 * 5
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    connection.connect()
    kept = connection.sock
    for _ in range(2):
        connection.request("GET", "/api/models")
        assert connection.getresponse().read()
    assert connection.sock is kept
    connection.close()


def test_clients_that_send_half_a_head_do_not_keep_others_out() -> None:
    """More of them than uvicorn serves at once; the connections of those that are closed see it."""
    with live({"tiny-encoder": lenses()["tiny-encoder"]}) as server, ExitStack() as held:
        silent = []
        for _ in range(300):
            silent.append(held.enter_context(socket.create_connection(("127.0.0.1", server.port), PATIENCE)))
            silent[-1].sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert server.client.get("/api/models").status_code == 200
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
        own = f"127.0.0.1:{server.port}".encode()
        silent[-1].sendall(own + b"\r\nConnection: close\r\n\r\n")  # the latest ones are still served
        assert silent[-1].recv(15).startswith(b"HTTP/1.1 200")
