"""Runs that somebody watches: one reader per run, shared by all who watch it.

    files of a run  --refresh, in a thread-->  LiveRun  --one message per change-->  every stream

A run is read on only while a stream is open on it. The messages of one state are encoded once per position they
continue from, which is the same for all who are up to date. Runs that nobody watches are forgotten, the longest unused
first.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from simic.dashboard.evaluation_view import evaluation_list
from simic.dashboard.run_list import run_list
from simic.dashboard.run_view import RunWatcher
from simic.storage.printable import printable

T = TypeVar("T")

POLL_SECONDS = 0.25
"""Between two looks at the files of a watched run."""
NOW_SECONDS = 1.0
"""Between two looks at what changes without an event."""
SLICE_SECONDS = 0.2
"""Reading at a stretch: a server that is told to stop waits for no more than that."""
CATCH_UP_SECONDS = 3.0
"""An answer waits so long for the rest of a run to be read; then it holds what was read."""
LIST_SECONDS = 1.0
"""How long a listing of the directory is used."""
MAX_IDLE = 16
"""Runs kept in memory that nobody watches."""
MAX_VIEWS = 8
"""Encoded views kept of one state of a run."""
MAX_STREAMS = 64
"""Open streams of all runs together."""


class Encoded(NamedTuple):
    """A view as JSON, the version of the run that it shows, and the position that the next one continues from."""

    version: int
    cursor: str
    body: bytes


class LiveRun:
    """A run in memory. Its state is used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._watcher = RunWatcher(path)
        self._loop = asyncio.get_running_loop()
        self._turn, self._in_use = asyncio.Lock(), threading.Lock()
        self._changed = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._views: dict[str | None, Encoded] = {}
        self._now: dict[str, Any] | None = None  # as it was told last
        self._looked = time.monotonic()
        self.viewers, self.version = 0, 0

    async def catch_up(self) -> None:
        """Read what is new, or much of it: `watched` does the rest."""
        deadline = time.monotonic() + CATCH_UP_SECONDS
        await self._read_on()
        while self._watcher.more and time.monotonic() < deadline:
            await self._read_on()

    async def view(self, since: str | None) -> Encoded:
        """What happened since a position, as far as the run was read; all of it for None."""
        async with self._turn:
            if since in self._views:
                return self._views[since]
            version, (cursor, body) = self.version, await self._in_thread(lambda: self._encode(since))
            view = Encoded(version, cursor, body)
            if version == self.version and len(self._views) < MAX_VIEWS:
                self._views[since] = view
            return view

    async def hosts(self, update: int) -> bytes:
        """The traced hosts of an earlier update, as JSON."""
        return await self._call(lambda: encode_json(self._watcher.hosts(update)))

    async def events(self, **chosen: Any) -> bytes:
        """A page of the story, as JSON."""
        return await self._call(lambda: encode_json(self._watcher.events(**chosen)))

    def forget_views(self) -> None:
        """Free the memory of encoded views, which are large; they are made again when asked for."""
        self._views.clear()

    @property
    def is_followed(self) -> bool:
        """Whether it is read on; also False after an error that a new request will report."""
        return self._follower is not None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this is open, the run is read on."""
        self.viewers += 1
        if self._follower is None:
            self._follower = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            self.viewers -= 1

    async def wait_for_change(self, seconds: float) -> bool:
        """Whether the run changed, or `wake` was called, within some seconds."""
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        """Let all who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _follow(self) -> None:
        """Read on until nobody watches."""
        try:
            while self.viewers:
                with suppress(OSError):  # the disk may come back
                    await self._read_on()
                await asyncio.sleep(0 if self._watcher.more else POLL_SECONDS)
        finally:
            self._follower = None
            self.wake()

    async def _read_on(self) -> None:
        await self._call(self._refresh)
        if self.version == 0:
            self._advance()

    def _refresh(self) -> None:
        # Told from here, because whoever asked may be gone when the thread is done.
        if self._watcher.refresh(SLICE_SECONDS) or self._now_changed():
            self._loop.call_soon_threadsafe(self._advance)

    def _now_changed(self) -> bool:
        """Whether something changed that no event tells, such as the scores of the comparison at the end."""
        if self._now is None or time.monotonic() - self._looked < NOW_SECONDS:
            return False
        self._looked = time.monotonic()
        return self._watcher.view(str(self._watcher.cursor))["now"] != self._now

    def _advance(self) -> None:
        self.version += 1
        self.forget_views()
        self.wake()

    async def _call(self, function: Callable[[], T]) -> T:
        async with self._turn:
            return await self._in_thread(function)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        def call() -> T:
            # `_turn` is given up when a client leaves, while its thread still works.
            with self._in_use:
                return function()

        return await asyncio.to_thread(call)

    def _encode(self, since: str | None) -> tuple[str, bytes]:
        view = self._watcher.view(since)
        self._now = view["now"]
        return view["cursor"], encode_json(view)


class LiveDirectory:
    """The runs and evaluations of a directory, by the ids of its own listing: no path comes from a request."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.closing = False
        self.streams = 0
        self._live: OrderedDict[str, LiveRun] = OrderedDict()
        self._turn = asyncio.Lock()
        self._listing: dict[str, Any] = {}
        self._paths: dict[str, dict[str, Path]] = {}
        self._listed = float("-inf")

    async def listing(self) -> dict[str, Any]:
        """All runs and evaluations; at most LIST_SECONDS old."""
        async with self._turn:
            if time.monotonic() - self._listed > LIST_SECONDS:
                found = await asyncio.to_thread(_list, self.root)
                self._listing = {"directory": printable(self.root.resolve()), **found}
                self._paths = {kind: {e["id"]: _path(self.root, e["id"]) for e in found[kind]} for kind in found}
                self._forget(name for name in self._live if name not in self._paths["runs"])
                self._listed = time.monotonic()
            return self._listing

    async def run(self, name: str) -> LiveRun | None:
        """The run with that id; None if there is none."""
        if name not in self._live:
            path = await self._path("runs", name)
            if path is None:
                return None
            self._live.setdefault(name, LiveRun(path))
        self._live.move_to_end(name)
        live = self._live[name]
        idle = [own for own, other in self._live.items() if not other.viewers and other is not live]
        for own in idle:
            self._live[own].forget_views()
        self._forget(idle[: max(len(idle) - MAX_IDLE, 0)])
        return live

    async def evaluation(self, name: str) -> Path | None:
        """The directory of the evaluation with that id; None if there is none."""
        return await self._path("evaluations", name)

    def close(self) -> None:
        """End all streams."""
        self.closing = True
        for live in self._live.values():
            live.wake()

    def _forget(self, names: Iterable[str]) -> None:
        for name in list(names):
            if not self._live[name].viewers:
                del self._live[name]

    async def _path(self, kind: str, name: str) -> Path | None:
        if name not in self._paths.get(kind, {}):
            await self.listing()  # it may be new
        return self._paths[kind].get(name)


def encode_json(value: Any) -> bytes:
    """Compact JSON in ASCII, on one line."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _list(root: Path) -> dict[str, list[dict[str, Any]]]:
    found = {"runs": run_list(root), "evaluations": evaluation_list(root)}
    return {kind: [entry for entry in entries if _is_text(entry["id"])] for kind, entries in found.items()}


def _path(root: Path, name: str) -> Path:
    """The directory of an entry of the listing; the root itself is listed by its name, if it is a run."""
    return root if name == root.resolve().name and not (root / name).is_dir() else root / name


def _is_text(name: str) -> bool:
    """Whether a name of the file system can be part of an address: it may be any bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in name)
