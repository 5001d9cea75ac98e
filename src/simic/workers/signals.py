"""Stopping by signal: the first one ends the run at the next safe moment, the second kills."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """The run was asked to stop. Raised wherever it stands, unless it is in a region that must be finished."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells have it."""
        return 128 + self.number


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle signals that come meanwhile afterwards, whichever thread the kernel gives them to.

    Blocking them in this thread is not enough: where a library has threads of its own, one of those receives the
    signal, and Python still runs the handler here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


class StopSignals:
    """Turns SIGINT and SIGTERM into `Stopped`."""

    def __init__(self) -> None:
        self._holding, self._pending = 0, 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts signals raise; afterwards they do what they did before.

        Python hands signals to the main thread alone: a run in another thread leaves them to the program around it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A region that must be finished: a signal that comes in it raises at its end."""
        self._holding += 1
        try:
            yield
        finally:
            self._holding -= 1
        if self._pending and not self._holding:
            number, self._pending = self._pending, 0
            raise Stopped(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        for other in SIGNALS:  # the next one kills
            signal.signal(other, signal.SIG_DFL)
        self._pending = number  # also if it raises now: Python drops what is raised while an object is finalised
        if not self._holding:
            raise Stopped(number)
