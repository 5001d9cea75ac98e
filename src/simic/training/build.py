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
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from simic import __version__
from simic.config import RESUMABLE, RunConfig, read_run_config, to_dict, with_defaults
from simic.control.learned import load_controller, make_network
from simic.policy.agent_state import LEARNING, check_agent_state, naming, upgrade_about
from simic.policy.network import compile_network
from simic.ppo.agent import PPOAgent
from simic.settings import differences
from simic.storage.checkpoint import (
    Checkpoint,
    CheckpointError,
    check_about,
    discard_newer,
    find_checkpoint,
    list_checkpoints,
)
from simic.storage.files import sweep_temporary, write_file
from simic.storage.run_directory import RunDirectory
from simic.tasks.registry import check_data, find_task
from simic.telemetry.anomalies import AnomalyDetector
from simic.telemetry.events import Event, RunStarted
from simic.telemetry.mirrors import tensorboard_mirror, wandb_mirror
from simic.telemetry.recorder import Recorder
from simic.training.episodes import GroupSetup, play_groups
from simic.training.preflight import no_device
from simic.training.profiler import UpdateProfiler
from simic.training.progress import Progress
from simic.training.result import OnUpdate
from simic.training.run import Run
from simic.training.used_settings import trains_hosts
from simic.workers.build import make_pool
from simic.workers.node_probe import probe
from simic.workers.protocol import Check, Pool

PACKAGES = ("torch", "numpy", "gymnasium", "safetensors", "scikit-learn")
FREE_BYTES = 64 * 2**20
"""Free disk space that a new run needs."""


def build_run(
    config: RunConfig,
    directory: RunDirectory | None = None,
    *,
    resume: bool = False,
    init: Path | None = None,
    profile: Path | None = None,
    on_update: OnUpdate | None = None,
    quiet: bool = False,
    say: Callable[[str], None] = print,
) -> Run:
    """A run at its beginning or at its last checkpoint. The caller holds the lock of the directory."""
    checkpoint = None if directory is None else _resume_from(config, directory, resume, say)
    pool = make_pool(play_groups, config.placement, check=data_check(config))
    try:
        nodes = pool.start()  # first: workers load their modules while the rest is built
        if warning := pool.warning():
            say(warning)
        run = _assemble_run(
            config, directory, checkpoint, pool, init=init, profile=profile, on_update=on_update, quiet=quiet, say=say
        )
        if nodes:
            run.started = replace(run.started, nodes={"driver": probe(), **nodes})
        if directory is not None:
            write_config(config, directory)  # last: a run that cannot be built leaves no settings behind
    except BaseException:
        pool.close()
        raise
    return run


def _assemble_run(
    config: RunConfig,
    directory: RunDirectory | None,
    checkpoint: Checkpoint | None,
    pool: Pool,
    *,
    init: Path | None,
    profile: Path | None,
    on_update: OnUpdate | None,
    quiet: bool,
    say: Callable[[str], None],
) -> Run:
    first = checkpoint.update if checkpoint else 0
    agent = make_agent(config)
    if init is not None and checkpoint is None:
        start_from(agent, init, say=say)
    run = Run(
        directory=directory,
        agent=agent,
        setup=make_setup(config),
        pool=pool,
        started=manifest(config, checkpoint),
        profiler=UpdateProfiler(profile, first, config.updates),
        recorder=make_recorder(config, directory, first),
        detector=AnomalyDetector(
            config.thresholds, target_kl=config.ppo.target_kl, max_gradient_norm=config.ppo.max_gradient_norm
        ),
        progress=Progress(quiet=quiet),
        rng_seed=config.rng_seed,
        num_groups=config.num_groups,
        num_tasks=config.num_tasks,
        updates=config.updates,
        checkpoint_every=config.checkpoint_every,
        keep_checkpoints=config.keep,
        record_episodes=config.record,
        escalate_updates=config.thresholds.escalate_updates,
        about=agent.about() | {"settings": _fixed_settings(config)},
        on_update=on_update,
    )
    if checkpoint is not None:
        check_about(replace(checkpoint, about=upgrade_about(checkpoint.about)), agent.about())
        run.load_state(checkpoint.tree)
    else:
        run.recorder.rewind(0)
    return run


def make_agent(config: RunConfig) -> PPOAgent:
    """A new agent; its weights follow from the rng seed."""
    devices = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    if config.device != "cpu" and not devices[config.device].is_available():
        raise ValueError(no_device(config.device))
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
    """Load the networks and normalizers of a saved agent; learning rate, optimizer, counters and rng seed stay new.

    Values depend on the discount: with another gamma the critic's last layers and the scales of rewards and values
    start anew, and only the policy is loaded.
    """
    saved, own = load_controller(path).state, agent.state_dict()
    about = agent.about()
    gamma = about.pop("gamma")
    with naming(path):
        saved = check_agent_state(saved, about)
    theirs = saved["about"].get("gamma")
    kept = {name: own[name] for name in LEARNING}
    if theirs != gamma:
        critic = {name: value for name, value in own["network"].items() if name.startswith("critic.")}
        kept |= {"network": saved["network"] | critic}
        kept |= {name: own[name] for name in ("value_scale", "return_scale")}
        say(f"{path} was trained with gamma {theirs}, this run has {gamma}: only its policy is loaded, not its values")
    agent.load_state_dict(saved | kept | {"about": agent.about()})


