"""Headless Chromium, servers of `simic watch` and runs under way, for tests of the page."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SMALL = (
    *("--num-groups=1", "--group-size=4", "--workers=0", "--episode.horizon=8"),
    *("--policy.hidden-size=16", "--policy.encoding-size=16", "--ppo.ppo-epochs=1", "--ppo.num-minibatches=1"),
)
"""Flags of a run whose updates take less than a second."""


def find_browser() -> str:
    """The path of Chromium: SIMIC_BROWSER, or the one that is installed."""
    named = os.environ.get("SIMIC_BROWSER")
    found = next(filter(None, map(shutil.which, [named] if named else BROWSERS)), None)
    if found is None:
        raise RuntimeError("the page is tested in Chromium: apt-get install chromium, or set SIMIC_BROWSER to its path")
    return found


@contextmanager
def training(out: Path, *flags: str) -> Iterator[None]:
    """`simic train` as a process of its own, under way, and stopped in the end as by a user."""
    command = [sys.executable, "-m", "simic.cli", "train", f"--out={out}", *SMALL, *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


class Server(NamedTuple):
    """A server of `simic watch`."""

    base: str
    """The address without a path."""
    token: str
    """The query that opens it; empty where there is no token."""


@contextmanager
def serving(directory: Path, *flags: str) -> Iterator[Server]:
    """`simic watch` as a process of its own."""
    command = [sys.executable, "-m", "simic.cli", "watch", str(directory), *(flags or ["--port=0"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield _printed_address(process)
        finally:
            process.terminate()
            process.communicate(timeout=20)


def _printed_address(process: "subprocess.Popen[str]") -> Server:
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if found := re.search(r"(http://[^/\s]+)/?\S*?(\?token=\S+)?\s*$", line):
            return Server(found[1], found[2] or "")
    raise RuntimeError(f"simic watch ended: {''.join(printed)}")


def wait_for(what: Any, seconds: float = 60) -> Any:
    """The first true value of a function."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, f"still {value!r} after {seconds} s"
        time.sleep(0.1)
    return value
