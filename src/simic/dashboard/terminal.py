"""simic watch --terminal: a run on the terminal, live, also over SSH. The same state as the web page."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from simic.dashboard.run_list import run_list
from simic.dashboard.run_view import RunWatcher
from simic.dashboard.terminal_screen import Picture, draw
from simic.storage.run_directory import RunDirectory

POLL_SECONDS = 0.5
KEY = re.compile(rb"(?P<up>\x1b[\[O]A|k)|(?P<down>\x1b[\[O]B|j)|(?P<quit>[qQ])")
"""What the bytes of a key mean; some terminals send O for [."""


def watch_in_terminal(path: Path, *, console: Console | None = None, until: Callable[[], bool] = lambda: False) -> int:
    """Show the run at `path`, or the newest run below it, until q or Ctrl-C; one snapshot if there is no terminal.

    The view also ends, after a last look, as soon as `until` returns True.
    """
    console = console or Console(highlight=False)
    watcher = RunWatcher(newest_run(path))
    if not has_screen(console):
        watcher.refresh()
        picture = Picture()
        picture.add(watcher.view(None))
        for line in draw(picture, console.width, None, unicode=_has_unicode(console)):
            console.print(line, soft_wrap=True)
        return 0
    return _Screen(watcher, console, until).run()


def has_screen(console: Console) -> bool:
    """Whether a view can be drawn again and again in the same place."""
    return console.is_terminal and not console.is_dumb_terminal


def newest_run(path: Path) -> Path:
    """The run at a path, also one that is only beginning; of a directory of runs the newest."""
    own = RunDirectory(path)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no run {path}; `simic runs` lists runs")
    if any(file.is_file() for file in (own.process, own.events, own.lock_file)):
        return path
    runs = run_list(path)
    if not runs:
        raise ValueError(f"{path} holds no events: it is neither a run nor a directory of runs")
    return path / runs[0]["id"]


def _has_unicode(console: Console) -> bool:
    return not console.options.ascii_only


class _Screen:
    """The terminal while it shows a run."""

    def __init__(self, watcher: RunWatcher, console: Console, until: Callable[[], bool]) -> None:
        self._watcher, self._console, self._until, self._picture = watcher, console, until, Picture()
        self._cursor: str | None = None
        self._selected, self._suspended = 0, False

    def run(self) -> int:
        """Show the run until the user quits."""
        with _signals(self._suspend):
            while True:
                with ExitStack() as stack:
                    read_keys = stack.enter_context(_keys())
                    live = stack.enter_context(Live(console=self._console, screen=True, auto_refresh=False))
                    try:
                        self._show(live, read_keys)
                    except KeyboardInterrupt:
                        return 0
                if not self._suspended:
                    return 0
                self._suspended = False
                os.kill(os.getpid(), signal.SIGSTOP)  # as Ctrl-Z does, with the terminal as it was

    def _show(self, live: Live, read_keys: Callable[[float], list[str]]) -> None:
        while not self._suspended:
            is_last = self._until()  # asked before the look, so that the look has everything
            self._refresh()
            live.update(self._draw(), refresh=True)
            if is_last:
                return
            for key in read_keys(POLL_SECONDS):
                if key == "quit":
                    return
                self._selected += 1 if key == "down" else -1

    def _refresh(self) -> None:
        self._watcher.refresh(POLL_SECONDS)  # keys are not kept waiting by a long run
        view = self._watcher.view(self._cursor)
        self._cursor = view["cursor"]
        self._picture.add(view)
        self._selected = min(max(self._selected, 0), max(len(self._picture.hosts) - 1, 0))

    def _draw(self) -> Group:
        width, height = self._console.size
        many = len(self._picture.hosts) > 1
        keys = "q quit" + (f"  up/down other hosts ({self._selected + 1}/{len(self._picture.hosts)})" if many else "")
        unicode = _has_unicode(self._console)
        return Group(*draw(self._picture, width, height, selected=self._selected, keys=keys, unicode=unicode))

    def _suspend(self) -> None:
        self._suspended = True


@contextmanager
def _signals(suspend: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGHUP end the process by an exception, so that the terminal is restored; Ctrl-Z suspends it."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    handlers: dict[int, Any] = {
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGTSTP: lambda number, frame: suspend(),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _keys() -> Iterator[Callable[[float], list[str]]]:
    """A function that waits at most so many seconds for keys; without a terminal on stdin there are none."""
    if not sys.stdin.isatty():
        yield _no_keys
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read(seconds: float) -> list[str]:
        if not select.select([descriptor], [], [], seconds)[0]:
            return []
        pressed = os.read(descriptor, 64)
        return [str(key.lastgroup) for key in KEY.finditer(pressed)] if pressed else ["quit"]  # the terminal is gone

    tty.setcbreak(descriptor, termios.TCSADRAIN)  # keys that were typed ahead count
    try:
        yield read
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_keys(seconds: float) -> list[str]:
    time.sleep(seconds)
    return []
