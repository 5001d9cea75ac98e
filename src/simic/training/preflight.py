"""Checks that need no torch, so that what cannot work is refused at once: output paths, devices, data, episodes."""

from __future__ import annotations

import errno
import importlib.util
import os
import runpy
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from simic import pretrained
from simic.config import RunConfig
from simic.control.registry import CONTROLLERS
from simic.environment.lookahead_config import LOOKAHEAD
from simic.registry import nearest_entry
from simic.storage.files import check_regular, output_error
from simic.storage.run_directory import RunDirectory, RunExistsError
from simic.tasks.registry import check_data
from simic.training.used_settings import find_episode_files, trains_hosts
from simic.workers.placement import check_backend


def check_run(config: RunConfig) -> None:
    """Raise if a run with these settings could not begin on this machine."""
    check_device(config.device)
    if config.hosts.compile and trains_hosts(config):
        check_compiler()
    for package in ("tensorboard", "wandb"):
        if getattr(config, package) and importlib.util.find_spec(package) is None:
            raise ValueError(f"--{package}: {package} is not installed: pip install 'simic-rl[{package}]'")
    check_backend(config.backend)
    check_episodes(config)
    if trains_hosts(config) or config.data_dir is not None:
        check_data([config.task], config.data_dir)


def check_output_directory(path: Path) -> None:
    """Raise unless the directory can be created or written to."""
    existing = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise output_error(path, OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise output_error(path, OSError(errno.EACCES, os.strerror(errno.EACCES)))


def check_log(path: Path) -> None:
    """Raise unless the directory can be written to and holds no run yet."""
    check_output_directory(path)
    own = RunDirectory(path)
    if any(os.path.lexists(file) for file in (own.config, own.events, own.process)):
        raise RunExistsError(f"{path} holds a run: name another directory, or remove it")


def check_output_file(path: Path) -> None:
    """Raise unless the file can be written."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--out: the directory {path.parent} does not exist; create it first")
    if path.is_dir():
        raise IsADirectoryError(f"--out: {path} is a directory; name a file")
    if not path.is_symlink():  # a link is replaced, not followed
        check_regular(path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise output_error(path, OSError(errno.EACCES, os.strerror(errno.EACCES)))


def check_device(name: str) -> None:
    """Raise if the installed torch cannot have such a device; torch itself later tells whether the machine has one."""
    if name == "mps":
        possible = sys.platform == "darwin"
    else:
        # torch/version.py says what torch was built for, and importing torch would take seconds.
        spec = importlib.util.find_spec("torch")
        path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
        build = runpy.run_path(str(path)) if path and path.is_file() else {}
        backends = {"cuda": ("cuda", "hip"), "xpu": ("xpu",)}.get(name, ())
        possible = not build or not backends or any(build.get(backend) is not None for backend in backends)
    if not possible:
        raise ValueError(no_device(name))


def check_compiler() -> None:
    """Raise if there is no C++ compiler, which torch.compile needs."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    if not any(shutil.which(name) for name in wanted):
        raise ValueError(
            f"hosts.compile needs a C++ compiler, but there is no {' or '.join(wanted)}: install one, or leave it out"
        )


def no_device(name: str) -> str:
    """The error text for a device that is missing."""
    return f"this machine has no {name} that torch can use; choose --device cpu"


def check_episodes(config: RunConfig) -> None:
    """Raise unless every source is a controller or holds recorded episodes, and the search knows its controllers."""
    for source in config.episodes:
        path = Path(source)
        if source == LOOKAHEAD:
            for name in config.lookahead.controllers:
                _check_controller("--lookahead", name, CONTROLLERS)
        elif path.is_dir() and source not in CONTROLLERS:
            if not find_episode_files(path):
                raise FileNotFoundError(
                    f"--episodes: there are no recorded episodes in {path}; record some with --record"
                )
        else:
            _check_controller("--episodes", source, (*CONTROLLERS, LOOKAHEAD))


def _check_controller(flag: str, source: str, known: Iterable[str]) -> None:
    if source == "pretrained":
        pretrained.check_controller()
    elif source not in CONTROLLERS and not Path(source).exists():
        hint = nearest_entry(source, known)
        raise ValueError(f"{flag}: {source!r} is neither a controller nor a path that exists; {hint}")
