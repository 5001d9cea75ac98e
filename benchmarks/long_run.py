"""Write a run directory of many events, as a long training would: what a view must open fast."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from simic.telemetry.events import (
    CheckpointSaved,
    EpisodeOutcome,
    EpisodeTrace,
    Event,
    LifecycleChange,
    PhaseTimings,
    RunStarted,
    Update,
    to_json,
)
from simic.telemetry.series import Series, rounded

GROUPS, HOSTS, TRACED, CHANGES, DECISIONS = 4, 32, 4, 5, 24
"""Of an update: groups, hosts of each, how many are traced; stage changes and decisions of a host."""
BLUEPRINTS = ("mlp", "norm", "glu", "low_rank", "widen")
STAGES = ("dormant", "training", "blending", "holding", "fossilized", "pruned")
METRICS = [f"{name}/{part}" for name in ("head_entropy", "head_kl", "reward", "op") for part in range(10)]


def write_long_run(directory: Path, events: int = 100_000) -> Path:
    """A run whose events.jsonl has `events` lines; the last update may be cut."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    updates = 0
    with open(directory / "events.jsonl", "w", encoding="utf-8") as file:
        for event in itertools.islice(_events(rng), events):
            file.write(to_json(event) + "\n")
            updates = event.update
    with open(directory / "process.jsonl", "w", encoding="utf-8") as file:
        for event in _process(updates):
            file.write(to_json(event) + "\n")
    return directory


def _events(rng: np.random.Generator) -> Iterator[Event]:
    for update in itertools.count():
        for group in range(GROUPS):
            for env in range(HOSTS):
                yield _outcome(rng, update, group, env)
            for env, change in itertools.product(range(HOSTS), range(CHANGES)):
                yield _change(rng, update, group, env, change)
            for env in range(TRACED):
                yield _trace(rng, update, group, env)
        numbers = rng.normal(size=len(METRICS))
        learned = {"score": 80 + update / 100, "gain": 1.0, "kl_after": 0.01, "explained_variance": 0.5}
        yield Update(update=update, metrics=learned | dict(zip(METRICS, numbers.tolist(), strict=True)))


def _outcome(rng: np.random.Generator, update: int, group: int, env: int) -> Event:
    return EpisodeOutcome(
        update=update,
        group=group,
        env=env,
        task=f"mlp-train-{group}",
        decisions=DECISIONS,
        score=float(rng.normal(80, 10)),
        metric=float(rng.random()),
        episode_return=float(rng.normal()),
        host_parameters=371,
        parameters=int(rng.integers(371, 2000)),
        operations={"wait": 20, "germinate": 2, "prune": 2},
        seeds={"fossilized": 1, "pruned": 1, "dropped": 0},
        gain=float(rng.normal()),
    )


def _change(rng: np.random.Generator, update: int, group: int, env: int, number: int) -> Event:
    readiness = {name: float(rng.random()) for name in ("age", "alpha", "contribution", "gradient_norm")}
    return LifecycleChange(
        update=update,
        group=group,
        env=env,
        decision=4 * number,
        slot="stem",
        blueprint=BLUEPRINTS[env % len(BLUEPRINTS)],
        old_stage=STAGES[number],
        new_stage=STAGES[number + 1],
        reason="time" if number else "germinate",
        readiness=readiness,
    )


def _trace(rng: np.random.Generator, update: int, group: int, env: int) -> Event:
    numbers = {name: rounded(rng.random(DECISIONS)) for name in ("value", "reward", "val_loss", "val_accuracy")}
    waits: dict[str, Series] = {"action": ["wait"] * DECISIONS, "legal_ops": ["wait germinate"] * DECISIONS}
    states = range(DECISIONS + 1)
    slot: dict[str, Series] = {
        "stage": ["training" if state > 20 else "dormant" for state in states],
        "alpha": [0.0 for _ in states],
        "contribution": [None for _ in states],
        "blueprint": ["mlp" if state > 20 else "" for state in states],
    }
    return EpisodeTrace(
        update=update,
        group=group,
        env=env,
        task=f"mlp-train-{group}",
        score=80.0,
        metric=0.8,
        host_parameters=371,
        parameters=400,
        segments=(("stem", 320), ("head", 51)),
        seed_parameters=(("stem", 29),),
        slots={"stem": slot},
        steps=waits | numbers,
        probabilities={"op": rounded(rng.random(DECISIONS))},
        reward_terms={"score": rounded(rng.random(DECISIONS))},
    )


def _process(updates: int) -> Iterator[Event]:
    yield RunStarted(
        update=0,
        command=("simic", "train", "--preset", "quick"),
        config={"algorithm": "ppo", "task": "mlp", "updates": 2 * updates, "ppo": {"target_kl": 0.05}},
        versions={},
        rng_seeds={"run": 0},
        threads=1,
        pid=1,
        host="benchmark",
        time=0.0,
    )
    for update in range(updates):
        yield CheckpointSaved(update=update + 1, path=f"update_{update + 1:06d}.safetensors", time=5.0 * update + 5)
        seconds = {"rollout": 4.0, "update": 1.0}
        yield PhaseTimings(update=update, seconds=seconds, decisions_per_second=700.0, time=5.0 * update + 5)
