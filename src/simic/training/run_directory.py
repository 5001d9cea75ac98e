"""RunDirectory: where the files of a run live, and the lock that lets one process at a time write them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from simic.files import (
    MAX_ENTRIES,
    FileSizeError,
    check_directory,
    check_regular,
    list_directory,
    open_to_change,
    output_error,
    writing,
)
from simic.telemetry.events import EVENTS_FILE, PROCESS_FILE
from simic.telemetry.mirrors import IDS_FILE

DIRECTORIES = ("checkpoints", "episodes", "comparison", "tensorboard", "wandb")
"""What a run may hold besides files. wandb makes links in its own."""


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

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process. However the process ends, the kernel lets go."""
        self.check()
        self.create()
        with writing(self.lock_file):
            descriptor = open_to_change(self.lock_file)
        try:
            self._take(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self.config.exists() and os.fstat(descriptor).st_size and _holder(descriptor) is None:
                raise FileExistsError(f"{self.lock_file} is no lock of simic's: remove it, or choose another --out")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except BlockingIOError:
            holder = _holder(descriptor) or "another process"
            raise RunLockedError(
                f"{self.path} is in use by {holder}: wait for it, stop it, or choose another --out"
            ) from None
        except FileExistsError:
            raise
        except OSError as error:
            raise output_error(self.lock_file, error) from error


def list_runs(root: str | Path) -> list[RunDirectory]:
    """The runs right below a directory, by name."""
    root = Path(root)
    found = [RunDirectory(path) for path in list_directory(root)]
    return [run for run in found if run.checkpoints.is_dir() or run.process.is_file()]


def _holder(descriptor: int) -> str | None:
    """Who wrote the lock last; None if that is nobody, or has not yet said so."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


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
