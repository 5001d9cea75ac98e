"""RunDirectory: the files of a run, and the lock that lets only one process at a time write them."""

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
"""Reproducible events; events that depend on machine and time; ids under which TensorBoard and wandb continue."""
DIRECTORIES = ("checkpoints", "episodes", "comparison", "tensorboard", "wandb")
"""Subdirectories of a run. wandb creates links in its own."""
FAILED = 1
"""The exit code of an unexpected error."""
LOCK_SECONDS = 0.1
"""A lock that is held longer is another process's."""


class RunLockedError(OSError):
    """Another process is writing the run."""


class RunExistsError(ValueError):
    """The directory contains a run, and resuming it was not requested."""


class RunDirectory:
    """The paths of one run's files. Nothing is created before `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events, self.process = path / EVENTS_FILE, path / PROCESS_FILE
        self.checkpoints = path / "checkpoints"
        self.episodes = path / "episodes"  # recorded for imitation and offline learning
        self.config = path / "config.json"  # settings; a directory with settings contains a run
        self.controller = path / "controller.safetensors"  # written when the run is done
        self.lock_file = path / "lock"  # remains after the lock is released

    def create(self) -> RunDirectory:
        """Create the directories."""
        for path in (self.path, self.checkpoints, self.episodes):
            with writing(path):
                path.mkdir(parents=True, exist_ok=True)
        return self

    def check(self) -> None:
        """Raise if we would write elsewhere, or over files that no run wrote. Changes nothing.

        The directory itself may be a link. A link, pipe or device inside it is refused: it may lead to any file of the
        user.
        """
        files = (self.lock_file, self.events, self.process, self.config, self.controller, self.path / IDS_FILE)
        for path in files:
            check_regular(path)
        for name in DIRECTORIES:
            check_directory(self.path / name)
            if name != "wandb":
                _check_below(self.path / name)
        if not self.config.exists():
            for path in (self.events, self.process, self.controller):
                if path.exists() and path.stat().st_size:
                    raise FileExistsError(
                        f"{self.config} is missing, but there is {path.name}, which would be overwritten: "
                        f"restore {self.config.name}, or choose another --out"
                    )

    def check_free(self) -> None:
        """Raise if the directory already contains a run."""
        if self.config.is_file():
            raise RunExistsError(
                f"{self.path} already contains a run: continue it with --resume auto, or choose another --out"
            )

    @contextmanager
    def lock(self) -> Iterator[RunLock]:
        """Lock the run for this process; the kernel releases the lock however the process ends.

        A run that fails before its settings are written leaves nothing of ours behind.
        """
        self.check()
        own = [self.lock_file, self.events, self.process, self.checkpoints, self.episodes, self.path]
        created = [path for path in (*own, *self.path.parents) if not os.path.lexists(path)]
        self.create()
        with writing(self.lock_file):
            descriptor = open_to_change(self.lock_file)
        try:
            lock = RunLock(descriptor)
            self._acquire(descriptor)
            try:
                yield lock
            finally:
                lock.note_end()
                if not self.config.is_file():
                    self._remove_unused(created)
        finally:
            os.close(descriptor)

    @contextmanager
    def lock_log(self) -> Iterator[None]:
        """Lock a directory that holds nothing but the log of a user's own training; it is created if missing."""
        for path in (self.lock_file, self.events, self.process):
            check_regular(path)
        if self.config.exists():
            raise RunExistsError(f"{self.path} contains a run of simic train: give log another directory")
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with writing(self.lock_file):
            descriptor = open_to_change(self.lock_file)
        try:
            self._acquire(descriptor, other="give log another directory")
            yield
        finally:
            os.close(descriptor)

    def _acquire(self, descriptor: int, other: str = "choose another --out") -> None:
        try:
            _try_lock(descriptor)
        except BlockingIOError:
            holder = _read_holder(descriptor)  # None: it has the lock, but has not yet written who it is
            who = "another process" if holder is None else f"process {holder.pid} on {holder.host}"
            raise RunLockedError(f"{self.path} is in use by {who}: wait, stop it, or {other}") from None
        except OSError as error:
            raise output_error(self.lock_file, error) from error
        if not (self.lock_file.exists() and os.path.samestat(os.fstat(descriptor), self.lock_file.stat())):
            raise RunLockedError(f"{self.path} was just released by another process: try again")
        if not self.config.exists() and os.fstat(descriptor).st_size and _read_holder(descriptor) is None:
            raise FileExistsError(f"{self.lock_file} is not a lock of simic: remove it, or {other}")
        with writing(self.lock_file):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _holder_text(), 0)

    def _remove_unused(self, paths: list[Path]) -> None:
        """Remove the lock, empty files and empty directories."""
        for path in paths:
            with suppress(OSError):
                if path.is_dir():
                    path.rmdir()
                elif path == self.lock_file or path.stat().st_size == 0:
                    path.unlink()

    def holder(self) -> Holder | None:
        """The last process that locked the run, according to the lock file, and whether it still does."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            holder = _read_holder(descriptor)
            return holder and replace(holder, holds=_is_alive(holder) and _is_locked(descriptor))
        finally:
            os.close(descriptor)


class RunLock:
    """A held lock. Its file also records how the run ended, because events are not written at level `off`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._previous = descriptor, os.pread(descriptor, 4096, 0)
        self._begun = False
        self.exit_code: int | None = None

    def begin(self) -> None:
        """The run has started. A process that is refused before that leaves the file as it was."""
        self._begun = True

    def note_end(self) -> None:
        """Write how the run ended; if it never began, restore the previous content."""
        exit_code = FAILED if self.exit_code is None else self.exit_code
        with suppress(OSError):  # disk full: readers then take the run for a killed one
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, _holder_text(exit_code=exit_code) if self._begun else self._previous, 0)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that a lock file names."""

    pid: int
    host: str
    exit_code: int | None = None
    """None while the run is under way, or if it was killed."""
    holds: bool = False
    """Whether it holds the lock now."""


@contextmanager
def new_directory(root: Path) -> Iterator[Path]:
    """Create a directory in `root` named after the time; it is removed again if it remains empty."""
    is_new_root = not root.exists()
    stamp, number = time.strftime("%Y%m%d-%H%M%S"), 1
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        while True:
            path = root / (stamp if number == 1 else f"{stamp}-{number}")
            try:
                path.mkdir()  # atomic: of two processes that start within a second, the second one counts on
                break
            except FileExistsError:
                number += 1
    try:
        yield path
    finally:
        for directory in (path, root) if is_new_root else (path,):
            with suppress(OSError):
                directory.rmdir()


def list_runs(root: str | Path) -> list[RunDirectory]:
    """The runs directly below a directory, sorted by name."""
    found = [RunDirectory(path) for path in list_directory(Path(root))]
    return [run for run in found if run.config.is_file() or run.checkpoints.is_dir() or run.process.is_file()]


def _holder_text(**facts: int) -> bytes:
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()} | facts).encode()


def _read_holder(descriptor: int) -> Holder | None:
    """The process that a lock file names; None if the file is empty or damaged."""
    try:
        saved = parse_json(os.pread(descriptor, 4096, 0), "lock")
        return Holder(pid=int(saved["pid"]), host=str(saved["host"]), exit_code=saved.get("exit_code"))
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return None


def _is_alive(holder: Holder) -> bool:
    """Whether the process exists; assumed for a process on another machine."""
    if holder.host != socket.gethostname():
        return True
    if holder.pid <= 0:  # these would address groups of processes
        return False
    try:
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's process
    return True


def _try_lock(descriptor: int) -> None:
    """Take the lock, or raise BlockingIOError. Views take it for a moment to see if it is free: that does not count."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOCK_SECONDS / 10)


def _is_locked(descriptor: int) -> bool:
    """Whether a process holds the lock. Ask only if that process is alive: the test takes the lock for a moment."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _check_below(directory: Path) -> None:
    """Raise unless a directory contains only regular files and directories, at any depth."""
    pending, seen = [directory], 0
    while pending:
        for path in list_directory(pending.pop()):
            seen += 1
            if seen > MAX_ENTRIES:
                raise FileSizeError(
                    f"{directory} contains more than {MAX_ENTRIES:,} files: it is not a simic directory"
                )
            if stat.S_ISDIR(os.lstat(path).st_mode):
                pending.append(path)
            else:
                check_regular(path)
