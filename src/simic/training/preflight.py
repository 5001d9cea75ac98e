"""What can be known to fail before torch is loaded: places to write to, devices, data, recorded episodes."""

from __future__ import annotations

import errno
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from simic import pretrained
from simic.config import RunConfig
from simic.control.registry import CONTROLLERS
from simic.registry import nearest
from simic.storage.files import check_regular, output_error
from simic.tasks.registry import check_data
from simic.training.used_settings import find_episode_files, plays, trains_hosts


def check_run(config: RunConfig) -> None:
    """Raise if a run of these settings could not begin on this machine."""
    check_device(config.device)
    for package in ("tensorboard", "wandb"):
        if getattr(config, package) and importlib.util.find_spec(package) is None:
            raise ValueError(f"--{package}: {package} is not installed: pip install 'simic-rl[{package}]'")
    check_episodes(config.episodes)
    if trains_hosts(config) or config.data_dir is not None:
        check_data([config.task], config.data_dir)


def check_choice(flag: str, value: str, choices: Iterable[str]) -> None:
    """Raise unless a flag's value is one of its choices; the nearest one is named."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{flag} has no choice {value!r}; {nearest(value, choices)}")


def check_output_directory(path: Path) -> None:
    """Raise unless a directory can be made there, or written to."""
    existing = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise output_error(path, OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise output_error(path, OSError(errno.EACCES, os.strerror(errno.EACCES)))


def check_output_file(path: Path) -> None:
    """Raise unless a file can be written there."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out: the directory {path.parent} does not exist; create it first")
    if path.is_dir():
        raise IsADirectoryError(f"--out: {path} is a directory; name a file")
    if not path.is_symlink():  # which is replaced
        check_regular(path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise output_error(path, OSError(errno.EACCES, os.strerror(errno.EACCES)))


def check_device(name: str) -> None:
    """Raise if this torch cannot have such a device; whether the machine has one is asked when torch is loaded."""
    needed = {"cpu": True, "mps": sys.platform == "darwin"}
    build = _torch_build()
    for device, backends in (("cuda", ("cuda", "hip")), ("xpu", ("xpu",))):
        needed[device] = not build or any(build.get(backend) is not None for backend in backends)
    if not needed[name]:
        raise ValueError(no_device(name))


def no_device(name: str) -> str:
    """What is said when a device is missing."""
    return f"this machine has no {name} that torch can use; choose --device cpu"


def check_episodes(sources: Iterable[str]) -> None:
    """Raise unless every source is somebody who plays, or holds recorded episodes."""
    for source in sources:
        path = Path(source)
        if source == "pretrained":
            pretrained.check_controller()
        elif source not in CONTROLLERS and not path.exists():
            raise ValueError(
                f"--episodes: {source!r} is neither a name nor a path that exists; {nearest(source, CONTROLLERS)}"
            )
        elif path.is_dir() and not find_episode_files(path):
            raise FileNotFoundError(f"--episodes: there are no recorded episodes in {path}; record some with --record")


def refuse_ignored(config: RunConfig, ignored: Sequence[str], where: str) -> None:
    """Raise if somebody chose settings or flags that the run's algorithm would ignore."""
    if ignored:
        recorded = "" if plays(config) else " from episodes on record"
        raise ValueError(f"{where}: algorithm {config.algorithm}{recorded} ignores {', '.join(ignored)}; leave it out")


def _torch_build() -> dict[str, Any]:
    """What torch was built for, read from the one file that says so; empty if it cannot be told."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    return runpy.run_path(str(path)) if path and path.is_file() else {}
