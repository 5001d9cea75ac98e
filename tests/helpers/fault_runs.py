"""Tiny runs to harm: start them without the price of importing torch, strike them, compare what is left.

Processes are forked from a server that has everything imported, and go through the command line's `main`. What needs
worker processes is started as a user would start it.
"""

import importlib
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

UPDATES = 4
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
"""What `trial` runs differ in from the quick preset; an update takes about half a second."""
DEADLINE = 5.0
"""Seconds in which a run that is asked to stop has stopped."""
PATIENCE = 120.0
"""Seconds after which a process that should end by itself counts as hanging."""

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(
    [
        *("pytest", "simic.cli", "simic.api", "sklearn.datasets", "torch._dynamo"),
        *("simic.evaluation", "simic.dashboard.run_report", "simic.training.grow_task", "simic.commands.runs"),
        "matplotlib.backends.backend_svg",
    ]
)


class Strike(NamedTuple):
    """A signal that a process sends itself: when a function is called for the n-th time."""

    place: str
    """`module:function` or `module:Class.method`."""
    call: int = 1
    number: int = signal.SIGTERM
    hang: float = 0.0
    """Seconds that it then stays there."""
    swallowed: bool = False
    """Whether it comes while an object is finalised, where Python drops what is raised."""


@dataclass
class Trial:
    """A run's directory, and what the processes that worked on it said."""

    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from `SETTINGS`."""

    @property
    def log(self) -> Path:
        return self.path.with_name(f"{self.path.name}.log")

    @property
    def struck(self) -> Path:
        """Holds the time of the last strike."""
        return self.log.with_suffix(".struck")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def told(self) -> str:
        """All that was printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def updates(self) -> int:
        """Updates that stand in the events."""
        return self._lines("events.jsonl", b'"kind":"update"')

    @property
    def starts(self) -> int:
        """Processes that began to train."""
        return self._lines("process.jsonl", b'"kind":"run_started"')

    @property
    def update_seconds(self) -> float:
        """How long an update took, on average."""
        return sum(sum(event["seconds"].values()) for event in events(self, "timings")) / self.updates

    def arguments(self, **settings: Any) -> list[str]:
        """Of `simic train`, to begin the run or go on with it."""
        config = self.path.with_name(f"{self.path.name}.config.json")
        config.write_text(json.dumps(SETTINGS | self.settings | settings))
        return ["train", "--config", str(config), "--out", str(self.path), "--resume", "auto"]

    def _lines(self, name: str, part: bytes) -> int:
        file = self.path / name
        return sum(part in line for line in file.read_bytes().splitlines()) if file.exists() else 0


def launch(trial: Trial, *strikes: Strike, environment: dict[str, str] | None = None, **settings: Any) -> Any:
    """A process that works on the run until it is done or struck."""
    return fork(trial.arguments(**settings), trial.log, strikes, environment or {})


def fork(arguments: list[str], log: Path, strikes: Iterable[Strike] = (), environment: dict[str, str] | None = None):
    """A process of the command line."""
    process = _FORK.Process(target=_command_line, args=(arguments, log, tuple(strikes), environment or {}))
    process.start()
    return process


def end_of(process: Any, timeout: float = PATIENCE) -> int:
    """The exit code of a process, negative if a signal killed it; one that hangs is an error."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the process had not ended after {timeout} seconds")
    return process.exitcode


def run_to_end(trial: Trial, *strikes: Strike, **options: Any) -> int:
    """Exit code of a process that is left alone."""
    return end_of(launch(trial, *strikes, **options))


def finish(trial: Trial, **settings: Any) -> Trial:
    """Go on with a run until it is done."""
    code = run_to_end(trial, **settings)
    assert code == 0, trial.told
    assert "Traceback" not in trial.told, trial.told
    return trial


def events(trial: Trial, kind: str) -> list[dict[str, Any]]:
    """Events of a kind that a run's processes told of themselves."""
    lines = (trial.path / "process.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def say(arguments: list[str], log: Path) -> tuple[int, str]:
    """Exit code and output of a command."""
    code = end_of(fork(arguments, log))
    return code, log.read_text(errors="replace")


def assert_same(trial: Trial, unharmed: Trial) -> None:
    """All that was learned and told is equal, bit for bit, and nothing else lies around."""
    last = f"checkpoints/update_{UPDATES:06d}"
    names = [f"{last}/state.safetensors", f"{last}/state.json", "controller.safetensors", "events.jsonl"]
    names += [f"episodes/update_{update:06d}.safetensors" for update in range(UPDATES)]
    for name in names:
        assert _content(trial.path / name) == _content(unharmed.path / name), name
    left = [str(path) for path in trial.path.rglob(".*")]
    assert not left, left


def assert_checkpoint_of(trial: Trial, update: int, unharmed: Trial) -> None:
    """The newest checkpoint is of that update, and as in the run that nothing happened to."""
    newest = max(path.name for path in trial.checkpoints.iterdir())
    assert newest == f"update_{update:06d}"
    if update:  # that run had no reason to write one before the first update
        for name in ("state.safetensors", "state.json"):
            mine, theirs = (own.checkpoints / newest / name for own in (trial, unharmed))
            assert _content(mine) == _content(theirs), name


def _content(path: Path) -> Any:
    """What is in a file; the order of names in the header of safetensors is a matter of chance."""
    content = path.read_bytes()
    if path.suffix != ".safetensors":
        return content
    size = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:size]), content[size:]


def copy_of(source: Trial, path: Path) -> Trial:
    """The same run at another place."""
    shutil.copytree(source.path, path)
    return Trial(path, source.settings)


def await_(condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> None:
    """Wait until something holds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"waited {timeout} seconds in vain until {what}"
        time.sleep(0.002)


# What runs in the other process.


def _command_line(arguments: list[str], log: Path, strikes: tuple[Strike, ...], environment: dict[str, str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    for strike in strikes:
        _lie_in_wait(strike, log.with_suffix(".struck"))
    from simic.cli import main

    main(arguments)


class _Finalised:
    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


def _lie_in_wait(strike: Strike, struck_at: Path) -> None:
    module, _, path = strike.place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    plain, calls = getattr(owner, name), 0

    @wraps(plain)
    def struck(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == strike.call:
            struck_at.write_text(str(time.time()))
            _Finalised(strike.number) if strike.swallowed else os.kill(os.getpid(), strike.number)
            time.sleep(strike.hang)
        return plain(*args, **kwargs)

    setattr(owner, name, struck)


# The real command, with worker processes.


def command(trial: Trial, **settings: Any) -> subprocess.Popen[bytes]:
    """`simic train` as a user starts it, in a session of its own."""
    line = [sys.executable, "-m", "simic.cli", *trial.arguments(**settings)]
    with open(trial.log, "ab") as log:
        return subprocess.Popen(line, stdout=log, stderr=log, start_new_session=True)


def workers_of(pid: int) -> list[int]:
    """The worker processes of a run: children that multiprocessing spawned, without its resource tracker."""
    return [child for child, parent, _, line in _processes() if parent == pid and b"spawn_main" in line]


def session_of(pid: int) -> list[int]:
    """All processes of the session that a process began, or has left behind."""
    return [member for member, _, session, _ in _processes() if session == pid]


def _processes() -> Iterable[tuple[int, int, int, bytes]]:
    """Id, parent, session and command line of every process that is alive."""
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
