"""RunDirectory: where the files of a run live, and the lock that lets one process at a time write them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from simic.storage.files import (
    MAX_ENTRIES,
    FileSizeError,
    check_directory,
    check_regular,
    list_directory,
    open_to_change,
    output_error,
    writing,
)
from simic.storage.json_files import parse_json

EVENTS_FILE, PROCESS_FILE, IDS_FILE = "events.jsonl", "process.jsonl", "mirrors.json"
"""What follows from config and rng seed; what depends on machine and moment; the ids of mirrors."""
DIRECTORIES = ("checkpoints", "episodes", "comparison", "tensorboard", "wandb")
"""What a run may hold besides files. wandb makes links in its own."""
LOCK_FILE = "lock"


class RunLockedError(OSError):
    """Another process is writing the run."""


@dataclass(frozen=True)
class RunDirectory:
    """The places in one run's directory. Nothing is made before `create`."""

    path: Path

    @property
    def events(self) -> Path:
        """What follows from config and rng seed."""
        return self.path / EVENTS_FILE

    @property
    def process(self) -> Path:
        """What depends on machine and moment."""
        return self.path / PROCESS_FILE

    @property
    def checkpoints(self) -> Path:
        """One directory per checkpoint."""
        return self.path / "checkpoints"

    @property
    def episodes(self) -> Path:
        """Recorded episodes, for imitation and offline learning."""
        return self.path / "episodes"

    @property
    def config(self) -> Path:
        """The settings that the run was begun with."""
        return self.path / "config.json"

    @property
    def controller(self) -> Path:
        """What was learned, once the run is done."""
        return self.path / "controller.safetensors"

    @property
    def lock_file(self) -> Path:
        """Says who writes the run. It stays when the lock is gone."""
        return self.path / LOCK_FILE

    @property
    def mirror_ids(self) -> Path:
        """Under which ids mirrors of the run continue."""
        return self.path / IDS_FILE

    def create(self) -> RunDirectory:
        """Make the directories, or say why they cannot be made."""
        for path in (self.path, self.checkpoints, self.episodes):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise output_error(path, error) from error
        return self

    def check(self) -> None:
        """Raise if what we would write goes elsewhere, or over files that no run wrote; looks only, changes nothing.

        The directory itself may be a link. In it, a link (or a pipe, or a device) in the place of a file of ours may
        lead to any file of the user's, so that none is accepted.
        """
        own = (self.lock_file, self.events, self.process, self.config, self.controller, self.mirror_ids)
        for path in own:
            check_regular(path)
        for name in DIRECTORIES:
            check_directory(self.path / name)
        for name in ("checkpoints", "episodes", "comparison", "tensorboard"):
            _check_below(self.path / name)
        if not self.config.exists():
            for path in (self.events, self.process, self.controller):
                if path.exists() and path.stat().st_size:
                    raise FileExistsError(
                        f"{self.config} is missing, but there is {path.name}, which would be overwritten: "
                        f"put {self.config.name} back, or choose another --out"
                    )

    def check_free(self) -> None:
        """Raise if the directory holds a run already."""
        if self.config.is_file():
            raise RunExistsError(f"{self.path} holds a run already: go on with --resume auto, or choose another --out")

    @contextmanager
    def lock(self) -> Iterator[RunLock]:
        """Hold the run for this process. However the process ends, the kernel lets go.

        What could not begin, and so has no settings in the directory, leaves nothing of ours behind.
        """
        self.check()
        missing = self._missing()
        self.create()
        with writing(self.lock_file):
            descriptor = open_to_change(self.lock_file)
        lock, taken = RunLock(descriptor), False
        try:
            self._take(descriptor)
            taken = True
            yield lock
        finally:
            if taken:
                lock.note_end()
            if taken and not self.config.is_file():
                _remove(missing)
            os.close(descriptor)

    def _missing(self) -> list[Path]:
        """What a run that begins here would make, inner ones first."""
        files = [self.lock_file, self.events, self.process]
        directories = [self.checkpoints, self.episodes, self.path, *self.path.parents]
        return [path for path in (*files, *directories) if not os.path.lexists(path)]

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (self.lock_file.exists() and os.path.samestat(os.fstat(descriptor), self.lock_file.stat())):
                raise RunLockedError(f"{self.path} was given up by another process just now: try again")
            if not self.config.exists() and os.fstat(descriptor).st_size and _read_holder(descriptor) is None:
                raise FileExistsError(f"{self.lock_file} is no lock of simic's: remove it, or choose another --out")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except BlockingIOError:
            raise RunLockedError(
                f"{self.path} is in use by {_holder(descriptor)}: wait for it, stop it, or choose another --out"
            ) from None
        except (FileExistsError, RunLockedError):
            raise
        except OSError as error:
            raise output_error(self.lock_file, error) from error

    def holder(self) -> Holder | None:
        """What the lock file says of the last process that held the run, and whether it holds it still."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            said = _read_holder(descriptor)
            return None if said is None else replace(said, holds=_is_alive(said) and _is_locked(descriptor))
        finally:
            os.close(descriptor)


class RunExistsError(ValueError):
    """The directory holds a run, and nobody said to resume it."""


class RunLock:
    """The lock on a run, and what its file says of how the run ended: events are not written at level `off`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._before = descriptor, os.pread(descriptor, 4096, 0)
        self._begun = False
        self.exit_code: int | None = None

    def begin(self) -> None:
        """The run is under way. What is refused before that leaves the file as it was."""
        self._begun = True

    def note_end(self) -> None:
        """Say how the run ended; if it never began, what was said before."""
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "exit_code": self.exit_code}
        if self._begun and self.exit_code is None:
            holder["exit_code"] = FAILED
        content = json.dumps(holder).encode() if self._begun else self._before
        with suppress(OSError):  # a full disk: the reader then takes the run for a killed one
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, content, 0)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that a lock file names."""

    pid: int
    host: str
    exit_code: int | None = None
    """How it left the run; None if it has not, or was killed."""
    holds: bool = False
    """Whether it holds the lock now."""


FAILED = 1
"""The exit code that stands for an error nobody foresaw."""


@contextmanager
def new_directory(root: Path) -> Iterator[Path]:
    """A directory of its own in `root`, named after the time; it goes again if nothing was put there."""
    made_root = not root.exists()
    stamp, number = time.strftime("%Y%m%d-%H%M%S"), 1
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        while True:
            path = root / (stamp if number == 1 else f"{stamp}-{number}")
            try:
                path.mkdir()  # atomic: of two processes that begin in one second the later one counts on
                break
            except FileExistsError:
                number += 1
    try:
        yield path
    finally:
        for directory in (path, root) if made_root else (path,):
            with suppress(OSError):
                directory.rmdir()


def list_runs(root: str | Path) -> list[RunDirectory]:
    """The runs right below a directory, by name."""
    root = Path(root)
    found = [RunDirectory(path) for path in list_directory(root)] if root.is_dir() else []
    return [run for run in found if run.config.is_file() or run.checkpoints.is_dir() or run.process.is_file()]


def _remove(paths: list[Path]) -> None:
    """Remove files that say nothing yet, the lock among them, and directories that are empty."""
    for path in paths:
        with suppress(OSError):
            if path.is_dir():
                path.rmdir()
            elif path.name == LOCK_FILE or path.stat().st_size == 0:
                path.unlink()


def _read_holder(descriptor: int) -> Holder | None:
    """Whom a lock file names; None if it is empty or damaged."""
    try:
        said = parse_json(os.pread(descriptor, 4096, 0), "lock")
        return Holder(pid=int(said["pid"]), host=str(said["host"]), exit_code=said.get("exit_code"))
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return None


def _holder(descriptor: int) -> str:
    holder = _read_holder(descriptor)  # it has the lock, but may not yet have said who it is
    return "another process" if holder is None else f"process {holder.pid} on {holder.host}"


def _is_alive(holder: Holder) -> bool:
    """Whether there is a process of that number; on another machine nobody can tell, so perhaps."""
    if holder.host != socket.gethostname():
        return True
    try:
        os.kill(max(holder.pid, 1), 0)  # numbers below 1 stand for groups of processes
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return holder.pid > 0
    return holder.pid > 0


def _is_locked(descriptor: int) -> bool:
    """Whether somebody holds the lock. Asked only if its process is alive: for a moment it is ours."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _check_below(directory: Path) -> None:
    """Raise unless there are only regular files and directories below a directory."""
    pending, seen = [directory], 0
    while pending:
        for path in list_directory(pending.pop()):
            seen += 1
            if seen > MAX_ENTRIES:
                raise FileSizeError(f"{directory} holds more than {MAX_ENTRIES:,} files: it is no directory of simic's")
            if stat.S_ISDIR(os.lstat(path).st_mode):
                pending.append(path)
            else:
                check_regular(path)
