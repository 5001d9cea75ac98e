"""Tiny runs: real in everything but the task, whose hosts learn in a millisecond. And hand-made episode records."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from simic.config import PRESETS, RunConfig
from simic.environment.episodes import EpisodeRecord, PolicyRecord, TwinRecord
from simic.lifecycle.actions import HEADS, Op
from simic.lifecycle.slots import SlotState
from simic.settings import override
from simic.storage.checkpoint import find_checkpoint
from simic.storage.run_directory import RunDirectory
from simic.tasks.data import Data
from simic.tasks.hosts import plain_mlp_host, slot_names
from simic.tasks.task import Task
from simic.telemetry.events import Event
from simic.telemetry.reader import read_events
from simic.training.build import build_run
from simic.training.loop import train
from simic.training.run import Run

E = TypeVar("E", bound=Event)

SETTINGS: dict[str, Any] = {
    "updates": 2,
    "num_groups": 1,
    "group_size": 2,
    "workers": 0,
    "compare": 0,
    "episode": {"horizon": 3},
    "policy": {"hidden_size": 16, "encoding_size": 16},
    "ppo": {
        **{"ppo_epochs": 1, "num_minibatches": 2, "learning_rate": 5e-4, "learning_rate_schedule": "constant"},
        "anneal_updates": 16,  # a run that is extended is then exactly one that was longer from the start
    },
}
"""What tiny runs differ in from the quick preset."""


def make_task(**changes: Any) -> Task:
    """Tell the sign of the first of four numbers; two slots."""
    generator = torch.Generator().manual_seed(0)
    parts: dict[str, Tensor] = {}
    for name, size in (("train", 32), ("validation", 64), ("test", 8)):
        x = torch.randn(size, 4, generator=generator)
        parts |= {f"{name}_x": x, f"{name}_y": (x[:, 0] > 0).long()}
    task = Task(
        name="tiny",
        data=Data(**parts, num_classes=2),
        make_host=lambda: plain_mlp_host(4, 4, 2, 2),
        slots=slot_names(2),
        batch_size=32,
        learning_rate=1e-2,
    )
    return replace(task, **changes)


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Nested settings with some changed."""
    result = dict(one)
    for name, value in other.items():
        nested = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if nested else value
    return result


def make_config(**changes: Any) -> RunConfig:
    """The config of a tiny run."""
    return override(PRESETS["quick"][1], merged(SETTINGS, changes))


def play_run(
    path: Path, plant: Callable[[Run], None] = lambda run: None, *, resume: bool = False, **changes: Any
) -> tuple[int, Run]:
    """A whole run, with whatever `plant` does to it before it begins; its exit code and what is left of it."""
    directory = RunDirectory(path)
    with directory.lock():
        run = build_run(make_config(**changes), directory, resume=resume, quiet=True, say=lambda text: None)
        plant(run)
        return train(run).exit_code, run


def told(path: Path, kind: type[E]) -> list[E]:
    """The events of a kind."""
    return list(read_events(path, [kind]))


def kept(path: Path) -> dict[str, Any]:
    """The state in the newest checkpoint."""
    checkpoint = find_checkpoint(path / "checkpoints").checkpoint
    assert checkpoint is not None
    return checkpoint.tree


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and shape, to the last bit; NaN equals NaN."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def make_record(steps: int = 3, hosts: int = 1, slots: int = 1, **changes: Any) -> EpisodeRecord:
    """Hosts that wait until their horizon; `changes` replace whole fields, also those of slots, policy and twins."""
    t, n, s = steps, hosts, slots
    dormant = SlotState.dormant(n, s)
    slot_fields = {f.name: np.repeat(getattr(dormant, f.name)[None], t + 1, axis=0) for f in fields(dormant)}
    slot_fields |= {name: changes.pop(name) for name in slot_fields if name in changes}
    policy = PolicyRecord(
        observation={},
        mask=np.ones((t, n, 1, 1), dtype=bool),
        probability=changes.pop("probability", np.ones((t, n, len(HEADS)))),
        value=changes.pop("value", np.zeros((t, n))),
    )
    flags = np.zeros((t, n, s), dtype=bool)
    twins = TwinRecord(
        score=changes.pop("twin_score", np.full(n, np.nan)),
        val_accuracy=changes.pop("twin_accuracy", np.full((t + 1, n), np.nan)),
        gaming=changes.pop("gaming", {"overclaiming": flags, "indispensable": flags}),
    )
    record: dict[str, Any] = {
        "task": "tiny",
        "slot_names": tuple("abcdef"[:s]),
        "blueprint_names": ("small", "large"),
        "host_parameters": 100,
        "action": np.zeros((t, n, len(HEADS)), dtype=np.int64),
        "legal_ops": np.ones((t, n, len(Op)), dtype=bool),
        "valid": np.ones((t, n), dtype=bool),
        "verdict": np.zeros((t, n), dtype=np.int64),
        "slots": SlotState(**slot_fields),
        "val_loss": np.ones((t + 1, n)),
        "val_accuracy": np.full((t + 1, n), 0.5),
        "train_loss": np.ones((t + 1, n)),
        "host_gradient": np.ones((t + 1, n)),
        "quality": np.full((t + 1, n), 0.5),
        "parameters": np.full((t + 1, n), 100),
        "exported_parameters": np.full(n, 100),
        "score": np.full(n, 50.0),
        "seed_parameters": np.zeros((t + 1, n, s), dtype=np.int64),
        "segments": {"stem": 60, "head": 40},
        "reward": np.zeros((t, n)),
        "reward_terms": {},
        "policy": policy,
        "twins": twins,
    }
    return EpisodeRecord(**(record | changes))
