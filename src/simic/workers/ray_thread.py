"""A thread that makes all calls of Ray, so that a call that never returns cannot hang the program.

Ray waits a minute for a head node that is gone, then ends the process; and a signal handler that raises within one of
its calls becomes a SystemError. The main thread therefore waits in Python, where signals are handled, and may stop
waiting. The thread lives as long as the connection: processes that Ray starts end with the thread that started them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_SECONDS = 3.0
"""How often a caller that waits asks whether waiting still makes sense."""


class RayThread:
    """Runs functions one after the other. It is never joined: what hangs in it is left behind."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="simic-ray", daemon=True).start()

    def call(self, function: Callable[..., T], *arguments: Any, look: Callable[[], None] = lambda: None) -> T:
        """What the function returns or raises. While it has not, `look` is called now and then and may raise."""
        done, outcome = threading.Event(), dict[str, Any]()

        def run() -> None:
            try:
                outcome["result"] = function(*arguments)
            except BaseException as error:
                outcome["error"] = error
            done.set()

        self._calls.put(run)
        while not done.wait(LOOK_SECONDS):
            look()
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]

    def end(self) -> None:
        """Let the thread end after what it is doing."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
