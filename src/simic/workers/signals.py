"""Stop signals: the first SIGINT or SIGTERM ends a run at the next safe point, the second kills the process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """Raised by a stop signal, immediately or at the end of a `held` region. No `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """128 + the signal number, the convention of shells."""
        return 128 + self.number


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle stop signals with `handler`, then restore the previous handlers.

    Python delivers signals to the main thread only: other threads leave them to the program around them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Handle signals that arrive in this block after it, whichever thread receives them.

    Blocking them in this thread is not enough: a thread of a library may receive the signal, and Python still runs the
    handler in the main thread.
    """
    arrived: list[int] = []
    try:
        with _handling(lambda number, frame: arrived.append(number)):
            yield
    finally:
        for number in arrived[:1]:
            signal.raise_signal(number)


class StopSignals:
    """Turns SIGINT and SIGTERM into `Stopped`."""

    def __init__(self) -> None:
        self._holding, self._pending = 0, 0
        self._received = False

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """A block around `watched`: what a signal interrupted may fail in its finalizer, and nobody has to know."""
        before = sys.unraisablehook
        sys.unraisablehook = lambda about: None if self._received else before(about)
        try:
            yield
        finally:
            sys.unraisablehook = before

    def watched(self) -> AbstractContextManager[None]:
        """Signals raise `Stopped` in this block; the previous handlers are restored after it."""
        return _handling(self._receive)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block that must be completed: a signal that arrives in it raises at its end."""
        self._holding += 1
        try:
            yield
        finally:
            self._holding -= 1
        if self._pending and not self._holding:
            number, self._pending = self._pending, 0
            raise Stopped(number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        for other in SIGNALS:  # the next signal kills
            signal.signal(other, signal.SIG_DFL)
        self._received = True
        self._pending = number  # kept in any case: Python ignores exceptions that are raised in finalizers
        if not self._holding:
            raise Stopped(number)
