"""Start a run: take its directory, build it, train. What `simic train` does once its arguments are right."""

from __future__ import annotations

from pathlib import Path

from simic.config import RunConfig
from simic.storage.run_directory import RunDirectory
from simic.training.build import build_run, require_device
from simic.training.demonstrations import learn_from_episodes
from simic.training.loop import train
from simic.training.profiler import profiled
from simic.training.progress import say


def start(
    config: RunConfig,
    path: Path,
    *,
    resume: bool = False,
    init: Path | None = None,
    quiet: bool = False,
    profile: Path | None = None,
    command: tuple[str, ...] = (),
) -> int:
    """Train, or learn from recorded episodes; returns the exit code."""
    require_device(config.device)
    directory, tell = RunDirectory(path), (lambda text: None) if quiet else say
    with directory.lock() as lock:
        if config.algorithm != "ppo":
            lock.exit_code = learn_from_episodes(
                config, directory, init=init, profile=profile, command=command, say=tell, begun=lock.begin
            )
        else:
            run = build_run(config, directory, resume=resume, init=init, quiet=quiet, command=command, say=tell)
            lock.begin()
            with profiled(run, profile):
                lock.exit_code = train(run)
    return lock.exit_code
