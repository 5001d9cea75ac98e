"""From a config to a run: the only place that reads RunConfig."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from simic import __version__
from simic.config import RESUMABLE, RunConfig, read_run_config, to_dict, with_defaults
from simic.control.learned import load_controller, make_network
from simic.policy.network import compile_network
from simic.policy.saved import naming, upgrade_about
from simic.ppo.agent import PPOAgent
from simic.ppo.saved import LEARNING, check_agent_state
from simic.settings import differences
from simic.storage.checkpoint import (
    Checkpoint,
    CheckpointError,
    check_about,
    discard_newer,
    find_checkpoint,
    list_checkpoints,
    sweep,
)
from simic.storage.files import sweep_temporary, write_file
from simic.storage.run_directory import RunDirectory
from simic.tasks.registry import find_task
from simic.telemetry.anomalies import AnomalyDetector
from simic.telemetry.events import Event, RunStarted
from simic.telemetry.mirrors import tensorboard_mirror, wandb_mirror
from simic.telemetry.recorder import Recorder
from simic.training.episodes import GroupSetup, play_group
from simic.training.preflight import no_device
from simic.training.progress import Progress
from simic.training.run import Run
from simic.training.used_settings import trains_hosts
from simic.workers.pool import WorkerPool

PACKAGES = ("torch", "numpy", "gymnasium", "safetensors", "scikit-learn")
FREE_BYTES = 64 * 2**20
"""A run that cannot write so much is not begun."""


def build_run(
    config: RunConfig,
    directory: RunDirectory,
    *,
    resume: bool = False,
    init: Path | None = None,
    quiet: bool = False,
    command: tuple[str, ...] = (),
    say: Callable[[str], None] = print,
) -> Run:
    """All parts of a run, at its beginning or where its last checkpoint stands. The caller holds the lock."""
    torch.set_num_threads(1)
    config, checkpoint = _take_up(config, directory, resume, say)
    agent = make_agent(config)
    if init is not None and checkpoint is None:
        start_from(agent, init, say=say)
    setup, started = make_setup(config), manifest(config, command, checkpoint)
    run = Run(
        directory=directory,
        agent=agent,
        setup=setup,
        pool=WorkerPool(play_group, config.workers),
        recorder=Recorder(
            directory.path,
            config.level,
            mirrors=make_mirrors(config, directory, checkpoint.update if checkpoint else 0),
        ),
        detector=AnomalyDetector(
            config.thresholds, target_kl=config.ppo.target_kl, max_gradient_norm=config.ppo.max_gradient_norm
        ),
        progress=Progress(quiet=quiet),
        started=started,
        rng_seed=config.rng_seed,
        num_groups=config.num_groups,
        num_tasks=config.num_tasks,
        updates=config.updates,
        checkpoint_every=config.checkpoint_every,
        keep_checkpoints=config.keep,
        record_episodes=config.record,
        escalate_updates=config.thresholds.escalate_updates,
        about=agent.about() | {"settings": _lasting(config)},
    )
    if checkpoint is not None:
        check_about(replace(checkpoint, about=upgrade_about(checkpoint.about)), agent.about())
        run.load_state(checkpoint.tree)
    else:
        run.recorder.rewind(0)
    write_config(config, directory)  # last: what could not be built leaves no run behind
    return run


def make_agent(config: RunConfig) -> PPOAgent:
    """A fresh agent; its weights follow from the rng seed."""
    require_device(config.device)
    with torch.random.fork_rng():
        torch.manual_seed(config.rng_seed)
        network = make_network(config.policy)
    return PPOAgent(
        compile_network(network) if config.compile else network,
        config.annealed_ppo,
        thresholds=config.thresholds,
        rng_seed=config.rng_seed,
        device=config.device,
    )


def start_from(agent: PPOAgent, path: Path, *, say: Callable[[str], None] = print) -> None:
    """Take over what a saved agent knows; how it learned (rate, moments, counts, rng seed) stays the new run's own.

    Values of another discount are of no use: with another gamma the critic's last layers and the scales of rewards and
    values start anew, and only the policy is taken over.
    """
    saved, own = load_controller(path).state, agent.state_dict()
    about = agent.about()
    gamma = about.pop("gamma")
    with naming(path):
        check_agent_state(saved, about)
    theirs = saved["about"].get("gamma")
    kept = {name: own[name] for name in LEARNING}
    if theirs != gamma:
        critic = {name: value for name, value in own["network"].items() if name.startswith("critic.")}
        kept |= {"network": saved["network"] | critic}
        kept |= {name: own[name] for name in ("value_scale", "return_scale")}
        say(f"{path} learned with gamma {theirs}, this run has {gamma}: its policy is taken over, its values are not")
    agent.load_state_dict(saved | kept | {"about": agent.about()})


def make_setup(config: RunConfig) -> GroupSetup:
    """What every group of the run has in common."""
    return GroupSetup(
        task=config.task,
        data_dir=config.data_dir,
        group_size=config.group_size,
        twins=config.twins,
        episode=config.episode,
        lifecycle=config.lifecycle,
        reward=config.discounted_reward,
        governor=config.governor,
    )


def write_config(config: RunConfig, directory: RunDirectory) -> None:
    """Keep a run's settings: a directory with settings in it holds a run."""
    text = json.dumps(to_dict(config), indent=1, allow_nan=False) + "\n"
    if not directory.config.exists():
        _check_space(directory.path)
    elif directory.config.read_text(encoding="utf-8") == text:
        return  # a run that goes on where there is little space needs none for this
    write_file(directory.config, text)


