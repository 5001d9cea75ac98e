"""RunDirectory: where the files of a run live, and the lock that lets one process at a time write them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from simic.telemetry.events import EVENTS_FILE, PROCESS_FILE
from simic.telemetry.recorder import output_error


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
        return self.path / "lock"

    def create(self) -> RunDirectory:
        """Make the directories, or say why they cannot be made."""
        for path in (self.path, self.checkpoints, self.episodes):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise output_error(path, error) from error
        return self

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process. However the process ends, the kernel lets go."""
        self.create()
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise output_error(self.lock_file, error) from error
        try:
            self._take(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except BlockingIOError:
            raise RunLockedError(
                f"{self.path} is in use by {_holder(descriptor)}: wait for it, stop it, or choose another --out"
            ) from None
        except OSError as error:
            raise output_error(self.lock_file, error) from error


def list_runs(root: str | Path) -> list[RunDirectory]:
    """The runs right below a directory, by name."""
    root = Path(root)
    found = [RunDirectory(path) for path in sorted(root.iterdir())] if root.is_dir() else []
    return [run for run in found if run.checkpoints.is_dir() or run.process.is_file()]


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"  # it has the lock, but has not yet said who it is
