"""A recorded run with every kind of event, as lines of its two files, and cuts of it."""

from simic.telemetry.events import (
    Anomaly,
    CheckpointSaved,
    EpisodeOutcome,
    EpisodeTrace,
    GamingSuspicion,
    GovernorRollback,
    LifecycleChange,
    PhaseTimings,
    Plateau,
    RunFinished,
    RunStarted,
    Update,
    WorkerFault,
    to_json,
)

HOST = {"group": 0, "env": 0}


def started(update=0, **config):
    config = {"algorithm": "ppo", "task": "mlp", "updates": 9, "ppo": {"target_kl": 0.05}} | config
    return RunStarted(
        update=update,
        command=("simic", "train", "--preset", "quick"),
        config=config,
        versions={"torch": "2"},
        rng_seeds={"run": 0},
        threads=1,
        pid=1,
        host="here",
        time=100.0 + update,
        resumed_from=f"update_{update}" if update else None,
    )


def update_events(update, *, slot="stem"):
    """The events of one update of one host."""
    host = {"update": update, **HOST}
    trace = {
        "stage": ["dormant", "training", "training"],
        "alpha": [0.0, 0.5, 1.0],
        "contribution": [None, None, 0.25],
        "blueprint": ["", "mlp", "mlp"],
    }
    return [
        EpisodeOutcome(
            **host,
            task="mlp-0",
            decisions=2,
            score=70.0 + update,
            metric=0.7,
            episode_return=1.0,
            host_parameters=100,
            parameters=150,
            gain=1.5,
        ),
        LifecycleChange(
            **host,
            decision=0,
            slot=slot,
            blueprint="mlp",
            old_stage="dormant",
            new_stage="training",
            reason="germinate",
        ),
        EpisodeTrace(
            **host,
            task="mlp-0",
            score=70.0 + update,
            metric=0.7,
            host_parameters=100,
            parameters=150,
            segments=((slot, 60), ("head", 40)),
            seed_parameters=((slot, 50),),
            slots={slot: trace},
            steps={
                "action": [f"germinate slot={slot} blueprint=mlp", "wait"],
                "legal_ops": ["wait germinate", "wait"],
                "value": [0.5, 0.25],
                "reward": [1.0, 0.0],
                "val_loss": [0.9, 0.8],
                "val_accuracy": [0.6, 0.7],
            },
            probabilities={"op": [0.5, 0.75], "slot": [1.0, None]},
            reward_terms={"score": [1.0, 0.0]},
        ),
        GamingSuspicion(**host, decision=1, slot=slot, blueprint="mlp", reason="overclaiming", contribution=0.25),
        GovernorRollback(**host, decision=1, verdict="diverged", val_loss=9.0),
        Update(update=update, metrics={"score": 70.0 + update, "gain": 1.5, "kl_after": 0.01, "rollbacks": 0.5}),
        Anomaly(update=update, name="kl_spike", value=0.5, threshold=0.2, where="op"),
        Plateau(update=update, metric="score", best=70.0, best_update=0),
    ]


def process_events(update):
    """What the process notes during and after an update."""
    return [
        WorkerFault(update=update, worker=7, group=0, error="exit code -9", time=110.0 + update),
        CheckpointSaved(update=update + 1, path=f"update_{update + 1}", time=120.0 + update),
        PhaseTimings(
            update=update,
            seconds={"rollout": 3.0, "update": 1.0},
            decisions_per_second=9.0,
            memory_mb={"learner": 64.0},
            time=130.0 + update,
        ),
    ]


def finished(update):
    return RunFinished(update=update, status="done", exit_code=0, seconds=9.0, time=200.0)


def lines(events):
    return [to_json(event).encode() + b"\n" for event in events]


def write_recorded(path, updates=3, *, slot="stem", end=True):
    """A run of some updates, with its end unless it is still running."""
    path.mkdir(parents=True)
    events = [event for update in range(updates) for event in update_events(update, slot=slot)]
    process = [started(), *(event for update in range(updates) for event in process_events(update))]
    (path / "events.jsonl").write_bytes(b"".join(lines(events)))
    (path / "process.jsonl").write_bytes(b"".join(lines(process + [finished(updates)] * end)))
    return path
