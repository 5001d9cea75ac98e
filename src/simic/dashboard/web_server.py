"""Runs the application of `web.py` on a socket: uvicorn with limits for slow and many clients, and a quick stop."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import secrets
import socket
import threading
import webbrowser
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from simic.dashboard.live import LiveDirectory
from simic.dashboard.run_facts import RESULTS_FILE
from simic.dashboard.web import make_app
from simic.dashboard.web_security import MAX_HEAD_BYTES, Access, names_of
from simic.storage.printable import printable
from simic.telemetry.events import FILES

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

HEAD_SECONDS = 5.0
"""A client has so long to send the head of a request, from its connection or the first byte of the request on."""
STALL_SECONDS = 10.0
"""A client has so long to accept what waits for it."""
KEEP_ALIVE_SECONDS = 15
"""An idle connection is closed after that time."""
STOP_SECONDS = 0.5
"""Answers under way have so long to end when the server stops."""
MAX_CONNECTIONS = 400
"""Further ones are closed at once; below the 1,024 files that systems commonly allow a process."""
BACKLOG = 128
REMEDIES = {
    errno.EADDRINUSE: "another program, perhaps another simic watch, uses it: choose another --port, or 0 for any",
    errno.EACCES: "ports below 1024 are for the system: choose another --port",
    errno.EADDRNOTAVAIL: "this machine has no such address: choose another --host",
}


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP protocol, which waits for heads of requests and for readers only so long."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and self._between_requests():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
        super().data_received(data)
        if not self._between_requests():
            self._head_timer = _cancel(self._head_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer, self._stall_timer = _cancel(self._head_timer), _cancel(self._stall_timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # abort, because close would wait for the client to read what is left.
        self._stall_timer = self._stall_timer or self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer = _cancel(self._stall_timer)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class WatchServer(uvicorn.Server):
    """A server that stops within a second, streams or not."""

    def __init__(self, directory: LiveDirectory, access: Access) -> None:
        config = uvicorn.Config(
            make_app(directory, access),
            http=TimedProtocol,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level="error",  # no lines that a client can cause
            access_log=False,  # its lines would hold the token
            proxy_headers=False,  # a client does not say who it is
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        super().__init__(config)
        self._directory = directory
        self.stopped_by = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note the signal; uvicorn would raise it again at the end."""
        self.stopped_by, self.should_exit = sig, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End streams, then whatever does not end by itself."""
        self._directory.close()
        asyncio.get_running_loop().call_later(STOP_SECONDS, self._abort)
        await super().shutdown(sockets)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def serve(path: Path, *, host: str, port: int, use_token: bool, open_browser: bool) -> int:
    """Serve a directory until a signal comes; returns the exit code."""
    address = resolve(host)
    if not use_token and not address.is_loopback:
        raise ValueError(
            f"--no-token is for this machine alone, and {host} can be reached from others: "
            "leave out --no-token, or --host"
        )
    with bind(str(address), port) as listener:
        port = listener.getsockname()[1]
        names, any_address = names_of(str(address))
        access = Access(
            token=secrets.token_urlsafe(32) if use_token else None,
            names=names | {host.lower()},
            any_address=any_address,
            cookie=f"simic_watch_{port}",
        )
        server = WatchServer(LiveDirectory(path), access)
        page = page_address(path, address, port, access.token)
        print(f"simic watch: {printable(path.resolve())}\n  {page}", flush=True)
        if not address.is_loopback:
            print("  Whoever knows this address can read along; it is not encrypted.", flush=True)
        print("  Stop with Ctrl-C.", flush=True)
        if open_browser:
            access.keys.add(key := secrets.token_urlsafe(32))
            page = page_address(path, address, port, key if use_token else None)
            threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()
        asyncio.run(server.serve(sockets=[listener]))
    return 128 + server.stopped_by if server.stopped_by else 0


def page_address(path: Path, address: Address, port: int, token: str | None) -> str:
    """The address of the first page: that of the run or evaluation, if `path` is one."""
    name, page = quote(path.resolve().name, safe=""), "/"
    if any((path / file).is_file() for file in FILES):
        page = f"/run/{name}/now"
    elif (path / RESULTS_FILE).is_file():
        page = f"/evaluation/{name}"
    host = socket.gethostname() if address.is_unspecified else f"[{address}]" if address.version == 6 else str(address)
    return f"http://{host}:{port}{page}" + (f"?token={token}" if token else "")


def resolve(host: str) -> Address:
    """The address to listen on."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"--host must be a name or address of this machine, got {host!r}; try 127.0.0.1") from None
    found.sort(key=lambda info: info[0] != socket.AF_INET)  # localhost is both; browsers try both
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def bind(address: str, port: int) -> socket.socket:
    """A socket that listens; errors say what to do."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port must be from 0 (any free one) to 65535, got {port}")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "choose another with --host and --port")
        raise OSError(f"cannot listen on {address}, port {port}: {os.strerror(error.errno or 0)}; {remedy}") from None