def _lasting(config: RunConfig) -> dict[str, Any]:
    """The settings that a run keeps."""
    settings = to_dict(config)
    for name in RESUMABLE:
        *parents, last = name.split(".")
        table = settings
        for parent in parents:
            table = table[parent]
        del table[last]
    return settings


def _take_up(
    config: RunConfig, directory: RunDirectory, resume: bool, say: Callable[[str], None]
) -> tuple[RunConfig, Checkpoint | None]:
    """The config to go by and the checkpoint to go on from, if the directory holds a run."""
    sweep(directory.checkpoints)
    for path in (directory.path, directory.episodes):
        sweep_temporary(path)
    if not directory.config.is_file():
        if list_checkpoints(directory.checkpoints):
            raise FileNotFoundError(
                f"{directory.config} is missing, but there are checkpoints: put it back, or choose another --out"
            )
        return config, None
    if not resume:
        directory.check_free()
    saved, missing = read_run_config(directory.config)
    if missing:
        say(f"{directory.config} is older than these settings and has their defaults: {', '.join(missing)}")
    for name, mine, theirs in differences(to_dict(config), to_dict(saved)):
        if name not in RESUMABLE:
            raise ValueError(f"the run in {directory.path} has {name} = {theirs}, not {mine}: a run keeps its settings")
    found = find_checkpoint(directory.checkpoints)
    for path, reason in found.skipped:
        say(f"skipped {path.name}: {reason}")
    if found.checkpoint is not None:
        if config.updates < (done := found.checkpoint.update):
            raise ValueError(f"the run in {directory.path} has done {done} updates: --updates {config.updates} is less")
        began = found.checkpoint.about.get("settings", {})
        for name, mine, theirs in differences(_lasting(config), with_defaults(began)) if began else ():
            if name in RESUMABLE:
                continue
            raise CheckpointError(
                f"{directory.config} has {name} = {mine}, not {theirs} as {found.checkpoint.path.name} was made with: "
                "it is another run's; put this run's back"
            )
        discard_newer(directory.checkpoints, found.checkpoint.update)
        say(f"resuming after update {found.checkpoint.update}")
    return config, found.checkpoint


def manifest(config: RunConfig, command: tuple[str, ...], checkpoint: Checkpoint | None = None) -> RunStarted:
    """All that is needed to repeat a run."""
    return RunStarted(
        update=checkpoint.update if checkpoint else 0,
        command=command or tuple(sys.argv),
        config=to_dict(config),
        versions=versions(),
        rng_seeds={"run": config.rng_seed},
        threads=torch.get_num_threads(),
        pid=os.getpid(),
        host=socket.gethostname(),
        git_commit=git_commit(),
        resumed_from=checkpoint.path.name if checkpoint else None,
        data_hashes={"first task": data_hash(config)} if trains_hosts(config) else {},
    )


def versions() -> dict[str, str]:
    """Python's version and those of the packages that matter."""
    found = {"python": platform.python_version(), "simic-rl": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def git_commit() -> str | None:
    """The commit of the source, if it lies in a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def data_hash(config: RunConfig) -> str:
    """SHA-256 of the data of the first task that the run draws: tells whether two machines learn the same."""
    data = find_task(config.task, rng_seed=config.rng_seed, data_dir=config.data_dir).data
    digest = hashlib.sha256()
    for tensor in (data.train_x, data.train_y, data.validation_x, data.validation_y):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def require_device(name: str) -> None:
    """Raise unless torch can use the device."""
    checks = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    if name != "cpu" and not checks[name].is_available():
        raise ValueError(no_device(name))


def _check_space(path: Path) -> None:
    free = shutil.disk_usage(path).free
    if free < FREE_BYTES:
        raise OSError(f"{path} has {free / 2**20:.0f} MB left, a run needs {FREE_BYTES / 2**20:.0f}: free some space")


def make_mirrors(config: RunConfig, directory: RunDirectory, first_update: int) -> list[Callable[[Event], None]]:
    chosen: list[Callable[[Event], None]] = []
    if config.tensorboard:
        chosen.append(tensorboard_mirror(directory.path, first_update))
    if config.wandb:
        chosen.append(wandb_mirror(directory.path))
    return chosen