def make_setup(config: RunConfig) -> GroupSetup:
    """The settings that all groups of hosts share."""
    hosts = ("task", "data_dir", "group_size", "twins", "episode", "lifecycle", "governor", "hosts", "device")
    names = (*hosts, "lookahead")
    return GroupSetup(reward=config.discounted_reward, **{name: getattr(config, name) for name in names})


def data_check(config: RunConfig) -> Check:
    """What every machine must have before it trains hosts."""
    return partial(check_data, [config.task], config.data_dir)


def make_recorder(config: RunConfig, directory: RunDirectory | None, first_update: int = 0) -> Recorder:
    """The recorder of a run with the mirrors that the config asks for; without a directory it writes nothing."""
    if directory is None:
        if unwritable := [name for name in ("record", "tensorboard", "wandb") if getattr(config, name)]:
            raise ValueError(
                f"{', '.join(unwritable)} writes files, but the run has no directory: give it one with out"
            )
        return Recorder(None, config.level)
    mirrors: list[Callable[[Event], None]] = []
    if config.tensorboard:
        mirrors.append(tensorboard_mirror(directory.path, first_update))
    if config.wandb:
        mirrors.append(wandb_mirror(directory.path))
    return Recorder(directory.path, config.level, mirrors=mirrors)


def write_config(config: RunConfig, directory: RunDirectory) -> None:
    """Write the settings of a run; a directory with settings in it holds a run."""
    text = json.dumps(to_dict(config), indent=1, allow_nan=False) + "\n"
    if not directory.config.exists():
        free = shutil.disk_usage(directory.path).free
        if free < FREE_BYTES:
            needed = f"a run needs {FREE_BYTES / 2**20:.0f}"
            raise OSError(f"{directory.path} has {free / 2**20:.0f} MB left, {needed}: free some space")
    elif directory.config.read_text(encoding="utf-8") == text:
        return  # a resumed run needs no disk space for this
    write_file(directory.config, text)


# Resuming.


def _resume_from(
    config: RunConfig, directory: RunDirectory, resume: bool, say: Callable[[str], None]
) -> Checkpoint | None:
    """The checkpoint to continue from, None for a new run; refuses other settings than the run in the directory has."""
    for path in (directory.path, directory.checkpoints, directory.episodes):
        sweep_temporary(path)
    if not directory.config.is_file():
        if list_checkpoints(directory.checkpoints):
            raise FileNotFoundError(
                f"{directory.config} is missing, but there are checkpoints: put it back, or choose another --out"
            )
        return None
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
        _check_settings(config, directory, found.checkpoint)
        discard_newer(directory.checkpoints, found.checkpoint.update)
        say(f"resuming after update {found.checkpoint.update}")
    return found.checkpoint


def _check_settings(config: RunConfig, directory: RunDirectory, checkpoint: Checkpoint) -> None:
    """Raise if a checkpoint was made with other settings, or has more updates than are asked for."""
    if config.updates < checkpoint.update:
        raise ValueError(
            f"the run in {directory.path} has done {checkpoint.update} updates: --updates {config.updates} is less"
        )
    theirs = checkpoint.about.get("settings")
    for name, mine, its in differences(_fixed_settings(config), with_defaults(theirs)) if theirs else ():
        if name not in RESUMABLE:
            raise CheckpointError(
                f"{directory.config} has {name} = {mine}, not {its} as {checkpoint.path.name} was made with: "
                "it belongs to another run; put this run's back"
            )


def _fixed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings that cannot change when a run is resumed."""
    settings = to_dict(config)
    for name in RESUMABLE:
        *parents, last = name.split(".")
        table = settings
        for parent in parents:
            table = table[parent]
        del table[last]
    return settings


# The manifest.


def manifest(config: RunConfig, checkpoint: Checkpoint | None = None) -> RunStarted:
    """Everything that is needed to repeat a run."""
    return RunStarted(
        update=checkpoint.update if checkpoint else 0,
        command=tuple(sys.argv),
        config=to_dict(config),
        versions=versions(),
        rng_seeds={"run": config.rng_seed},
        threads=torch.get_num_threads(),
        pid=os.getpid(),
        host=socket.gethostname(),
        git_commit=_git_commit(),
        resumed_from=checkpoint.path.name if checkpoint else None,
        data_hashes={"first task": _data_hash(config)} if trains_hosts(config) else {},
    )


def versions() -> dict[str, str]:
    """Versions of Python, simic and the packages that results depend on."""
    found = {"python": platform.python_version(), "simic-rl": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _git_commit() -> str | None:
    """The commit of the source, if it is in a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _data_hash(config: RunConfig) -> str:
    """SHA-256 of the first task's data: shows whether two machines train on the same data."""
    data = find_task(config.task, rng_seed=config.rng_seed, data_dir=config.data_dir).data
    digest = hashlib.sha256()
    for tensor in (data.train_x, data.train_y, data.validation_x, data.validation_y):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
