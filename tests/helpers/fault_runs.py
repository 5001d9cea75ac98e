"""Tiny runs for fault tests: start them without the cost of importing torch, interrupt them, compare the results.

Processes are forked from a server that has imported everything, and call the command line's `main`. Runs with worker
processes are started with the real command.
"""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from helpers.fault_places import UPDATES, find_place

SETTINGS: dict[str, Any] = {
    "updates": UPDATES,
    "num_groups": 2,
    "group_size": 2,
    "workers": 0,
    "keep": 100,
    "record": True,
    "compare": 0,
    "episode": {"horizon": 3},
    "policy": {"hidden_size": 16, "encoding_size": 16},
    "ppo": {"ppo_epochs": 2, "num_minibatches": 2, "target_kl": None},
}
"""Settings that differ from the quick preset; an update takes about half a second."""
DEADLINE = 5.0
"""Seconds within which a run stops after a signal."""
PATIENCE = 120.0
"""Seconds after which a process counts as hanging."""

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(
    [
        *("pytest", "simic.cli", "simic.api", "sklearn.datasets", "torch._dynamo"),
        *("simic.evaluation", "simic.dashboard.run_report", "simic.training.grow_task", "simic.commands.runs"),
        "matplotlib.backends.backend_svg",
    ]
)


class InjectedSignal(NamedTuple):
    """A signal that a process sends to itself when a function is called for the n-th time."""

    place: str
    """`module:function` or `module:Class.method`."""
    call: int = 1
    number: int = signal.SIGTERM
    hang: float = 0.0
    """Seconds to sleep in the call afterwards."""
    in_finalizer: bool = False
    """Whether to send it from a finalizer, where Python ignores exceptions."""


@dataclass
class FaultRun:
    """A run's directory and the output of its processes."""

    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from `SETTINGS`."""

    @property
    def log(self) -> Path:
        return self.path.with_name(f"{self.path.name}.log")

    @property
    def signal_file(self) -> Path:
        """Contains the time of the last injected signal."""
        return self.log.with_suffix(".signal")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def updates(self) -> int:
        """The number of updates in the events."""
        return self._lines("events.jsonl", b'"kind":"update"')

    @property
    def starts(self) -> int:
        """The number of processes that began to train."""
        return self._lines("process.jsonl", b'"kind":"run_started"')

    @property
    def update_seconds(self) -> float:
        """Mean duration of an update."""
        return sum(sum(event["seconds"].values()) for event in events(self, "timings")) / self.updates

    def arguments(self, **settings: Any) -> list[str]:
        """Arguments of `simic train` that start or resume the run."""
        config = self.path.with_name(f"{self.path.name}.config.json")
        config.write_text(json.dumps(SETTINGS | self.settings | settings))
        return ["train", "--config", str(config), "--out", str(self.path), "--resume", "auto"]

    def _lines(self, name: str, part: bytes) -> int:
        file = self.path / name
        return sum(part in line for line in file.read_bytes().splitlines()) if file.exists() else 0


def start(run: FaultRun, *signals: InjectedSignal, **settings: Any) -> Any:
    """Start a process that trains the run."""
    return start_command(run.arguments(**settings), run.log, signals)


def start_command(arguments: list[str], log: Path, signals: Iterable[InjectedSignal] = ()) -> Any:
    """Start a process with these command-line arguments."""
    process = _FORK.Process(target=_command_line, args=(arguments, log, tuple(signals)))
    process.start()
    return process


def wait_for(process: Any, timeout: float = PATIENCE) -> int:
    """The exit code of a process, negative if a signal killed it; a process that hangs is an error."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the process had not ended after {timeout} seconds")
    return process.exitcode


def run_to_end(run: FaultRun, *signals: InjectedSignal, **options: Any) -> int:
    """Train the run; return the exit code."""
    return wait_for(start(run, *signals, **options))


def finish(run: FaultRun, **settings: Any) -> FaultRun:
    """Train or resume a run until it is done."""
    code = run_to_end(run, **settings)
    assert code == 0, run.output
    assert "Traceback" not in run.output, run.output
    return run


def events(run: FaultRun, kind: str) -> list[dict[str, Any]]:
    """Events of a kind in process.jsonl."""
    lines = (run.path / "process.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def run_command(arguments: list[str], log: Path) -> tuple[int, str]:
    """Run a command; return its exit code and output."""
    code = wait_for(start_command(arguments, log))
    return code, log.read_text(errors="replace")


def assert_same_results(run: FaultRun, reference: FaultRun) -> None:
    """Everything that follows from config and rng seed is equal, byte for byte, and no temporary file is left."""
    names = [f"checkpoints/{checkpoint_name(UPDATES)}", "controller.safetensors", "events.jsonl"]
    names += [f"episodes/update_{update:06d}.safetensors" for update in range(UPDATES)]
    for name in names:
        assert (run.path / name).read_bytes() == (reference.path / name).read_bytes(), name
    left = [str(path) for path in run.path.rglob(".*")]
    assert not left, left


def assert_checkpoint_of(run: FaultRun, update: int, reference: FaultRun) -> None:
    """The newest checkpoint is the one of that update, and equals that of the reference run."""
    newest = max(path.name for path in run.checkpoints.iterdir())
    assert newest == checkpoint_name(update)
    if update:  # the reference run wrote none before its first update
        assert (run.checkpoints / newest).read_bytes() == (reference.checkpoints / newest).read_bytes()


def checkpoint_name(update: int) -> str:
    return f"update_{update:06d}.safetensors"


def copy_of(source: FaultRun, path: Path) -> FaultRun:
    """Copy a run to another place."""
    shutil.copytree(source.path, path)
    return FaultRun(path, source.settings)


def wait_until(condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout} seconds until {what}"
        time.sleep(0.002)


# In the other process.


def _command_line(arguments: list[str], log: Path, signals: tuple[InjectedSignal, ...]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for signal_ in signals:
        _inject(signal_, log.with_suffix(".signal"))
    from simic.cli import main

    main(arguments)


class _Finalized:
    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


def _inject(signal_: InjectedSignal, signal_file: Path) -> None:
    owner, name = find_place(signal_.place)
    plain, calls = getattr(owner, name), 0

    @wraps(plain)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == signal_.call:
            signal_file.write_text(str(time.time()))
            _Finalized(signal_.number) if signal_.in_finalizer else os.kill(os.getpid(), signal_.number)
            time.sleep(signal_.hang)
        return plain(*args, **kwargs)

    setattr(owner, name, wrapper)


# The real command, with worker processes.


def command(run: FaultRun, **settings: Any) -> subprocess.Popen[bytes]:
    """Start `simic train` as a user does, in its own session."""
    line = [sys.executable, "-m", "simic.cli", *run.arguments(**settings)]
    with open(run.log, "ab") as log:
        return subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)


def workers_of(pid: int) -> list[int]:
    """The worker processes of a run: spawned children, without multiprocessing's resource tracker."""
    return [child for child, parent, _, line in _processes() if parent == pid and b"spawn_main" in line]


def session_of(pid: int) -> list[int]:
    """All processes of the session that a process started."""
    return [member for member, _, session, _ in _processes() if session == pid]


def _processes() -> Iterable[tuple[int, int, int, bytes]]:
    """Process id, parent, session and command line of every live process."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if state not in "ZX":
            yield int(entry.name), int(parent), int(session), line
