"""What `simic watch` answers: pages, their files, and runs and evaluations as JSON and as streams of events."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from simic.dashboard.evaluation_view import evaluation_view
from simic.dashboard.live import MAX_STREAMS, LiveDirectory, LiveRun, encode_json
from simic.dashboard.web_security import (
    Access,
    App,
    Receive,
    Refusal,
    Scope,
    SecurityMiddleware,
    Send,
    send_refusal,
)
from simic.storage.printable import printable

STATIC = Path(__file__).parent / "static"
RUN_PAGES = ("now", "growth", "learning", "story")
KEEP_ALIVE_SECONDS = 15.0
"""A stream without news sends a comment so often, so that proxies and browsers keep it open."""
RETRY_MILLISECONDS = 2000
"""A browser that lost its stream asks again after that time."""
CHUNK_BYTES = 1 << 16
"""Sent at a time: a slow reader has to accept only so much in the time that it is given."""
DEFAULT_EVENTS, MAX_EVENTS = 200, 2000
"""Entries of one page of the story."""
MAX_DIGITS = 15
"""Of a number in a request."""
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    **dict.fromkeys((".md", ""), "text/plain; charset=utf-8"),
}
"""Types of the page's files by ending: the table of the system may differ, and with nosniff a wrong type fails."""


class StaticFile(NamedTuple):
    """A file of the page, in memory."""

    content: bytes
    kind: str
    tag: str


def make_app(directory: LiveDirectory, access: Access) -> App:
    """The whole application: `access` decides who may read `directory`."""
    server = _Answers(directory)
    run = "/api/run/{name:path}"
    routes = [
        Route("/", server.page),
        *(Route(f"/run/{{name:path}}/{page}", server.run_page) for page in RUN_PAGES),
        Route("/evaluation/{name:path}", server.evaluation_page),
        Route("/static/{name:path}", server.static),
        Route("/api/runs", server.runs),
        Route(f"{run}/view", server.view),
        Route(f"{run}/stream", server.stream),
        Route(f"{run}/hosts", server.hosts),
        Route(f"{run}/events", server.events),
        Route("/api/evaluation/{name:path}", server.evaluation),
    ]
    handlers: dict[Any, Any] = dict.fromkeys((HTTPException, OSError, ValueError), _refuse)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # an address has one spelling
    return SecurityMiddleware(app, access)


class _Answers:
    """One method per address."""

    def __init__(self, directory: LiveDirectory) -> None:
        self._directory = directory
        self._files = dict(_read_files(STATIC))

    async def page(self, request: Request) -> Response:
        return self._file("index.html", request)

    async def run_page(self, request: Request) -> Response:
        await self._run(request)
        return self._file("index.html", request)

    async def evaluation_page(self, request: Request) -> Response:
        await self._evaluation(request)
        return self._file("index.html", request)

    async def static(self, request: Request) -> Response:
        return self._file(request.path_params["name"], request)

    async def runs(self, request: Request) -> Response:
        return _json(encode_json(await self._directory.listing()))

    async def view(self, request: Request) -> Response:
        run = await self._current_run(request)
        view = await run.view(request.query_params.get("since"))
        return _json(view.body)

    async def stream(self, request: Request) -> Response:
        run = await self._current_run(request)
        since = request.headers.get("last-event-id") or request.query_params.get("since")
        return EventStream(self._directory, run, since)

    async def hosts(self, request: Request) -> Response:
        update = _number(request, "update")
        if update is None:
            raise HTTPException(400, "say which update: ?update=3")
        run = await self._current_run(request)
        return _json(await run.hosts(update))

    async def events(self, request: Request) -> Response:
        numbers = {name: _number(request, name) for name in ("after", "before", "limit")}
        limit = DEFAULT_EVENTS if numbers["limit"] is None else min(max(numbers["limit"], 1), MAX_EVENTS)
        chosen = {name: request.query_params.get(name) or None for name in ("kind", "host", "severity")}
        run = await self._current_run(request)
        return _json(await run.events(**numbers | chosen | {"limit": limit}))

    async def evaluation(self, request: Request) -> Response:
        path = await self._evaluation(request)
        return _json(await asyncio.to_thread(lambda: encode_json(evaluation_view(path))))

    async def _run(self, request: Request) -> LiveRun:
        run = await self._directory.run(request.path_params["name"])
        if run is None:
            raise HTTPException(404, "there is no such run in the watched directory; / lists all")
        return run

    async def _current_run(self, request: Request) -> LiveRun:
        run = await self._run(request)
        await run.catch_up()
        return run

    async def _evaluation(self, request: Request) -> Path:
        path = await self._directory.evaluation(request.path_params["name"])
        if path is None:
            raise HTTPException(404, "there is no such evaluation in the watched directory; / lists all")
        return path

    def _file(self, name: str, request: Request) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404, "there is nothing at this address")
        headers = {"etag": file.tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Pieces(file.content, media_type=file.kind, headers=headers)


class Pieces(Response):
    """A body that is sent in pieces, each after the client accepted the one before."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_pieces(send, bytes(self.body))
        await send({"type": "http.response.body", "body": b""})


class EventStream(Response):
    """Server-sent events: a view, then one per change, from a position on."""

    def __init__(self, directory: LiveDirectory, run: LiveRun, since: str | None) -> None:
        self._directory, self._run, self._since = directory, run, since
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._directory.streams >= MAX_STREAMS:
            sentence = f"{MAX_STREAMS} pages already watch live; close some, or try again later"
            return await send_refusal(scope, send, Refusal(503, sentence, ((b"retry-after", b"5"),)))
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            return await send({"type": "http.response.body", "body": b""})
        self._directory.streams += 1
        try:
            with self._run.watched():
                await _first_of(self._send_views(send), _until_gone(receive))
        finally:
            self._directory.streams -= 1

    async def _send_views(self, send: Send) -> None:
        await _send_pieces(send, f"retry: {RETRY_MILLISECONDS}\n\n".encode())
        version = -1
        while self._run.is_followed and not self._directory.closing:
            if version != self._run.version:
                view = await self._run.view(self._since)
                version, self._since = view.version, view.cursor
                await _send_pieces(send, f"id: {view.cursor}\ndata: ".encode(), view.body, b"\n\n")
            elif not await self._run.wait_for_change(KEEP_ALIVE_SECONDS):
                await _send_pieces(send, b": still here\n\n")
        await send({"type": "http.response.body", "body": b""})


async def _send_pieces(send: Send, *contents: bytes) -> None:
    """Send without copying: a long view is one object for all who read it."""
    for content in contents:
        for start in range(0, len(content), CHUNK_BYTES):
            piece = content[start : start + CHUNK_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends; the others are cancelled."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _read_files(directory: Path) -> Iterator[tuple[str, StaticFile]]:
    """The files of the page by their address below /static/: what is not read here is not served."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            kind = KINDS.get(path.suffix, "application/octet-stream")
            tag = f'"{sha256(content).hexdigest()}"'
            yield path.relative_to(directory).as_posix(), StaticFile(content, kind, tag)


def _number(request: Request, name: str) -> int | None:
    """A whole number of the query; None if it is not given."""
    text = request.query_params.get(name, "")
    if text and not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise HTTPException(400, f"{name} must be a whole number of at most {MAX_DIGITS} digits")
    return int(text) if text else None


def _json(body: bytes) -> Response:
    return Pieces(body, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _Refused(Refusal(error.status_code, error.detail))
    return _Refused(Refusal(500, printable(error)))


class _Refused(Response):
    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_refusal(scope, send, self._refusal)
