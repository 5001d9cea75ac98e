"""A real server of `simic watch` in a thread, and clients that speak to it through plain sockets."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from simic.dashboard.live import LiveDirectory
from simic.dashboard.web_security import Access
from simic.dashboard.web_server import WatchServer, bind

TOKEN = "the-token"


class Answer(NamedTuple):
    """An answer of the server."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Watched:
    """A server under way, and the cookie that opens it."""

    def __init__(self, directory: Path, access: Access) -> None:
        self.directory, self.access = LiveDirectory(directory), access
        self.server = WatchServer(self.directory, access)
        self._listener = bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self.cookie = f"{access.cookie}={access.session}"
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        asyncio.run(self.server.serve(sockets=[self._listener]))

    def get(self, path: str, *, method: str = "GET", cookie: bool = True, **headers: str) -> Answer:
        """The answer to a request as a browser with the cookie sends it; underscores in headers are dashes."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, headers={"Cookie": self.cookie, **sent} if cookie else sent)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def raw(self, request: bytes, *, seconds: float = 10) -> bytes:
        """What the server answers to bytes, until it closes or waits for more."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as client:
            client.sendall(request)
            return read_all(client)

    def connect(
        self, path: str, *, method: str = "GET", receive_bytes: int | None = None, **headers: str
    ) -> socket.socket:
        """A connection on which a request was sent and nothing was read."""
        client = socket.socket()
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(10)
        client.connect(("127.0.0.1", self.port))
        extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        client.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nCookie: {self.cookie}\r\n{extra}\r\n".encode())
        return client

    @contextmanager
    def stream(self, run: str, query: str = "", **headers: str) -> Iterator[Iterator[tuple[str, Any]]]:
        """The messages of a run's stream: (id, view)."""
        address = f"/api/run/{run}/stream{query}"
        with (
            self.connect(address, method="GET", receive_bytes=None, **headers) as client,
            client.makefile("rb") as file,
        ):
            status = file.readline()
            assert b" 200 " in status, status
            yield _messages(file)

    def stop(self) -> float:
        """Stop the server as a signal does; returns the seconds it took."""
        start = time.monotonic()
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive(), "the server did not stop"
        return time.monotonic() - start


@contextmanager
def watching(directory: Path, **access: Any) -> Iterator[Watched]:
    """A server of a directory while this is open."""
    watched = Watched(directory, Access(**{"token": TOKEN, **access}))
    watched.thread.start()
    try:
        while not watched.server.started:
            time.sleep(0.01)
        yield watched
    finally:
        watched.stop()


def _messages(file: Any) -> Iterator[tuple[str, Any]]:
    """Server-sent events with data. The pieces of HTTP chunks are joined by leaving out their lengths."""
    text = b""
    while True:
        while b"\n\n" not in text:
            size = file.readline()
            if not size:
                return
            if not size.strip() or b":" in size:
                continue  # end of a chunk, or a header
            text += file.read(int(size, 16))
        event, _, text = text.partition(b"\n\n")
        fields = dict(line.split(b": ", 1) for line in event.split(b"\n") if not line.startswith(b":"))
        if b"data" in fields:
            yield fields[b"id"].decode(), json.loads(fields[b"data"])


def read_all(client: socket.socket) -> bytes:
    """What comes until the server closes, or nothing comes any more."""
    received = b""
    try:
        while piece := client.recv(65536):
            received += piece
    except (TimeoutError, ConnectionResetError):
        pass
    return received
