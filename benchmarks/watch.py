"""What `simic watch` costs: time and memory for a long run, delay from an event to a client, and CPU of a watched run.

Run: python benchmarks/watch.py. The server is a process of its own, as a user starts it.

Two trainings of the same rng seed run side by side, so that they do the same work in every update. Each is watched in
every second update, the one in the even ones, the other in the odd ones: an update's CPU time watched over unwatched
has neither the difference between processes in it nor that between updates.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from long_run import write_long_run

from simic.telemetry.events import Update, to_json

EVENTS = 100_000
FIRST_VIEWS = 5
MESSAGES, PAUSE = 60, 0.17
"""Events whose delay is measured, and seconds between them, which is no part of the time between two looks."""
UPDATES, WARM_UP = 60, 4
TRAINING = (
    *("--task", "mlp", "--updates", str(UPDATES), "--num-groups", "1", "--group-size", "8", "--horizon", "8"),
    *("--workers", "0", "--compare", "0", "--checkpoint-every", "1000", "--quiet"),
)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


CORE = min(os.sched_getaffinity(0))
"""Both trainings run on this core: what other programs do then slows both alike."""


class Server:
    """A server under way, and what it used."""

    def __init__(self, process: subprocess.Popen[str], port: int, token: str) -> None:
        self.pid, self.port = process.pid, port
        connection, answer = self.ask(f"/?token={token}")
        self.cookie = answer.headers["set-cookie"].partition(";")[0]
        connection.close()

    def ask(self, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A connection, and the answer on it, whose body is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers={"Cookie": getattr(self, "cookie", "")})
        return connection, connection.getresponse()

    def memory_mb(self) -> float:
        """Its largest size so far."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found
        return int(found[1]) / 1024

    def messages(self, run: str) -> Generator[dict[str, Any]]:
        """The views of a stream."""
        connection, answer = self.ask(f"/api/run/{run}/stream")
        try:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        finally:
            answer.close()
            connection.close()


@contextmanager
def serve(directory: Path) -> Iterator[Server]:
    """A server of a directory in a process of its own."""
    command = [sys.executable, "-m", "simic.cli", "watch", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        found = None
        while found is None:
            found = re.search(r":(\d+)/\S*\?token=(\S+)", process.stdout.readline())
        try:
            yield Server(process, int(found[1]), found[2])
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    """CPU time that a process used so far, all its threads together, in nanoseconds' resolution."""
    return time.clock_gettime((~pid << 3) | 2)  # the clock of another process: clock_getcpuclockid(3)


class FirstView(NamedTuple):
    """What the data of the first view of a run cost that nobody watched yet."""

    seconds: float
    cpu_seconds: float
    sent_mb: float
    server_mb: float


def first_view(directory: Path) -> FirstView:
    """The quickest of some first views, each of a server of its own."""
    write_long_run(directory / "long", EVENTS)
    found = []
    for _ in range(FIRST_VIEWS):
        with serve(directory) as server:
            start, used = time.perf_counter(), cpu_seconds(server.pid)
            connection, answer = server.ask("/api/run/long/view")
            body = answer.read()
            view = json.loads(body)
            seconds, used = time.perf_counter() - start, cpu_seconds(server.pid) - used
            connection.close()
            assert view["story"]["total"] > EVENTS / 2
            found.append(FirstView(seconds, used, len(body) / 2**20, server.memory_mb()))
    return min(found)


def delays(directory: Path) -> list[float]:
    """Milliseconds from an event on disk to the client that has read it, on the long run."""
    with serve(directory) as server, (directory / "long" / "events.jsonl").open("ab", buffering=0) as file:
        messages, found = server.messages("long"), []
        last = next(messages)["now"]["update"]
        for update in range(last, last + MESSAGES):
            time.sleep(PAUSE)
            file.write(to_json(Update(update=update, metrics={"score": 1.0})).encode() + b"\n")
            start = time.perf_counter()
            while all(row["update"] != update for row in next(messages)["learning"]["rows"]):
                pass
            found.append(1000 * (time.perf_counter() - start))
        messages.close()
    return found


class Training:
    """A training process, and the CPU time of each of its updates."""

    def __init__(self, directory: Path, server: Server, watched: int) -> None:
        self._path, self._server, self._watched = directory, server, watched
        command = [sys.executable, "-m", "simic.cli", "train", *TRAINING, "--out", str(directory)]
        self._process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        os.sched_setaffinity(self._process.pid, {CORE})
        self.seconds: list[float] = []

    def follow(self) -> None:
        """Note the CPU time after every update, and watch the next one or leave it alone."""
        before, viewer = 0.0, None
        for update in range(UPDATES):
            self._wait_for(update)
            if viewer is not None:
                viewer.close()
            used = cpu_seconds(self._process.pid)
            self.seconds.append(used - before)
            before = used
            viewer = Viewer(self._server, self._path.name) if (update + 1) % 2 == self._watched else None
        if viewer is not None:
            viewer.close()
        if self._process.wait() != 0:
            raise RuntimeError(f"the training in {self._path} failed")

    def _wait_for(self, update: int) -> None:
        events, end, seen = self._path / "events.jsonl", 0, 0
        while seen <= update:
            if self._process.poll() is not None and update < UPDATES - 1:
                raise RuntimeError(f"the training in {self._path} ended after {seen} updates")
            if events.exists() and events.stat().st_size > end:
                content = events.read_bytes()
                end, seen = len(content), content.count(b'"kind":"update"')
            time.sleep(0.002)


class Viewer:
    """A client that reads a stream in a thread until it is closed."""

    def __init__(self, server: Server, run: str) -> None:
        self._connection, self._answer = server.ask(f"/api/run/{run}/stream")
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError, ValueError, http.client.HTTPException):  # closed
            for _ in self._answer:
                pass

    def close(self) -> None:
        """Leave as a browser does."""
        with suppress(OSError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._answer.close()
        self._connection.close()


def watched_cost(directory: Path) -> tuple[float, float, float]:
    """CPU time of a training while it is watched over that of the same training unwatched, minus 1: the median over
    updates and its standard error. And the server's share of a core meanwhile.
    """
    with serve(directory) as server:
        start, used = time.perf_counter(), cpu_seconds(server.pid)
        pair = [Training(directory / name, server, watched) for watched, name in enumerate(("even", "odd"))]
        threads = [threading.Thread(target=training.follow) for training in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        share = (cpu_seconds(server.pid) - used) / (time.perf_counter() - start)
    ratios = []
    for update in range(WARM_UP, UPDATES):
        even, odd = (training.seconds[update] for training in pair)
        ratios.append(math.log(even / odd) if update % 2 == 0 else math.log(odd / even))
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return math.expm1(statistics.median(ratios)), error, share


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        first = first_view(directory)
        print(f"first view of {EVENTS:,} events: {first.seconds:.2f} s ({first.cpu_seconds:.2f} s of CPU)")
        print(f"  {first.sent_mb:.1f} MB sent; memory of the server {first.server_mb:.0f} MB")
        waits = delays(directory)
        median, worst = statistics.median(waits), max(waits)
        print(f"from an event to its client: median {median:.0f} ms, worst of {len(waits)}: {worst:.0f} ms")
        cost, error, share = watched_cost(directory)
        print(f"CPU of a watched training: {cost:+.2%} (standard error {error:.2%}); server: {share:.1%} of a core")
    result = {
        "state_seconds": round(first.seconds, 3),
        "latency_ms": round(median, 1),
        "watched_run_cost": round(cost, 4),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
